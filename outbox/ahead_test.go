package outbox_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// Lane 12 has, from its start: dead 1 to 3 without a key, a/1 dead, a/2 healthy,
// A/1 healthy, A/2 healthy, and a healthy one without a key. Lane 5 has one of b.
func TestReadAhead_TakesWhatMayGoBeforeTheRest(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		lane := 12
		free := func(n int) (ids []string) { // messages without a key of the lane
			for i := 0; len(ids) < n; i++ {
				if id := fmt.Sprint("free", i); outbox.Lane("", id) == lane {
					ids = append(ids, id)
				}
			}
			return ids
		}(4)
		for i, id := range free[:3] {
			p.publishTo(t, fmt.Sprint("dead", i), newMessage(id, ""))
		}
		p.publishTo(t, "dead3", newMessage("a/1", "a"))
		p.publishTo(t, "healthy", newMessage("a/2", "a"), newMessage("A/1", "A"), newMessage("A/2", "A"), newMessage(free[3], ""), newMessage("b/1", "b"))
		known := map[string]outboxstore.Known{}
		for _, r := range p.read(t) {
			known[r.MessageID] = r.Known()
		}
		base := outboxstore.ReadRequest{Lanes: []int{5, lane}, Rows: 10, Bytes: 1 << 20}
		with := func(change func(*outboxstore.ReadRequest)) outboxstore.ReadRequest {
			req := base
			change(&req)
			return req
		}
		healthy := outboxstore.Ahead{Topics: []string{"healthy"}, Look: 99, Scan: 100}
		for name, c := range map[string]struct {
			req   outboxstore.ReadRequest
			ahead outboxstore.Ahead
			want  []string
		}{
			"nothing":              {base, outboxstore.Ahead{Look: 99, Scan: 100}, nil},
			"a topic":              {base, healthy, []string{"b/1", "A/1", free[3]}},
			"no such lane":         {with(func(r *outboxstore.ReadRequest) { r.Lanes = []int{0} }), healthy, nil},
			"so many rows":         {with(func(r *outboxstore.ReadRequest) { r.Rows = 1 }), healthy, []string{"b/1", "A/1"}},
			"the first are known":  {with(func(r *outboxstore.ReadRequest) { r.Known = []outboxstore.Known{known["a/1"], known["A/1"]} }), healthy, []string{"b/1", "a/2", "A/2", free[3]}},
			"busy keys":            {with(func(r *outboxstore.ReadRequest) { r.Busy = []string{"A", "b"} }), healthy, []string{free[3]}},
			"no order":             {base, outboxstore.Ahead{Topics: []string{"healthy"}, Look: 99, Scan: 100, Unordered: true}, []string{"b/1", "a/2", "A/1", "A/2", free[3]}},
			"the newest of others": {base, outboxstore.Ahead{Newest: 2, Topics: []string{"healthy"}, Look: 99, Scan: 100}, []string{"b/1", free[2], "a/1", "A/1", free[3]}},
			"not of these":         {base, outboxstore.Ahead{Newest: 2, Not: []string{"dead3", "dead2", "healthy"}, Topics: []string{"healthy"}, Look: 99, Scan: 100}, []string{free[0], free[1]}},
			"the newest of all":    {base, outboxstore.Ahead{Newest: 1, Look: 99, Scan: 100}, []string{"b/1", free[3]}},
			"the newest two":       {base, outboxstore.Ahead{Topics: []string{"healthy"}, Look: 2, Scan: 100}, []string{"b/1", free[3]}},
			"not all is scanned":   {base, outboxstore.Ahead{Topics: []string{"healthy"}, Newest: 9, Look: 99, Scan: 9}, []string{free[0], free[1], free[2], free[3]}},
			"nothing is scanned":   {base, outboxstore.Ahead{Topics: []string{"healthy"}, Newest: 1, Look: 99}, []string{free[2], free[3]}},
			"all is just scanned":  {base, outboxstore.Ahead{Topics: []string{"healthy"}, Look: 99, Scan: 10}, []string{"b/1", "A/1", free[3]}},
		} {
			rows, err := p.queue.ReadAhead(t.Context(), c.req, c.ahead)
			expectNoError(t, err)
			var got []string
			for _, r := range rows {
				got = append(got, r.MessageID)
				if string(r.Payload) != "payload of "+r.MessageID || r.Hollow || r.Known() != known[r.MessageID] {
					t.Errorf("%s: %+v", name, r)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%s: got %q, want %q", name, got, c.want)
			}
		}
		// What is asked for gets its bytes before what is newest of others.
		within := func(bytes int) []outboxstore.Row {
			rows, err := p.queue.ReadAhead(t.Context(), with(func(r *outboxstore.ReadRequest) { r.Bytes = bytes; r.Lanes = []int{lane} }), outboxstore.Ahead{Topics: []string{"healthy"}, Newest: 3, Look: 99, Scan: 100})
			expectNoError(t, err)
			return rows
		}
		size := len("payload of A/1") + len(p.read(t)[0].Metadata)
		if slices.ContainsFunc(within(size-1), func(r outboxstore.Row) bool { return r.MessageID == "A/1" }) {
			t.Error("a message came that is too large for a look")
		}
		rows := within(size)
		expectIDs(t, rows, "A/1")
		removal, err := p.queue.Remove(t.Context(), refs(rows))
		expectNoError(t, err)
		rest := p.read(t)
		if len(removal.Locked) > 0 || len(rest) != 8 || slices.ContainsFunc(rest, func(r outboxstore.Row) bool { return r.MessageID == "A/1" }) {
			t.Errorf("%d rows after the removal, %d locked", len(rest), len(removal.Locked))
		}
	})
}
