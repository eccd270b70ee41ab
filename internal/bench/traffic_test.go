package main

import (
	"context"
	"database/sql"
	"slices"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

func TestTraffic_IsTheSameEveryTime(t *testing.T) {
	a, b := newTraffic(), newTraffic()
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

// recordingTx keeps the arguments of a statement.
type recordingTx struct{ args []any }

func (r *recordingTx) ExecContext(_ context.Context, _ string, args ...any) (sql.Result, error) {
	r.args = args
	return nil, nil
}
func (r *recordingTx) Commit() error   { return nil }
func (r *recordingTx) Rollback() error { return nil }

func TestBacklog_HasTheRowsThatThePublisherWrites(t *testing.T) {
	db, err := sql.Open("postgres", "")
	if err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		t.Fatal(err)
	}
	traffic := newTraffic()
	for i := range 100 {
		msg := message.NewMessage(traffic.id(i), traffic.payload(i))
		outbox.SetKey(msg, traffic.key(i))
		var tx recordingTx
		if err := box.Publisher(&tx).Publish(topic, msg); err != nil {
			t.Fatal(err)
		}
		row := traffic.outboxRow(i)
		if got, want := tx.args[0].(int), int(row[0].(int16)); got != want {
			t.Errorf("lane %d, want %d", want, got)
		}
		for column := 1; column < 4; column++ {
			if tx.args[column] != row[column] {
				t.Errorf("column %d is %v, want %v", column, row[column], tx.args[column])
			}
		}
		for column := 4; column < 6; column++ {
			if !slices.Equal(tx.args[column].([]byte), row[column].([]byte)) {
				t.Errorf("column %d is %q, want %q", column, row[column], tx.args[column])
			}
		}
	}
}

func TestLedger_FindsEveryFault(t *testing.T) {
	const n = 1000
	traffic := newTraffic()
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
		if err := book.verdict(c.ordered); (err != nil) != c.bad {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, arrive := range map[string]func(*ledger){
		"a damaged payload": func(l *ledger) { l.arrive(traffic.id(0), traffic.payload(1)) },
		"an unknown id":     func(l *ledger) { l.arrive("someone", traffic.payload(0)) },
	} {
		book := newLedger(traffic, 1)
		arrive(book)
		if book.verdict(true) == nil {
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
	traffic := newTraffic()
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
	if err := whole.verdict(); err != nil {
		t.Error(err)
	}
	short := newLedgerSink(traffic, n)
	for i := range n - 1 {
		deliver(short, i)
	}
	if short.verdict() == nil {
		t.Error("a missing message went unnoticed")
	}
}

func TestCountingSink_SaysWhenAllAreConfirmed(t *testing.T) {
	traffic := newTraffic()
	s := newCountingSink(newLedgerSink(traffic, 2), 2)
	for i := range 2 {
		select {
		case <-s.all:
			t.Fatal("said so too early")
		default:
		}
		s.Publish(t.Context(), []*relay.Message{{MessageID: traffic.id(i), Payload: traffic.payload(i)}}, func(*relay.Message, error) {})
	}
	<-s.all
	if err := s.failed(); err != nil {
		t.Error(err)
	}
}
