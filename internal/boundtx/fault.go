package boundtx

import (
	"context"
	"errors"
)

// Fault is what goes wrong with a COMMIT, in a test.
type Fault int

const (
	noFault          Fault = iota
	FaultNotSent           // the connection is lost before the COMMIT arrives
	FaultNotAnswered       // the connection is lost before its answer arrives
)

type faultKey struct{}

// WithFault returns a context under which Begin returns a transaction with that fault.
// For packages that help users to test.
func WithFault(ctx context.Context, f Fault) context.Context {
	return context.WithValue(ctx, faultKey{}, f)
}

var errFault = errors.New("connection lost (by the test)")

// faulty returns commit, with the fault that ctx asks for.
func faulty(ctx context.Context, commit func() error) func() error {
	fault, _ := ctx.Value(faultKey{}).(Fault)
	if fault == noFault {
		return commit
	}
	return func() error {
		if fault == FaultNotAnswered {
			if err := commit(); err != nil {
				return err
			}
		}
		return errFault
	}
}
