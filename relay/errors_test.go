package relay_test

import (
	"errors"
	"testing"

	"github.com/oncemill/oncemill/relay"
)

func TestInterrupted_MatchesItsKindsAndItsCause(t *testing.T) {
	t.Parallel()
	cause := errors.New("channel replaced")
	err := relay.Interrupted(cause)
	for _, want := range []error{relay.ErrInterrupted, relay.ErrUnavailable, cause} {
		if !errors.Is(err, want) {
			t.Errorf("%v does not match %v", err, want)
		}
	}
	if errors.Is(err, relay.ErrRefused) || errors.Is(relay.Unavailable(cause), relay.ErrInterrupted) {
		t.Error("kinds are mixed up")
	}
	if relay.Interrupted(nil) != nil {
		t.Error("Interrupted(nil) is not nil")
	}
}
