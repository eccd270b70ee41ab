package testserver

import (
	"context"
	"sync"
	"testing"
	"time"
)

// Run runs fn until the test ends or stop is called. It must then return nil.
func Run(t testing.TB, fn func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- fn(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(MaxWait):
			t.Error("Run does not return")
		}
	})
	t.Cleanup(stop)
	return stop
}
