package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func newTestBench() *bench {
	return &bench{
		traffic: newTraffic(keyCount), pairs: 3, log: slog.New(slog.DiscardHandler),
		progress: newProgress(io.Discard, nil, 3),
	}
}

func TestRounds_WarmUpThenTakeTurns(t *testing.T) {
	var order []string
	sized := func(name string, n int) side {
		return side{name: name, n: n, fixed: true, run: func(_ context.Context, n int) (values, error) {
			order = append(order, fmt.Sprint(name, n))
			return values{float64(n)}, nil
		}}
	}
	measured, err := newTestBench().rounds(t.Context(), 3, []side{sized("a", 100), sized("b", 50)})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"a10", "b5", "a100", "b50", "b50", "a100", "a100", "b50"}; !slices.Equal(order, want) {
		t.Errorf("order %v, want %v", order, want)
	}
	if got, want := (figure{0, 0}).of(measured), []float64{100, 100, 100}; !slices.Equal(got, want) {
		t.Errorf("values of a: %v, want %v", got, want)
	}
	if got, want := (figure{1, 0}).of(measured), []float64{50, 50, 50}; !slices.Equal(got, want) {
		t.Errorf("values of b: %v, want %v", got, want)
	}
}

func TestRounds_GiveASlowSideFewerMessages(t *testing.T) {
	for _, c := range []struct {
		rate float64
		want int
	}{
		{1e6, 10_000}, {500, 2000}, {1, 1000},
	} {
		var last int
		sides := []side{{name: "a", n: 10_000, run: func(_ context.Context, n int) (values, error) {
			last = n
			return values{c.rate}, nil
		}}}
		if _, err := newTestBench().rounds(t.Context(), 1, sides); err != nil {
			t.Fatal(err)
		}
		if last != c.want || sides[0].n != c.want {
			t.Errorf("%v a second: a run of %d, and %d reported; want %d", c.rate, last, sides[0].n, c.want)
		}
	}
}

func TestRounds_OneIsEnoughPastTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTestBench()
		slow := side{name: "a", n: 1, fixed: true, run: func(context.Context, int) (values, error) {
			time.Sleep(wholeLimit/3 + time.Second)
			return values{1}, nil
		}}
		for _, want := range []int{2, 1} { // the warm-up and two rounds, then the limit has passed
			if measured, err := b.rounds(t.Context(), 3, []side{slow}); err != nil || len(measured[0]) != want {
				t.Errorf("%d rounds, %v; want %d", len(measured[0]), err, want)
			}
		}
		b.progress.unlimited = true
		if measured, err := b.rounds(t.Context(), 3, []side{slow}); err != nil || len(measured[0]) != 3 {
			t.Errorf("%d rounds, %v; without a limit, want 3", len(measured[0]), err)
		}
	})
}

func TestRounds_FailWhenACheckFails(t *testing.T) {
	lost := errors.New("lost")
	calls := 0
	s := side{name: "a", n: 10, run: func(context.Context, int) (values, error) {
		if calls++; calls == 3 {
			return values{100}, lost
		}
		return values{100}, nil
	}}
	if _, err := newTestBench().rounds(t.Context(), 3, []side{s}); !errors.Is(err, lost) {
		t.Errorf("error %v, want %v", err, lost)
	}
}

func TestMeasure_ComparesTheNamedFiguresAndEnds(t *testing.T) {
	b, ended := newTestBench(), 0
	s := scenario{
		id: "two",
		sides: func(_ context.Context, b *bench) ([]side, error) {
			b.atEnd(func() error { ended++; return nil })
			fixed := func(v ...float64) side {
				return side{n: 1, run: func(context.Context, int) (values, error) { return v, nil }}
			}
			return []side{fixed(4, 40), fixed(2, 10)}, nil
		},
		rows: []row{
			{"first", "", figure{0, 0}, figure{1, 0}, "", atLeast(1)},
			{"second", "", figure{1, 1}, figure{0, 1}, "", atLeast(1)},
			{"own", "", figure{0, 1}, figure{0, 0}, "", atMost(10)},
		},
	}
	results, err := b.measure(t.Context(), s)
	if err != nil || ended != 1 {
		t.Fatalf("%v, ended %d times", err, ended)
	}
	for i, want := range []struct {
		ratio   float64
		reached bool
	}{{2, true}, {0.25, false}, {10, true}} {
		if r := results[i]; r.Ratio != want.ratio || r.Reached != want.reached {
			t.Errorf("%s: %+v, want %v", r.ID, r, want)
		}
	}
}

func TestBest_IsTheHighestSum(t *testing.T) {
	rates := map[string][]float64{"a": {9, 1}, "b": {6, 6}, "c": {5, 5}}
	sized := func(n int, setting string) side {
		return side{name: setting, n: n, run: func(_ context.Context, n int) (values, error) {
			if n != 1 {
				t.Errorf("a trial of %d messages", n)
			}
			v := rates[setting][0]
			rates[setting] = rates[setting][1:]
			return values{v}, nil
		}}
	}
	s, err := best(t.Context(), newTestBench(), []string{"a", "b", "c"}, 1, 10, sized)
	if err != nil || s.name != "b" || s.n != 10 {
		t.Errorf("best is %s of %d, %v; want b of 10", s.name, s.n, err)
	}
}

func TestChoose_TakesTheRowsOfTheTable(t *testing.T) {
	rowsOf := func(chosen []scenario) (ids []string) {
		for _, s := range chosen {
			ids = append(ids, s.rowIDs()...)
		}
		return ids
	}
	all, err := choose("", false)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := rowsOf(all), []string{
		"relay-rabbitmq", "relay-vs-forwarder", "relay-vs-forwarder-default", "relay-hotkey", "relay-engine", "relay-vs-skiplocked",
		"relay-wal", "relay-wal-history", "publish", "latency-p50", "latency-p99", "latency-forwarder-p50", "latency-forwarder-p99",
		"dead-topics", "dead-topics-p99", "idle-statements", "idle-cpu", "scale-out-2", "scale-out-4",
		"idempotency", "idempotency-alone", "idempotency-replay", "inbox", "inbox-each", "inbox-limit", "inbox-hot", "poison-key",
	}; !slices.Equal(got, want) {
		t.Errorf("rows %v, want %v", got, want)
	}
	long, err := choose("", true)
	if err != nil || len(long) != len(all)+4 {
		t.Errorf("with the long ones %v, %v", rowsOf(long), err)
	}
	some, err := choose("relay-vs-skiplocked,publish,relay-engine", false)
	if err != nil || len(some) != 2 || some[0].id != "relay-engine" || some[1].id != "publish" {
		t.Errorf("some rows: %v, %v", rowsOf(some), err)
	}
	if _, err := choose("relay-wall", false); err == nil || !strings.Contains(err.Error(), "relay-wal-history") {
		t.Errorf("error %v for an unknown row, want one that names the rows", err)
	}
}

// The estimates say how long `make bench` takes.
func TestProgress_TheWholeIsExpectedWithinTenMinutes(t *testing.T) {
	all, err := choose("", false)
	if err != nil {
		t.Fatal(err)
	}
	if p := newProgress(io.Discard, all, usualPairs); p.total > wholeLimit {
		t.Errorf("the rows are expected to take %v", p.total)
	}
}

func TestProgress_RunsAreShorterOnASlowMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := scenario{round: time.Minute}
		p := newProgress(io.Discard, []scenario{s, s}, 3)
		p.begin(s)
		if got := p.runFor(); got != runFor {
			t.Errorf("%v for a run at the start", got)
		}
		time.Sleep(45 * time.Second)
		p.ran(warmUp, side{}, nil)
		for range 3 { // a minute and a half for each minute: 10.5 minutes in all
			time.Sleep(90 * time.Second)
			p.ran("", side{}, nil)
		}
		if got, want := p.runFor(), runFor*15/21; got.Round(time.Millisecond) != want.Round(time.Millisecond) { // 3:45 of 5:15 are left
			t.Errorf("%v for a run on a slow machine, want %v", got, want)
		}
		time.Sleep(time.Hour)
		if got := p.runFor(); got != leastRun {
			t.Errorf("%v for a run past the limit", got)
		}
		p.unlimited = true
		if got := p.runFor(); got != runFor {
			t.Errorf("%v for a run without a limit", got)
		}
	})
}

func TestProgress_TellsRowsAndTimeLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := scenario{id: "one", round: 10 * time.Second, rows: []row{{other: figure{1, 0}}}}
		two := scenario{id: "two", round: 5 * time.Second}
		var told strings.Builder
		p := newProgress(&told, []scenario{one, two}, 3)
		p.begin(one)
		p.ran(warmUp, side{}, nil)
		p.ran(warmUp, side{}, nil)
		for range 6 { // as slow again as estimated
			time.Sleep(70 * time.Second / 6)
			p.ran("round 1 of 3", side{name: "ours"}, values{1234, 5})
		}
		p.begin(two)
		for _, want := range []string{"1 of 2: one; about 53s left", "1 of 2: one, round 1 of 3: ours: 1,234 5.00; about", "  70 s  2 of 2: two; about 35s left"} {
			if !strings.Contains(told.String(), want) {
				t.Errorf("no %q in:\n%s", want, told.String())
			}
		}
	})
}
