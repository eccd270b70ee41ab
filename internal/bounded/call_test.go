package bounded

import (
	"context"
	"errors"
	"math"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill"
)

// What a user's function does is an error of that function, and says nothing about a database.
func TestCall_ReportsWhatAFunctionDoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		call := func(c *Calls, f func(ctx context.Context) error) error { return Call(t.Context(), c, time.Minute, f) }
		failed := errors.New("failed")
		if err := call(New(1), func(context.Context) error { return failed }); !errors.Is(err, failed) {
			t.Errorf("an error: %v", err)
		}
		if err := call(New(1), func(context.Context) error { panic("x") }); !errors.As(err, new(*oncemill.PanicError)) {
			t.Errorf("a panic: %v", err)
		}
		if err := call(New(1), func(context.Context) error { runtime.Goexit(); return nil }); !errors.Is(err, errEnded) {
			t.Errorf("the end of the goroutine: %v", err)
		}
		release := make(chan struct{})
		hang := func(context.Context) error { <-release; return nil }
		if err := call(New(1), hang); !errors.Is(err, ErrNotReturned) || errors.Is(err, ErrAbandoned) {
			t.Errorf("no return: %v", err)
		}
		full := New(0)
		for range mostTrials {
			go func() { _ = Call(t.Context(), full, math.MaxInt64, hang) }()
		}
		synctest.Wait()
		if err := call(full, hang); err == nil || errors.Is(err, ErrNotReturned) || errors.Is(err, ErrTooManyAbandoned) {
			t.Errorf("not called: %v", err)
		}
		close(release)
	})
}
