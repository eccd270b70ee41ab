package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"
)

func newTestBench(pairs int) *bench {
	return &bench{traffic: newTraffic(), pairs: pairs, log: slog.New(slog.DiscardHandler), begin: time.Now()}
}

func TestMedian_TakesTheMiddle(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{7}, 7},
		{[]float64{9, 1}, 5},
		{[]float64{9, 1, 4}, 4},
		{[]float64{4, 3, 1, 2}, 2.5},
		{[]float64{5, 4, 1, 2, 3}, 3},
	} {
		before := slices.Clone(c.values)
		if got := median(c.values); got != c.want {
			t.Errorf("median(%v) = %v, want %v", c.values, got, c.want)
		}
		if !slices.Equal(before, c.values) {
			t.Errorf("median changed its argument to %v", c.values)
		}
	}
}

func TestRatios_PairTheRounds(t *testing.T) {
	got := ratios([]float64{10, 30}, []float64{20, 10})
	if want := []float64{0.5, 3}; !slices.Equal(got, want) {
		t.Errorf("ratios = %v, want %v", got, want)
	}
}

func TestRounds_WarmUpThenTakeTurns(t *testing.T) {
	var order []string
	sized := func(name string, n int) side {
		return side{name: name, n: n, run: func(_ context.Context, n int) (float64, error) {
			order = append(order, fmt.Sprint(name, n))
			return float64(n), nil
		}}
	}
	values, err := newTestBench(3).rounds(t.Context(), "row", "msg/s", sized("a", 100), sized("b", 50))
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"a10", "b5", "a100", "b50", "b50", "a100", "a100", "b50"}; !slices.Equal(order, want) {
		t.Errorf("order %v, want %v", order, want)
	}
	if want := []float64{100, 100, 100}; !slices.Equal(values[0], want) {
		t.Errorf("values of a: %v, want %v", values[0], want)
	}
	if want := []float64{50, 50, 50}; !slices.Equal(values[1], want) {
		t.Errorf("values of b: %v, want %v", values[1], want)
	}
}

func TestRounds_FailWhenACheckFails(t *testing.T) {
	lost := errors.New("lost")
	calls := 0
	s := side{name: "a", n: 10, run: func(context.Context, int) (float64, error) {
		if calls++; calls == 3 {
			return 100, lost
		}
		return 100, nil
	}}
	if _, err := newTestBench(3).rounds(t.Context(), "row", "msg/s", s); !errors.Is(err, lost) {
		t.Errorf("error %v, want %v", err, lost)
	}
}

func TestBest_IsTheHighestSum(t *testing.T) {
	fixed := func(values ...float64) side {
		call := 0
		return side{name: "x", n: 1, run: func(context.Context, int) (float64, error) {
			call++
			return values[call-1], nil
		}}
	}
	at, err := newTestBench(1).best(t.Context(), "thing", "msg/s", []side{fixed(9, 1), fixed(6, 6), fixed(5, 5)})
	if err != nil || at != 1 {
		t.Errorf("best = %d, %v, want 1", at, err)
	}
}

func TestChoose_NamesAreChecked(t *testing.T) {
	all, err := choose("", false)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := ids(all), []string{"relay-rabbitmq", "relay-vs-forwarder", "relay-engine", "relay-vs-skiplocked", "relay-wal", "relay-hotkey", "publish", "latency", "dead-topics", "idle", "scale-out", "idempotency", "inbox", "inbox-limit", "inbox-hot"}; !slices.Equal(got, want) {
		t.Errorf("all rows: %v, want %v", got, want)
	}
	long, err := choose("", true)
	if err != nil || len(long) != len(all)+3 {
		t.Errorf("with the long ones: %v, %v", ids(long), err)
	}
	some, err := choose("copy,relay-wal", false)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := ids(some), []string{"copy", "relay-wal"}; !slices.Equal(got, want) {
		t.Errorf("some rows: %v, want %v", got, want)
	}
	if _, err := choose("relay-wall", false); err == nil {
		t.Error("an unknown row was accepted")
	}
}
