package mill

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/contain"
)

// stage is a number of parts that stop at the same time.
type stage struct {
	ctx    context.Context //nolint:containedctx // that of the parts
	cancel context.CancelFunc
	failed chan<- error // takes the first error of all stages
	parts  sync.WaitGroup

	mu      sync.Mutex
	running []string // names of parts; guarded by mu
}

func newStage(ctx context.Context, failed chan<- error) *stage {
	s := &stage{failed: failed}
	s.ctx, s.cancel = context.WithCancel(ctx)
	return s
}

func (s *stage) start(name string, run func(ctx context.Context) error) {
	s.mu.Lock()
	s.running = append(s.running, name)
	s.mu.Unlock()
	s.parts.Go(func() {
		defer s.leave(name) // also if run ends its goroutine
		err := contain.Call(func() error { return run(s.ctx) })
		if err == nil {
			return
		}
		select {
		case s.failed <- fmt.Errorf("%s: %w", name, err):
		default: // another was first
		}
	})
}

func (s *stage) leave(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.running, name)
	s.running = slices.Delete(s.running, i, i+1)
}

// stop ends the context of the parts, waits for them, and returns the names of those that
// have not returned in time.
func (s *stage) stop(limit time.Duration) []string {
	s.cancel()
	done := make(chan struct{})
	go func() {
		s.parts.Wait()
		close(done)
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.running)
}
