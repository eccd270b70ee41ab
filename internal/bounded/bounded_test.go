package bounded_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDo_ReturnsWhatTheCallReturns(t *testing.T) {
	calls := bounded.New(1)
	n, err := bounded.Do(t.Context(), calls, time.Minute, func(context.Context) (int, error) { return 7, nil })
	if n != 7 || err != nil {
		t.Errorf("got %d, %v", n, err)
	}
	failed := errors.New("failed")
	if _, err := bounded.Do(t.Context(), calls, time.Minute, func(context.Context) (int, error) { return 0, failed }); !errors.Is(err, failed) {
		t.Errorf("got %v", err)
	}
}

func TestDo_AbandonsACallThatIgnoresItsContext(t *testing.T) {
	calls := bounded.New(2)
	release := make(chan struct{})
	hang := func(context.Context) (int, error) { <-release; return 1, nil }
	for range 2 {
		n, err := bounded.Do(t.Context(), calls, time.Millisecond, hang)
		if n != 0 || !errors.Is(err, bounded.ErrAbandoned) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %d, %v", n, err)
		}
	}
	if n := calls.Abandoned(); n != 2 {
		t.Errorf("%d abandoned", n)
	}
	idle := calls.Idle()
	select {
	case <-idle:
		t.Error("idle with two abandoned calls")
	default:
	}
	close(release)
	<-idle
	if _, err := bounded.Do(t.Context(), calls, time.Minute, hang); err != nil {
		t.Errorf("after they returned: %v", err)
	}
}

// A pool may hold many dead connections. A few calls at a time use them up, and the first
// answer of a new connection admits calls again.
func TestDo_RefusesCallsUntilOneIsAnswered(t *testing.T) {
	const most, trials = 2, 4
	calls, release := bounded.New(most), make(chan struct{})
	hang := func(context.Context) (int, error) { <-release; return 0, nil }
	answer := func(context.Context) (int, error) { return 7, nil }
	var group sync.WaitGroup
	for range most {
		group.Go(func() { _, _ = bounded.Do(t.Context(), calls, time.Millisecond, hang) })
	}
	group.Wait()
	var running sync.WaitGroup
	running.Add(trials)
	ctx, cancel := context.WithCancel(t.Context())
	for range trials {
		group.Go(func() {
			_, _ = bounded.Do(ctx, calls, time.Hour, func(ctx context.Context) (int, error) { running.Done(); return hang(ctx) })
		})
	}
	running.Wait()
	if n, err := bounded.Do(t.Context(), calls, time.Minute, answer); n != 0 || !errors.Is(err, bounded.ErrTooManyAbandoned) {
		t.Errorf("beside the trials: %d, %v", n, err)
	}
	cancel()
	group.Wait()
	if n := calls.Abandoned(); n != most+trials {
		t.Errorf("%d abandoned", n)
	}
	for range 2 * trials {
		if n, err := bounded.Do(t.Context(), calls, time.Minute, answer); n != 7 || err != nil {
			t.Errorf("when there are answers again: %d, %v", n, err)
		}
	}
	for range most { // the limit applies again
		group.Go(func() { _, _ = bounded.Do(t.Context(), calls, time.Millisecond, hang) })
	}
	group.Wait()
	idle := calls.Idle()
	close(release)
	<-idle
}

func TestDo_AbandonsWhenTheCallersContextEnds(t *testing.T) {
	calls := bounded.New(1)
	ctx, cancel := context.WithCancel(t.Context())
	release, started := make(chan struct{}), make(chan struct{})
	go func() { <-started; cancel() }()
	_, err := bounded.Do(ctx, calls, time.Hour, func(context.Context) (int, error) { close(started); <-release; return 0, nil })
	if !errors.Is(err, bounded.ErrAbandoned) {
		t.Errorf("got %v", err)
	}
	if _, err := bounded.Do(ctx, calls, time.Hour, func(context.Context) (int, error) { return 0, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
	idle := calls.Idle()
	close(release)
	<-idle
}

func TestDo_PanicsInTheCaller(t *testing.T) {
	defer func() {
		p, ok := recover().(*oncemill.PanicError)
		if !ok || p.Value != "lost" || !bytes.Contains(p.Stack, []byte("TestDo_PanicsInTheCaller")) {
			t.Errorf("recovered %v", p)
		}
	}()
	_, _ = bounded.Do(t.Context(), bounded.New(1), time.Minute, func(context.Context) (int, error) { panic("lost") })
}

// A function that ends its goroutine does not take its caller along.
func TestDo_ReportsACallThatEndsItsGoroutine(t *testing.T) {
	_, err := bounded.Do(t.Context(), bounded.New(1), time.Minute, func(context.Context) (int, error) {
		runtime.Goexit()
		return 1, nil
	})
	if err == nil || !strings.Contains(err.Error(), "goroutine") {
		t.Errorf("got %v", err)
	}
}
