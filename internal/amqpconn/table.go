package amqpconn

import (
	"fmt"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"
)

const maxShortString = 255

// CheckShort returns the problem of a short string, or "".
func CheckShort(s string) (problem string) {
	switch {
	case len(s) > maxShortString:
		return "has more than 255 bytes"
	case !utf8.ValidString(s):
		return "is not UTF-8"
	}
	return ""
}

// CheckTable returns an error for values that amqp091-go cannot encode.
func CheckTable(t amqp.Table) error {
	if err := t.Validate(); err != nil {
		return err
	}
	_, err := TableSize(t)
	return err
}

// TableSize returns the encoded size of t, rounded up.
func TableSize(t amqp.Table) (int, error) {
	size := 4
	for name, value := range t {
		if problem := CheckShort(name); problem != "" {
			return 0, NameError(name, problem)
		}
		n, err := fieldSize(value)
		if err != nil {
			return 0, err
		}
		size += 1 + len(name) + n
	}
	return size, nil
}

func fieldSize(value any) (int, error) {
	switch v := value.(type) {
	case string:
		return 5 + len(v), nil
	case []byte:
		return 5 + len(v), nil
	case amqp.Table:
		n, err := TableSize(v)
		return 1 + n, err
	case []any:
		size := 5
		for _, element := range v {
			n, err := fieldSize(element)
			if err != nil {
				return 0, err
			}
			size += n
		}
		return size, nil
	}
	return 9, nil // type and at most 8 bytes
}

// NameError returns the error for a bad name in a table.
func NameError(name, problem string) error { return fmt.Errorf("the name %.40q… %s", name, problem) }
