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
		rows, most := h.rows, rd.Rows
		if rd.ahead != nil {
			h.looks++
			rows, most = rows[max(0, len(rows)-rd.ahead.Look):], rd.Rows+rd.ahead.Newest
		}
		var entries []*entry
		known, bytes := map[outboxstore.Known]bool{}, 0
		for _, k := range rd.Known {
			known[k] = true
		}
		for _, row := range rows {
			left := rd.ahead != nil && slices.Contains(rd.ahead.Not, row.Topic)
			if left || known[row.Known()] || len(entries) >= most || bytes >= rd.Bytes {
				continue
			}
			bytes += len(row.Payload)
			entries = append(entries, newEntry(row))
		}
		r.read(rd, entries, r.now, nil)
	}
	r.step(time.Millisecond)
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
