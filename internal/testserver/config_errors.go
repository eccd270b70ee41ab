package testserver

import (
	"errors"

	"github.com/oncemill/oncemill"
)

// ConfigErrors returns every configuration error joined in err.
func ConfigErrors(err error) []*oncemill.ConfigError {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []*oncemill.ConfigError
		for _, e := range joined.Unwrap() {
			all = append(all, ConfigErrors(e)...)
		}
		return all
	}
	var one *oncemill.ConfigError
	if errors.As(err, &one) {
		return []*oncemill.ConfigError{one}
	}
	return nil
}
