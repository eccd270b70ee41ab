package relay

import (
	"bytes"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/outbox"
)

// table is an outbox whose payloads a reader brings in pieces.
type table struct {
	w    *worker
	rows []outbox.Row // as a read returns them, each the only one of its lane
	want map[string][]byte
}

func newTable(t *testing.T, sizes ...int) *table {
	t.Helper()
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(t.TempDir(), "test.db")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	cfg := oncemill.Config{Dialect: oncemill.SQLite}
	if err := oncemill.Migrate(t.Context(), db, cfg, outbox.Migrations, dlq.Migrations, Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{Database: cfg, MaxPayload: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	made, err := New(box, FromPublisher(nopPublisher{}), Config{})
	if err != nil {
		t.Fatal(err)
	}
	o := &table{w: newWorker(made), want: map[string][]byte{}}
	o.w.health, o.w.bounds = newHealth(time.Hour), bounded.New(maxAbandoned)
	for i, size := range sizes {
		m := message.NewMessage(fmt.Sprint("m", i), bytes.Repeat([]byte{byte('a' + i)}, size))
		outbox.SetKey(m, laneKeys[i])
		o.want[m.UUID] = m.Payload
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := box.Publisher(tx).Publish("orders", m); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	o.rows, err = o.w.queue.Read(t.Context(), outbox.ReadRequest{Lanes: allOf(outbox.Lanes), Rows: 10, Bytes: 1 << 30})
	if err != nil || len(o.rows) != len(sizes) {
		t.Fatalf("%d rows, %v", len(o.rows), err)
	}
	slices.SortFunc(o.rows, func(a, b outbox.Row) int { return a.Lane - b.Lane })
	for i := range o.rows {
		o.rows[i].Missing, o.rows[i].Payload = len(o.rows[i].Payload), nil
	}
	return o
}

type nopPublisher struct{}

func (nopPublisher) Publish(string, ...*message.Message) error { return nil }
func (nopPublisher) Close() error                              { return nil }

func allOf(n int) (numbers []int) {
	for i := range n {
		numbers = append(numbers, i)
	}
	return numbers
}

// laneKeys are keys of different lanes.
var laneKeys = func() (keys []string) {
	seen := map[int]bool{}
	for i := 0; len(keys) < 8; i++ {
		key := fmt.Sprint("k", i)
		if lane := outbox.Lane(key, ""); !seen[lane] {
			seen[lane] = true
			keys = append(keys, key)
		}
	}
	return keys
}()

func (o *table) completes(t *testing.T, p *pieces, rows []outbox.Row) (kept []outbox.Row, short map[int]error) {
	p.read, p.mayMiss = o.w.queue.ReadPiece, 4
	short = p.complete(t.Context(), o.w, lackingRows(rows))
	return slices.DeleteFunc(rows, func(r outbox.Row) bool { return r.Missing > 0 }), short
}

// brings completes rows, and returns how many of them came.
func (o *table) brings(t *testing.T, p *pieces, of ...int) (came int) {
	t.Helper()
	var rows []outbox.Row
	for _, i := range of {
		rows = append(rows, o.rows[i])
	}
	kept, short := o.completes(t, p, rows)
	for _, r := range kept {
		if !bytes.Equal(r.Payload, o.want[r.MessageID]) || r.Missing != 0 {
			t.Errorf("%s: %d bytes, %d are missing", r.MessageID, len(r.Payload), r.Missing)
		}
	}
	if len(kept)+len(short) != len(of) {
		t.Errorf("of %d rows %d came, and %d lanes are short", len(of), len(kept), len(short))
	}
	for lane, err := range short {
		if err != nil && !errors.Is(err, errOtherRow) {
			t.Errorf("lane %d: %v", lane, err)
		}
	}
	return len(kept)
}

func TestPieces_BringWhatThereIsTimeFor(t *testing.T) {
	t.Parallel()
	o := newTable(t, 100, leastPiece+1, 3<<20, 1)
	if n := o.brings(t, &pieces{}, 0, 1, 2, 3); n != 4 {
		t.Errorf("%d rows came, want all", n)
	}
	if _, err := o.w.queue.Remove(t.Context(), []outbox.Ref{o.rows[0].Ref, o.rows[1].Ref, o.rows[2].Ref}); err != nil {
		t.Fatal(err)
	}
	if n := o.brings(t, &pieces{}, 0, 1, 2, 3); n > 1 {
		t.Errorf("%d rows came, one is there", n)
	}
}

// Messages that are too large for one read come in turn.
func TestPieces_BringLargeOnesInTurn(t *testing.T) {
	t.Parallel()
	o := newTable(t, mostPiece+1, mostPiece+2, mostPiece+3)
	p := &pieces{}
	var order []int
	for range 6 {
		kept, _ := o.completes(t, p, slices.Clone(o.rows))
		if len(kept) != 1 {
			t.Fatalf("%d rows came at once", len(kept))
		}
		order = append(order, kept[0].Lane)
	}
	if slices.Equal(order[:3], []int{order[0], order[0], order[0]}) || !slices.Equal(order[:3], order[3:]) || order[0] == order[1] || order[1] == order[2] {
		t.Errorf("lanes in the order %v", order)
	}
}

// A message that has begun, and whose lane is another worker's now, keeps no other one
// from beginning for long, and small ones not at all.
func TestPieces_GiveUpWhatIsNotReadAnyMore(t *testing.T) {
	t.Parallel()
	o := newTable(t, 1<<20, 2<<20, 1000)
	large := []int{}
	small := 0
	for i, r := range o.rows {
		if r.Missing > leastPiece {
			large = append(large, i)
		} else {
			small = i
		}
	}
	p := &pieces{of: placeless(o.rows[large[0]].Ref), payload: make([]byte, 10)}
	for n := range 4 {
		if came := o.brings(t, p, large[1], small); came != 1 {
			t.Errorf("read %d: %d rows came, want the small one", n, came)
		}
	}
	if came := o.brings(t, p, large[1], small); came != 2 {
		t.Errorf("%d rows came, want both", came)
	}
}
