package mill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// failures collects the errors of all stages.
type failures struct {
	mu    sync.Mutex
	errs  []error
	first chan struct{} // closed with the first one
}

func newFailures() *failures { return &failures{first: make(chan struct{})} }

func (f *failures) add(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.errs = append(f.errs, err); len(f.errs) == 1 {
		close(f.first)
	}
}

func (f *failures) joined() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.errs...)
}

// stage is a number of parts that stop at the same time.
type stage struct {
	ctx    context.Context //nolint:containedctx // that of the parts
	cancel context.CancelFunc
	failed *failures
	parts  sync.WaitGroup

	mu      sync.Mutex
	running []string // names of parts; guarded by mu
}

func newStage(ctx context.Context, failed *failures) *stage {
	s := &stage{failed: failed}
	s.ctx, s.cancel = context.WithCancel(ctx)
	return s
}

// start runs a part. That its context has ended is no error.
func (s *stage) start(name string, run func(ctx context.Context) error) {
	s.mu.Lock()
	s.running = append(s.running, name)
	s.mu.Unlock()
	s.parts.Go(func() {
		defer s.leave(name)
		err := errEndedGoroutine // unless run returns, or panics
		defer func() {
			if err != nil && (s.ctx.Err() == nil || !sqlerr.Canceled(err)) {
				s.failed.add(fmt.Errorf("%s: %w", name, err))
			}
		}()
		err = nopanic.Call(func() error { return run(s.ctx) })
	})
}

// startEndless runs a part that must not return before its context ends.
func (s *stage) startEndless(name string, run func(ctx context.Context) error) {
	s.start(name, func(ctx context.Context) error {
		err := run(ctx)
		if err == nil && ctx.Err() == nil {
			return errStoppedItself
		}
		return err
	})
}

func (s *stage) leave(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.running, name)
	s.running = slices.Delete(s.running, i, i+1)
}

// done returns a channel that is closed when all parts have returned.
func (s *stage) done() <-chan struct{} {
	done := make(chan struct{})
	go func() {
		s.parts.Wait()
		close(done)
	}()
	return done
}

// wait waits for the parts, and returns the names of those that have not returned in time.
func (s *stage) wait(limit time.Duration) []string {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-s.done():
		return nil
	case <-timer.C:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.running)
}

// stop ends the context of the parts and waits for them.
func (s *stage) stop(limit time.Duration) []string {
	s.cancel()
	return s.wait(limit)
}
