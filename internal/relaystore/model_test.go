package relaystore

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
)

// spot is where a message is.
type spot string

const (
	inOutbox  spot = "outbox"
	inParked  spot = "parked"
	isDead    spot = "dead"
	isDone    spot = "delivered"
	isDropped spot = "discarded"
)

// modelRow is a message as it should be.
type modelRow struct {
	outboxstore.Row
	spot
	attempts, errors int
	crashed, held    bool
	time             int // 0: none, 1: due, 2: later
}

type modelLetter struct {
	row      *modelRow
	state    dlq.State
	held     bool
	attempts int
	id       int64 // 0: not known yet
}

// model says what the tables of one lane are to hold.
type model struct {
	rows    []*modelRow // by id
	letters []*modelLetter
	alone   int64
}

func (m *model) find(ref outboxstore.Ref) *modelRow {
	for _, r := range m.rows {
		if r.ID == ref.ID {
			return r
		}
	}
	return nil
}

func (m *model) of(s spot, key string) (rows []*modelRow) {
	for _, r := range m.rows {
		if r.spot == s && (key == "" || r.Key == key) {
			rows = append(rows, r)
		}
	}
	return rows
}

// fixHeads is the rule: the first of a key has a time, unless it is held, its
// successors have none.
func (m *model) fixHeads() {
	seen := map[string]bool{}
	for _, r := range m.rows {
		if r.spot != inParked {
			continue
		}
		first := r.Key == "" || !seen[r.Key]
		seen[r.Key] = true
		switch {
		case !first || r.held:
			r.time = 0
		case r.time == 0:
			r.time = 1
		}
	}
}

func timeOf(f Failure) int {
	if f.RetryIn > 0 {
		return 2
	}
	return 1
}

func (m *model) fail(failures []Failure, followers []outboxstore.Ref) {
	for _, f := range failures {
		if f.ID == m.alone {
			m.alone = 0
		}
		r := m.find(f.Ref)
		if !f.Retrying && r.spot != inOutbox || f.Retrying && (r.spot != inParked || r.held || r.attempts != f.Attempt-1) {
			continue
		}
		r.crashed = r.crashed || f.Class == "crashed"
		r.errors, r.attempts = min(10, r.errors+1), f.Attempt
		switch {
		case f.Fate == FateDeadLetter:
			r.spot = isDead
			m.letters = append(m.letters, &modelLetter{row: r, state: dlq.StateDead, attempts: f.Attempt})
		case f.Fate == FateHoldKey:
			r.spot, r.held = inParked, true
			m.letters = append(m.letters, &modelLetter{row: r, state: dlq.StateHeld, held: true, attempts: f.Attempt})
		case r.spot == inOutbox || r.time != 0:
			r.spot, r.time = inParked, timeOf(f)
		}
	}
	for _, ref := range followers {
		if r := m.find(ref); r.spot == inOutbox {
			r.spot, r.time = inParked, 0
		}
	}
	m.fixHeads()
}

func (m *model) settle(refs []outboxstore.Ref) (unparked []Key) {
	touched := map[string]bool{}
	for _, ref := range refs {
		r := m.find(ref)
		if r.spot == inParked {
			r.spot, r.held = isDone, false
			touched[r.Key] = true
		}
		for _, l := range m.letters {
			if l.row == r && l.state != dlq.StateReplayed && l.state != dlq.StateDiscarded {
				l.state = dlq.StateReplayed
				if r.spot == isDead {
					r.spot = isDropped // nothing is left of it
				}
			}
		}
	}
	m.fixHeads()
	for key := range touched {
		if key != "" && len(m.of(inParked, key)) == 0 {
			unparked = append(unparked, Key{testLane, key})
		}
	}
	return unparked
}

func (m *model) carryOut(letters []*modelLetter) (parked, unparked []Key) {
	keys := map[string]bool{}
	for _, l := range letters {
		r := l.row
		keys[r.Key] = true
		switch l.state {
		case dlq.StateReplaying:
			l.state = dlq.StateReplayed
			r.spot, r.held, r.attempts, r.errors, r.crashed, r.time = inParked, false, 0, 0, false, 1
		case dlq.StateDiscarding:
			l.state = dlq.StateDiscarded
			r.spot, r.held = isDropped, false
		}
	}
	m.fixHeads()
	delete(keys, "")
	for key := range keys {
		if k := (Key{testLane, key}); len(m.of(inParked, key)) > 0 {
			parked = append(parked, k)
		} else {
			unparked = append(unparked, k)
		}
	}
	return parked, unparked
}

// String is what lot.dump says of tables that are as they should be.
func (m *model) String() string {
	var b strings.Builder
	for _, r := range m.of(inOutbox, "") {
		fmt.Fprintf(&b, "outbox %d %s\n", r.ID, r.MessageID)
	}
	for _, r := range m.of(inParked, "") {
		fmt.Fprintf(&b, "parked %d %s attempts=%d errors=%d time=%d crashed=%v held=%v\n", r.ID, r.MessageID, r.attempts, r.errors, r.time, r.crashed, r.held)
	}
	var lines []string
	for i, l := range m.letters {
		lines = append(lines, fmt.Sprintf("letter of %s, %04d: %s held=%v attempts=%d", l.row.MessageID, i, l.state, l.held, l.attempts))
	}
	slices.Sort(lines)
	for _, line := range lines {
		b.WriteString(numberless(line) + "\n")
	}
	for _, r := range m.of(isDone, "") {
		fmt.Fprintf(&b, "delivered %d %s\n", r.ID, r.MessageID)
	}
	fmt.Fprintf(&b, "alone %d\n", m.alone)
	return b.String()
}

func numberless(line string) string {
	before, after, _ := strings.Cut(line, ", ")
	_, after, _ = strings.Cut(after, ": ")
	return before + ": " + after
}

// dump tells what the tables hold of the lane, but for the times themselves.
func (p *fixture) dump(t testing.TB) string {
	t.Helper()
	now := `clock_timestamp()`
	length := `jsonb_array_length(errors)`
	if p.sqlite() {
		now, length = sqliteNow, `json_array_length(errors)`
	}
	var b strings.Builder
	lines := func(format, query string, columns int) {
		t.Helper()
		rows, err := p.db.QueryContext(t.Context(), database.Of(p.box.Config().Database).Expand(query))
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		defer rows.Close()
		for rows.Next() {
			values, dest := make([]any, columns), make([]any, columns)
			for i := range values {
				dest[i] = &values[i]
			}
			if err := rows.Scan(dest...); err != nil {
				t.Fatal(err)
			}
			for i, v := range values {
				if raw, ok := v.([]byte); ok {
					values[i] = string(raw)
				}
			}
			fmt.Fprintf(&b, format+"\n", values...)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
	}
	yes := func(column string) string { return `case when ` + column + ` then 'true' else 'false' end` }
	lines("outbox %d %s", `select id, message_id from {{outbox}} order by id`, 2)
	lines("parked %d %s attempts=%d errors=%d time=%d crashed=%s held=%s", `select id, message_id, attempts, `+length+`,
		case when next_at is null then 0 when next_at <= `+now+` then 1 else 2 end, `+yes("crashed")+`, `+yes("held")+` from {{parked}} order by id`, 7)
	lines("letter of %s: %s held=%s attempts=%d", `select message_id, state, `+yes("held")+`, attempts from {{dead_letters}} order by message_id, id`, 4)
	lines("delivered %d %s", `select id, message_id from {{outbox_history}} order by id`, 2)
	lines("alone %d", fmt.Sprintf(`select coalesce(suspect, 0) from {{relay_leases}} where lane = %d`, testLane), 1)
	return b.String()
}
