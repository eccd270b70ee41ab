package main

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

func TestTraffic_IsTheSameEveryTime(t *testing.T) {
	a, b := newTraffic(keyCount), newTraffic(keyCount)
	keys := map[int]bool{}
	for i := range 50_000 {
		if a.id(i) != b.id(i) || a.key(i) != b.key(i) || !slices.Equal(a.payload(i), b.payload(i)) {
			t.Fatalf("message %d differs", i)
		}
		if back, err := a.index(a.id(i)); err != nil || back != i {
			t.Fatalf("index(%q) = %d, %v", a.id(i), back, err)
		}
		if len(a.id(i)) != 36 || len(a.payload(i)) != payloadSize {
			t.Fatalf("message %d: id %q, %d bytes", i, a.id(i), len(a.payload(i)))
		}
		keys[a.keyNumber(i)] = true
	}
	if len(keys) < keyCount*9/10 {
		t.Errorf("50,000 messages use %d of %d keys", len(keys), keyCount)
	}
}

func TestLedger_FindsEveryFault(t *testing.T) {
	const n = 1000
	traffic := newTraffic(keyCount)
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	// Two messages of one key, the second right behind the first in time.
	early, late := sameKey(t, traffic, n)
	swapped := slices.Clone(all)
	swapped[early], swapped[late] = late, early
	for name, c := range map[string]struct {
		arrivals []int
		ordered  bool
		bad      bool
	}{
		"all in order":       {all, true, false},
		"one missing":        {all[1:], true, true},
		"one twice":          {append(slices.Clone(all), 7), true, true},
		"a foreign one":      {append(slices.Clone(all), n), true, true},
		"a key out of order": {swapped, true, true},
		"order is not asked": {swapped, false, false},
	} {
		book := newLedger(traffic, n)
		for _, i := range c.arrivals {
			book.arrive(traffic.id(i), traffic.payload(i))
		}
		if err := book.check(c.ordered); (err != nil) != c.bad {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, arrive := range map[string]func(*ledger){
		"a damaged payload": func(l *ledger) { l.arrive(traffic.id(0), traffic.payload(1)) },
		"an unknown id":     func(l *ledger) { l.arrive("someone", traffic.payload(0)) },
	} {
		book := newLedger(traffic, 1)
		arrive(book)
		if book.check(true) == nil {
			t.Errorf("%s went unnoticed", name)
		}
	}
}

func sameKey(t *testing.T, traffic *traffic, n int) (early, late int) {
	t.Helper()
	latest := map[int]int{}
	for i := range n {
		if first, ok := latest[traffic.keyNumber(i)]; ok {
			return first, i
		}
		latest[traffic.keyNumber(i)] = i
	}
	t.Fatal("no key comes twice")
	return 0, 0
}

func TestLedgerSink_ConfirmsAndChecksAcrossLanes(t *testing.T) {
	const n = 2000
	traffic := newTraffic(keyCount)
	deliver := func(s *ledgerSink, i int) {
		id, key := traffic.id(i), traffic.key(i)
		m := &relay.Message{Lane: outbox.Lane(key, id), MessageID: id, Key: key, Payload: traffic.payload(i)}
		outcomes := 0
		s.Publish(t.Context(), []*relay.Message{m}, func(_ *relay.Message, err error) {
			if outcomes++; err != nil {
				t.Errorf("message %d: %v", i, err)
			}
		})
		if outcomes != 1 {
			t.Errorf("message %d has %d outcomes", i, outcomes)
		}
	}
	whole := newLedgerSink(traffic, n)
	for i := range n {
		deliver(whole, i)
	}
	if err := whole.check(true); err != nil {
		t.Error(err)
	}
	short := newLedgerSink(traffic, n)
	for i := range n - 1 {
		deliver(short, i)
	}
	if short.check(true) == nil {
		t.Error("a missing message went unnoticed")
	}
}

func TestWatchedSink_ReportsConfirmsAndOtherOutcomes(t *testing.T) {
	left := newCountdown(2)
	s := &watchedSink{Sink: fixedSink{nil}, confirmed: func(*relay.Message) { left.count() }}
	for range 2 {
		select {
		case <-left.all:
			t.Fatal("done too early")
		default:
		}
		s.Publish(t.Context(), []*relay.Message{{}}, func(*relay.Message, error) {})
	}
	if err := errors.Join(left.await(t.Context()), s.failed()); err != nil {
		t.Error(err)
	}
	lost := errors.New("lost")
	s.Sink = fixedSink{lost}
	s.Publish(t.Context(), []*relay.Message{{}}, func(*relay.Message, error) {})
	if err := s.failed(); !errors.Is(err, lost) {
		t.Errorf("error %v, want %v", err, lost)
	}
}

// fixedSink has one outcome for all messages.
type fixedSink struct{ err error }

func (s fixedSink) Run(context.Context) error { return nil }

func (s fixedSink) Publish(_ context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	for _, m := range msgs {
		done(m, s.err)
	}
}

func TestStopwatch_TakesCommitToConfirmAndFindsMissingConfirms(t *testing.T) {
	const n = 20
	traffic := newTraffic(keyCount)
	start := func(count int) func(context.Context, *stopwatch) (pacedRun, error) {
		return func(_ context.Context, watch *stopwatch) (pacedRun, error) {
			return pacedRun{stop: func() error { return nil }, commit: func(_ context.Context, first, end int) error {
				for i := first; i < min(end, count); i++ {
					time.AfterFunc(time.Second, func() { watch.confirm(traffic.id(i)) })
				}
				return nil
			}}, nil
		}
	}
	synctest.Test(t, func(t *testing.T) {
		watch := newStopwatch(traffic, n)
		if err := watch.time(t.Context(), 10, 2, start(n)); err != nil {
			t.Fatal(err)
		}
		if q := watch.quantiles(0, 0.5, 0.99); q[0] != 1000 || q[1] != 1000 {
			t.Errorf("quantiles %v, want 1,000 ms", q)
		}
		// The last transaction is due 1.8 s after the first, and confirmed after 1 s.
		if rate, want := watch.rate(), n/2.8; math.Abs(rate-want) > 0.01 {
			t.Errorf("rate %v, want %v", rate, want)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := newStopwatch(traffic, n).time(ctx, 10, 2, start(n-1)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v with an unconfirmed message", err)
		}
	})
}
