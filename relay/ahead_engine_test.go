package relay

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// heap is the unkeyed rows of one lane for a rig, which reads them from either end.
type heap struct {
	rows  []outboxstore.Row
	last  int64
	looks int
}

func (h *heap) add(topic string, n, size int) {
	for range n {
		h.last++
		h.rows = append(h.rows, outboxstore.Row{Ref: outboxstore.Ref{ID: h.last, MessageID: fmt.Sprint(h.last)}, Topic: topic, Payload: make([]byte, size)})
	}
}

// step lets the engine read, and do all else.
func (h *heap) step(r *rig) {
	if rd := r.nextRead(r.now); rd != nil {
		h.answer(r, rd)
	}
	r.step(time.Millisecond)
}

func (h *heap) answer(r *rig, rd *read) {
	rows := h.rows
	if rd.ahead != nil {
		h.looks++
		rows = rows[max(0, len(rows)-rd.ahead.Look):]
	}
	known, others, bytes := map[outboxstore.Known]bool{}, 0, 0
	for _, k := range rd.Known {
		known[k] = true
	}
	var entries []*entry
	for i := range rows {
		row := rows[i]
		other := false
		if rd.ahead != nil {
			row = rows[len(rows)-1-i] // the newest ones of other topics
			other = !slices.Contains(rd.ahead.Topics, row.Topic)
			if slices.Contains(rd.ahead.Not, row.Topic) || other && others >= rd.ahead.Newest {
				continue
			}
		}
		if known[row.Known()] || len(entries)-others >= rd.Rows || bytes >= rd.Bytes {
			continue
		}
		if other {
			others++
		}
		bytes += len(row.Payload)
		entries = append(entries, newEntry(row))
	}
	if rd.ahead != nil {
		slices.Reverse(entries)
	}
	r.read(rd, entries, r.now, nil)
}

// However slowly a sink answers, looks bring no more than a lane has room for.
func TestEngine_LooksAheadTakeBoundedMemory(t *testing.T) {
	t.Parallel()
	r, h := newRig(OrderPerKey, 0), &heap{}
	r.limits.window = 16
	r.answer = func(m *entry) (error, bool) {
		return Unroutable(errors.New("no queue")), m.Topic == "dead" // the others have no answer
	}
	h.add("dead", 3, 10)
	h.add("slow", 400, 1<<20)
	most := 0
	for range 60_000 {
		h.step(r)
		most = max(most, r.lanes[0].bytes)
	}
	if h.looks == 0 || most > 4<<20 {
		t.Errorf("%d looks, %d MiB in a lane", h.looks, most>>20)
	}
}

// In a pipeline nothing waits for its key, so what a look brings would overtake earlier
// messages of its own.
func TestEngine_LooksNotAheadInAPipeline(t *testing.T) {
	t.Parallel()
	r, h := newRig(OrderPerKeyPipelined, 0), &heap{}
	r.answer = func(m *entry) (error, bool) {
		if m.Topic == "dead" {
			return errNack, true
		}
		return nil, true
	}
	h.add("dead", 1, 10)
	for range 10 {
		h.step(r)
	}
	h.add("other", 3000, 10)
	for range 10_000 {
		h.step(r)
	}
	if len(r.circuits.topics) == 0 || r.lanes[0].dry {
		t.Fatal("nothing waits, or all is read: the test shows nothing")
	}
	if h.looks > 0 || r.sent["other"] > 0 {
		t.Errorf("%d looks, %d messages went before the one that waits", h.looks, r.sent["other"])
	}
}

// What the tables do not take keeps no payload while looks bring more.
func TestEngine_FailuresThatCannotBeWrittenTakeBoundedMemory(t *testing.T) {
	t.Parallel()
	r, h := newRig(OrderPerKey, 0), &heap{}
	r.answer = func(*entry) (error, bool) { return Refused(errors.New("bad")), true }
	h.add("small", 300, 10)
	h.add("large", 3000, 100<<10)
	r.tasks.running, r.tasks.failed, r.tasks.retryAt = &task{lane: r.lanes[0]}, true, r.now.Add(time.Hour)
	most := 0
	for range 60_000 {
		h.step(r)
		most = max(most, r.lanes[0].bytes)
	}
	if h.looks == 0 || most > 4<<20 {
		t.Errorf("%d looks, %d MiB in a lane", h.looks, most>>20)
	}
}

// Thousands of topics have no queue. Looks for the messages behind theirs follow one another
// soon, and have the database and the broker to themselves: meanwhile nothing is tried but
// messages of topics that work, and of others when a look takes very long.
func TestEngine_TriesNoUnknownTopicWhileItLooks(t *testing.T) {
	t.Parallel()
	const long = 20 // looks take this many steps, the last one for ever
	r, h := newRig(OrderPerKey, 0), &heap{}
	r.circuits.reachable = func() bool { return true }
	r.limits.laneRows, r.limits.window = 8, 2
	r.answer = func(m *entry) (error, bool) { return nil, m.Topic == "good" }
	step := func() {
		r.step(time.Millisecond)
		hung := r.hung
		r.hung = nil
		for _, m := range hung {
			r.outcome(m, r.now, Unroutable(errors.New("no queue")))
		}
	}
	h.add("good", 1, 10)
	for range 100 {
		h.step(r)
	}
	for i := range 10_000 {
		h.add(fmt.Sprint("reply.", i), 1, 10)
	}
	tried := func() int { return len(r.sent) } // topics; an unclear message is tried again now and then
	answer := func(rd *read) {
		h.rows = slices.DeleteFunc(h.rows, func(row outboxstore.Row) bool { // moved, or deleted
			return row.Topic != "good" && r.sent[row.Topic] > 0 && r.lanes[0].entries[rowOf(row.ID)] == nil
		})
		h.answer(r, rd)
	}
	steps := 0
	for ; h.looks < 20 && steps < 20*(long+60); steps++ {
		rd := r.nextRead(r.now)
		if rd == nil || rd.ahead == nil {
			if rd != nil {
				answer(rd)
			}
			step()
			continue
		}
		before := tried()
		for range long {
			step()
			steps++
		}
		if n := tried() - before; n > 0 {
			t.Fatalf("%d unknown topics were tried during look %d", n, h.looks)
		}
		h.add("good", 1, 10)
		good := r.sent["good"]
		answer(rd)
		for n := 0; n < 20 && r.sent["good"] == good; n++ { // others may be in flight
			step()
			steps++
		}
		if r.sent["good"] == good {
			t.Fatalf("look %d has not brought the message of the topic that works", h.looks)
		}
	}
	if h.looks < 20 {
		t.Errorf("%d looks in %d steps", h.looks, steps)
	}
	looks := func() bool {
		rd := r.nextRead(r.now)
		if rd != nil && rd.ahead == nil {
			answer(rd)
		}
		step()
		return rd != nil && rd.ahead != nil
	}
	for i := 0; !looks(); i++ {
		if i == 1000 {
			t.Fatal("no more looks")
		}
	}
	before := tried()
	for range 1000 {
		step()
	}
	if tried() == before {
		t.Error("nothing is tried during a look that takes a second")
	}
}
