package bounded_test

import (
	"bytes"
	"context"
	"errors"
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

func TestDo_AbandonsACallThatDoesNotHeedItsContext(t *testing.T) {
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
	ran := false
	if _, err := bounded.Do(t.Context(), calls, time.Minute, func(context.Context) (int, error) { ran = true; return 0, nil }); !errors.Is(err, bounded.ErrTooManyAbandoned) || ran {
		t.Errorf("got %v, ran %v", err, ran)
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
