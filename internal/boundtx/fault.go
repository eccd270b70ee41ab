package boundtx

import (
	"context"
	"errors"
)

// Fault is a fault of a COMMIT, injected by a test.
type Fault int

const (
	noFault          Fault = iota
	FaultNotSent           // the connection is lost before the COMMIT arrives
	FaultNotAnswered       // the connection is lost before its answer arrives
)

type faultKey struct{}

// WithFault returns a context under which Begin returns a transaction with that fault. It
// is for packages that users test with, such as inboxtest.
func WithFault(ctx context.Context, f Fault) context.Context {
	return context.WithValue(ctx, faultKey{}, f)
}

var errFault = errors.New("connection lost (by the test)")

// faulty returns commit with the fault of ctx.
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
