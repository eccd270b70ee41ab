package relay

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// table is an outbox whose payloads a reader brings in pieces.
type table struct {
	w    *worker
	rows []outboxstore.Row // as a read returns them, each the only one of its lane
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
	if err := oncemill.Migrate(t.Context(), db, cfg, outbox.Migrations, audit.Migrations, dlq.Migrations, Migrations); err != nil {
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
	o.rows, err = o.w.queue.Read(t.Context(), outboxstore.ReadRequest{Lanes: allOf(outbox.Lanes), Rows: 10, Bytes: 1 << 30})
	if err != nil || len(o.rows) != len(sizes) {
		t.Fatalf("%d rows, %v", len(o.rows), err)
	}
	slices.SortFunc(o.rows, func(a, b outboxstore.Row) int { return a.Lane - b.Lane })
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

// newSpace is that of an engine with so many bytes of large messages of another topic.
func newSpace(taken int) *space { return &space{taken: taken, of: map[string]int{}} }

func (o *table) completes(t *testing.T, p *pieces, rows []outboxstore.Row) (kept []outboxstore.Row, short map[int]error) {
	p.read = o.w.queue.ReadPiece
	short = p.complete(t.Context(), o.w, lackingRows(rows), newSpace(0))
	return slices.DeleteFunc(rows, func(r outboxstore.Row) bool { return r.Missing > 0 }), short
}

// brings completes rows, and returns how many of them came.
func (o *table) brings(t *testing.T, p *pieces, of ...int) (came int) {
	t.Helper()
	var rows []outboxstore.Row
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
	if _, err := o.w.queue.Remove(t.Context(), []outboxstore.Ref{o.rows[0].Ref, o.rows[1].Ref, o.rows[2].Ref}); err != nil {
		t.Fatal(err)
	}
	if n := o.brings(t, &pieces{}, 0, 1, 2, 3); n > 1 {
		t.Errorf("%d rows came, one is there", n)
	}
}

// Messages that are too large for one read come in turn, besides the one of which least is
// missing.
func TestPieces_BringLargeOnesInTurn(t *testing.T) {
	t.Parallel()
	o := newTable(t, mostPiece+1, mostPiece+2, mostPiece+3)
	p := &pieces{}
	came := map[int]int{}
	for range 12 {
		kept, _ := o.completes(t, p, slices.Clone(o.rows))
		if len(kept) != 1 {
			t.Fatalf("%d rows came at once", len(kept))
		}
		came[kept[0].Lane]++
	}
	for _, r := range o.rows {
		if n := came[r.Lane]; n < 2 {
			t.Errorf("%d bytes: %d times of 12", r.Missing, n)
		}
	}
}

// One that is much larger than the others, and comes for long, has half of the time.
func TestPieces_BringOthersBesideAVeryLargeOne(t *testing.T) {
	t.Parallel()
	o := newTable(t, 1<<20, 1<<20, 1<<20, 1<<20)
	o.w.health = newHealth(time.Second)
	rows := slices.Clone(o.rows)
	rows[0].Missing = 64 << 20
	p, brought := &pieces{begun: []*begun{{of: rows[0].Ref, payload: make([]byte, mostBegun+1), seen: time.Now()}}}, 0
	p.read = func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
		p.size = leastPiece
		testserver.Pause(ctx, 10*time.Millisecond)
		if of == rows[0].Ref {
			brought += leastPiece
			return make([]byte, leastPiece), nil
		}
		return o.w.queue.ReadPiece(ctx, of, offset, most)
	}
	for range 30 {
		p.complete(t.Context(), o.w, lackingRows(rows), newSpace(0))
	}
	for _, r := range rows[1:] {
		if r.Missing > 0 {
			t.Errorf("%s has not come", r.MessageID)
		}
	}
	if brought == 0 {
		t.Error("nothing has come of the large one")
	}
}

// Small ones, of which there are always more, keep no large one back.
func TestPieces_TryALargeOneHoweverManySmallOnesThereAre(t *testing.T) {
	t.Parallel()
	o := newTable(t, 1, 1<<20)
	o.w.health = newHealth(time.Second)
	large := slices.IndexFunc(o.rows, func(r outboxstore.Row) bool { return r.Missing > 1 })
	p := &pieces{read: func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
		if of == o.rows[large].Ref {
			return o.w.queue.ReadPiece(ctx, of, offset, most)
		}
		testserver.Pause(ctx, 20*time.Millisecond)
		return []byte("a"), nil
	}}
	rows := []*outboxstore.Row{&o.rows[large]}
	for range 10 {
		for lane := range outbox.Lanes {
			if r := o.rows[1-large]; lane != o.rows[large].Lane {
				r.Lane = lane
				rows = append(rows, &r)
			}
		}
		p.complete(t.Context(), o.w, rows, newSpace(0))
		rows = rows[:1]
	}
	if rows[0].Missing > 0 {
		t.Error("it has not come")
	}
}

// One that has no room keeps no other large one from being tried, however many small ones
// there are.
func TestPieces_TryALargeOneBehindOneThatHasNoRoom(t *testing.T) {
	t.Parallel()
	for _, stuck := range []int{1, 2} {
		o := newTable(t, 1, 1<<20, 1<<20)
		o.w.health = newHealth(time.Second)
		slices.SortFunc(o.rows, func(a, b outboxstore.Row) int { return a.Missing - b.Missing })
		o.rows[stuck].Topic = "stuck"
		p := &pieces{read: func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
			if of != o.rows[0].Ref {
				return o.w.queue.ReadPiece(ctx, of, offset, most)
			}
			testserver.Pause(ctx, 20*time.Millisecond)
			return []byte("a"), nil
		}}
		for round := 0; round < 60 && o.rows[3-stuck].Missing > 0; round++ { // four, but for a busy machine
			rows := []*outboxstore.Row{&o.rows[1], &o.rows[2]}
			for range 2 * outbox.Lanes {
				r := o.rows[0]
				rows = append(rows, &r)
			}
			p.complete(t.Context(), o.w, rows, &space{taken: mostLarge / 2, of: map[string]int{"stuck": mostLarge / 2}})
		}
		if o.rows[3-stuck].Missing > 0 {
			t.Errorf("row %d has not come", 3-stuck)
		}
		if o.rows[stuck].Missing == 0 {
			t.Error("the other one came: the test shows nothing")
		}
	}
}

// However many topics are stuck, others have room, until as many bytes are taken as there
// may be.
func TestSpace_LeavesRoomBesideStuckTopics(t *testing.T) {
	t.Parallel()
	s := newSpace(0)
	for _, topic := range []string{"a", "b", "c"} {
		for s.has(topic) {
			s.take(topic, 1<<20)
		}
		if !s.has("healthy") {
			t.Fatalf("no room is left beside %v", s.of)
		}
	}
	if s.of["a"] != mostLarge/2 || s.of["b"] != mostLarge/4 || s.of["c"] != mostLarge/8 {
		t.Errorf("taken: %v", s.of)
	}
	for s.has("healthy") {
		s.take("healthy", 1<<20)
	}
	if s.taken > mostLarge {
		t.Errorf("%d bytes are taken", s.taken)
	}
}

// Halving the pieces of a payload, each of which takes long since the server reads what
// comes before it, makes each take as long: then they are not made smaller.
func TestPieces_AreNotMadeSmallerInVain(t *testing.T) {
	t.Parallel()
	p := &pieces{size: 4 << 20}
	for range 20 {
		p.adapt(300*time.Millisecond, time.Second)
	}
	if p.size != 4<<20 {
		t.Errorf("%d bytes", p.size)
	}
	p = &pieces{size: 4 << 20}
	for range 20 { // a slow way
		p.adapt(time.Duration(p.size)*time.Second/(4<<20), time.Second)
	}
	if p.size != 512<<10 {
		t.Errorf("%d bytes over a slow way", p.size)
	}
}

// However often the way fails, and however many large messages there are, no byte comes
// twice.
func TestPieces_KeepWhatHasComeOfEach(t *testing.T) {
	t.Parallel()
	o := newTable(t, 1<<20, 2<<20, 3<<20, 100)
	calls, brought := 0, 0
	p := &pieces{size: leastPiece}
	rows, want := slices.Clone(o.rows), 0
	for _, r := range rows {
		want += r.Missing
	}
	for tries := 0; len(rows) > 0; tries++ {
		if tries > 200 {
			t.Fatal("they do not come")
		}
		p.read = func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
			p.size = leastPiece
			if calls++; calls%5 == 0 {
				return nil, errors.New("cut")
			}
			piece, err := o.w.queue.ReadPiece(ctx, of, offset, most)
			brought += len(piece)
			return piece, err
		}
		p.complete(t.Context(), o.w, lackingRows(rows), newSpace(0))
		rows = slices.DeleteFunc(rows, func(r outboxstore.Row) bool {
			if r.Missing == 0 && !bytes.Equal(r.Payload, o.want[r.MessageID]) {
				t.Errorf("%s: not its payload", r.MessageID)
			}
			return r.Missing == 0
		})
		p.failed = nil // a second has passed
	}
	if brought != want || len(p.begun) > 0 {
		t.Errorf("%d bytes came of %d; %d messages are kept", brought, want, len(p.begun))
	}
}

// One that cannot be read is left alone for a moment, and keeps no other one back.
func TestPieces_LeaveOutWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	o := newTable(t, 1<<20, 1<<20, 100)
	p := &pieces{}
	bad, tries := o.rows[0].Ref, 0
	p.read = func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
		if of == bad {
			tries++
			return nil, errors.New("broken")
		}
		return o.w.queue.ReadPiece(ctx, of, offset, most)
	}
	rows := slices.Clone(o.rows)
	began := time.Now()
	for range 3 {
		short := p.complete(t.Context(), o.w, lackingRows(rows), newSpace(0))
		if short[bad.Lane] == nil {
			t.Error("the lane of the one is not told from others")
		}
	}
	for _, r := range rows {
		if r.Ref != bad && r.Missing > 0 {
			t.Errorf("%s has not come", r.MessageID)
		}
	}
	if seconds := int(time.Since(began).Seconds()); tries > 1+seconds {
		t.Errorf("it was tried %d times in %d s", tries, seconds)
	}
}

// What has come of a message whose lane is another worker's, perhaps, is given up.
func TestPieces_GiveUpWhatNoReadShows(t *testing.T) {
	t.Parallel()
	o := newTable(t, 1<<20, 2<<20, 100)
	gone := o.rows[0].Ref
	gone.ID += 1000
	p := &pieces{begun: []*begun{{of: gone, payload: make([]byte, 10), seen: time.Now().Add(-keepFor / 2)}}}
	if came := o.brings(t, p, 0, 1, 2); came != 3 || len(p.begun) != 1 {
		t.Errorf("%d rows came, of %d there is a part", came, len(p.begun))
	}
	p.begun[0].seen = time.Now().Add(-keepFor - time.Second)
	if p.complete(t.Context(), o.w, nil, newSpace(0)); len(p.begun) != 0 {
		t.Error("it is kept for ever")
	}
	other := gone
	other.ID++
	p.begun = []*begun{{of: gone, payload: make([]byte, mostBegun+1), seen: time.Now()}, {of: other, payload: make([]byte, mostBegun+2), seen: time.Now()}}
	if came := o.brings(t, p, 0, 1, 2); came != 3 || len(p.begun) != 1 || p.begun[0].of != other {
		t.Errorf("%d rows came, and of %d others there is a part, whose bytes were too many", came, len(p.begun))
	}
}

// While very much is here of others, besides the largest, no large one begins, but small
// ones come.
func TestPieces_WaitForOthers(t *testing.T) {
	t.Parallel()
	o := newTable(t, 1<<20, 100, 1<<20, 2<<20)
	rows := slices.Clone(o.rows)
	p, cut := &pieces{}, map[outboxstore.Ref]bool{}
	for i := range rows {
		if rows[i].Missing == 1<<20 {
			rows[i].Missing = mostBegun + 10 // more than there is
			p.begun = append(p.begun, &begun{of: rows[i].Ref, payload: make([]byte, mostBegun+1), seen: time.Now()})
			p.fail(rows[i].Ref, errors.New("cut"))
			cut[rows[i].Ref] = true
		}
	}
	p.read = o.w.queue.ReadPiece
	short := p.complete(t.Context(), o.w, lackingRows(rows), newSpace(0))
	for _, r := range rows {
		if came := r.Missing == 0; came != (len(o.want[r.MessageID]) == 100) {
			t.Errorf("%s: it came: %v", r.MessageID, came)
		}
		if !cut[r.Ref] && r.Missing > 0 && !errors.Is(short[r.Lane], errBehind) {
			t.Errorf("%s: %v", r.MessageID, short[r.Lane])
		}
	}
	if len(short) != 3 || len(p.begun) != 2 {
		t.Errorf("short are %v; of %d there is a part", short, len(p.begun))
	}
}

// Of a lane comes no more than it has room for; one that cannot be read takes none.
func TestPieces_BringWhatALaneHasRoomFor(t *testing.T) {
	t.Parallel()
	o := newTable(t, 2*laneBytes)
	rows := make([]outboxstore.Row, 3)
	for i := range rows {
		rows[i] = o.rows[0]
		rows[i].ID += int64(i)
	}
	bad, came := rows[0].Ref, 0
	p := &pieces{}
	p.read = func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
		if of == bad {
			return nil, errors.New("broken")
		}
		return o.w.queue.ReadPiece(ctx, o.rows[0].Ref, offset, most)
	}
	for range 2 {
		p.complete(t.Context(), o.w, lackingRows(rows), newSpace(0))
	}
	for _, r := range rows {
		if r.Missing == 0 {
			came++
		}
	}
	if came != 1 || rows[0].Missing == 0 {
		t.Errorf("%d came, want one of the two that can be read", came)
	}
}

// One topic, whose messages may never be confirmed, leaves room for the others.
func TestPieces_LeaveRoomForOtherTopics(t *testing.T) {
	t.Parallel()
	o := newTable(t, 1<<20, 1<<20)
	rows := slices.Clone(o.rows)
	rows[1].Topic = "other"
	p, s := &pieces{read: o.w.queue.ReadPiece}, newSpace(0)
	s.take(rows[0].Topic, mostLarge/2)
	for range 2 {
		p.complete(t.Context(), o.w, lackingRows(rows), s)
	}
	if rows[0].Missing == 0 || rows[1].Missing > 0 || s.of["other"] != 1<<20 {
		t.Errorf("of the topic without room %d bytes are missing, of the other %d", rows[0].Missing, rows[1].Missing)
	}
}

// What goes out already bounds what may come, but for small messages.
func TestPieces_BringWhatThereIsRoomFor(t *testing.T) {
	t.Parallel()
	o := newTable(t, 1<<20, 100, 2<<20)
	rows := slices.Clone(o.rows)
	p := &pieces{read: o.w.queue.ReadPiece}
	short := p.complete(t.Context(), o.w, lackingRows(rows), newSpace(mostLarge))
	for _, r := range rows {
		if came := r.Missing == 0; came != (len(o.want[r.MessageID]) == 100) || !came && !errors.Is(short[r.Lane], errBehind) {
			t.Errorf("%s: it came: %v, %v", r.MessageID, came, short[r.Lane])
		}
	}
	if p.complete(t.Context(), o.w, lackingRows(rows), newSpace(mostLarge-1)); len(lackingRows(rows)) != 1 {
		t.Errorf("%d have not come; there is room for the last of them", len(lackingRows(rows)))
	}
}
