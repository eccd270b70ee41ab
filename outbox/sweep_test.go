package outbox_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// ringed returns an outbox on PostgreSQL with n rows in one partition of the ring,
// as a read returns them.
func ringed(t *testing.T, n int) (*fixture, []outboxstore.Row) {
	t.Helper()
	p := onPostgres(t, "binary_parameters=yes")
	p.exec(t, `insert into {{outbox}} (lane, id, topic, message_id, payload)
		select i % 32, i, 'orders', 'm' || i, '' from generate_series(1, $1::int) i`, n)
	rows := p.read(t)
	if len(rows) != n {
		t.Fatalf("%d rows, want %d", len(rows), n)
	}
	return p, rows
}

// expectSweeps fails unless the statements since the last look were as many
// sweeps, and as many removals by identity.
func (p *fixture) expectSweeps(t *testing.T, sweeps, others int) {
	t.Helper()
	sent := p.tap.sent()
	byCTID, byIdentity := 0, 0
	for _, s := range sent {
		switch {
		case strings.Contains(s.text, "ctid"):
			byCTID++
		case strings.Contains(s.text, "delete from"):
			byIdentity++
		}
	}
	if byCTID != sweeps || byIdentity != others {
		t.Errorf("%d sweeps and %d other removals, want %d and %d: %s", byCTID, byIdentity, sweeps, others, firstWords(sent))
	}
}

func TestRemove_SweepsManyRows(t *testing.T) {
	t.Parallel()
	for name, history := range map[string]time.Duration{"move": time.Hour, "delete": outbox.NoHistory} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, rows := ringed(t, 500)
			p.use(t, p.db, func(cfg *outbox.Config) { cfg.History = history })
			p.tap.sent()
			p.remove(t, refs(rows[:400])...)
			p.expectSweeps(t, 1, 0)
			if left := p.read(t); len(left) != 100 {
				t.Errorf("%d rows are left, want 100", len(left))
			}
			want := map[time.Duration]int{time.Hour: 400, outbox.NoHistory: 0}[history]
			if n := p.count(t, `select count(*) from {{outbox_history}}`); n != want {
				t.Errorf("%d rows in the history, want %d", n, want)
			}
		})
	}
}

// Whatever part of one identity differs, a sweep takes nothing, and the way by
// identity takes all rows but that one.
func TestRemove_SweepsNoRowOfAnotherIdentity(t *testing.T) {
	t.Parallel()
	changes := map[string]func(r *outboxstore.Ref){
		"lane":            func(r *outboxstore.Ref) { r.Lane = (r.Lane + 1) % outbox.Lanes },
		"id":              func(r *outboxstore.Ref) { r.ID += 1000 },
		"message id":      func(r *outboxstore.Ref) { r.MessageID = "n" + r.MessageID[1:] },
		"created later":   func(r *outboxstore.Ref) { r.CreatedAt = r.CreatedAt.Add(time.Microsecond) },
		"created earlier": func(r *outboxstore.Ref) { r.CreatedAt = r.CreatedAt.Add(-time.Microsecond) },
	}
	for _, name := range slices.Sorted(maps.Keys(changes)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, rows := ringed(t, 200)
			gone := refs(rows)
			changes[name](&gone[70])
			p.tap.sent()
			p.remove(t, gone...)
			p.expectSweeps(t, 1, 1)
			expectIDs(t, p.read(t), rows[70].MessageID)
			if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 199 {
				t.Errorf("%d rows in the history, want 199", n)
			}
		})
	}
}

// Two identities that give the same bytes one after the other are two all the
// same.
func TestRemove_TellsWhereAMessageIDEnds(t *testing.T) {
	t.Parallel()
	p, rows := ringed(t, 100)
	gone := refs(rows)
	gone[10].MessageID, gone[11].MessageID = gone[10].MessageID+gone[11].MessageID[:1], gone[11].MessageID[1:]
	p.remove(t, gone...)
	expectIDs(t, p.read(t), rows[10].MessageID, rows[11].MessageID)
}

func TestRemove_FindsRowsThatHaveMoved(t *testing.T) {
	t.Parallel()
	for name, move := range map[string]string{
		"all updated": `update {{outbox}} set topic = 'other'`,
		"one updated": `update {{outbox}} set topic = 'other' where id = 150`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, rows := ringed(t, 300)
			p.remove(t, refs(rows[:10])...)
			p.exec(t, move)
			p.tap.sent()
			p.remove(t, refs(rows[10:])...)
			p.expectSweeps(t, 1, 1)
			expectIDs(t, p.read(t))
			if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 300 {
				t.Errorf("%d rows in the history, want 300", n)
			}
		})
	}
}

// The rows of another outbox, or of a time before a restart, have no ctid.
func TestRemove_NeedsNoCTID(t *testing.T) {
	t.Parallel()
	p, rows := ringed(t, 300)
	gone := refs(rows)
	for i := range gone[:150] {
		gone[i].CTID = outboxstore.CTID{}
	}
	p.tap.sent()
	p.remove(t, gone...)
	p.expectSweeps(t, 1, 1)
	expectIDs(t, p.read(t))
}

func TestRemove_SweepsEachPartition(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	for i := range 4 {
		p.exec(t, `insert into {{outbox}} (lane, id, topic, message_id, payload)
			select i % 32, i + $1::int * 65536, 'orders', 'm' || i, '' from generate_series(1, 70 - $1::int * 3) i`, i)
	}
	rows := p.read(t)
	p.tap.sent()
	p.remove(t, refs(rows)...)
	p.expectSweeps(t, 3, 1) // 70, 67, 64; 61 are too few
	expectIDs(t, p.read(t))
	if n := p.count(t, `select count(*) from {{outbox_history}}`); n != len(rows) {
		t.Errorf("%d rows in the history, want %d", n, len(rows))
	}
}

// A row of one partition is locked: it is returned, and those of all partitions are removed.
func TestRemove_SweepsBesideALockedPartition(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	for i := range 3 {
		p.exec(t, `insert into {{outbox}} (lane, id, topic, message_id, payload)
			select i % 32, i + $1::int * 65536, 'orders', 'm' || i, '' from generate_series(1, 70) i`, i)
	}
	rows := p.read(t)
	release := p.lock(t, `select from {{outbox}} where id = 1 for update`)
	removal, err := p.tryRemove(t, refs(rows)...)
	if left := p.read(t); err != nil || len(removal.Locked) != 1 || len(left) != 1 {
		t.Errorf("%d are locked, %d are left, %v; want the one that is locked", len(removal.Locked), len(left), err)
	}
	release()
	p.remove(t, removal.Locked...)
	expectIDs(t, p.read(t))
}

// A role that may use the outbox but not its partitions one by one.
func TestRemove_NeedsNoRightOnAPartition(t *testing.T) {
	t.Parallel()
	p, rows := ringed(t, 100)
	role := fmt.Sprintf("r%d", time.Now().UnixNano())
	for _, text := range []string{
		`create role ` + role, `grant usage on schema {{schema}} to ` + role,
		`grant select, delete on {{outbox}} to ` + role, `grant insert on {{outbox_history}} to ` + role,
		`set role ` + role,
	} {
		p.db.SetMaxOpenConns(1)
		p.exec(t, text)
	}
	p.remove(t, refs(rows)...)
	p.exec(t, `reset role`)
	p.exec(t, `drop owned by `+role)
	p.exec(t, `drop role `+role)
	expectIDs(t, p.read(t))
	if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 100 {
		t.Errorf("%d rows in the history, want 100", n)
	}
}
