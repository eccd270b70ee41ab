package outbox_test

import (
	"context"
	"sync"
	"testing"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// hold keeps a snapshot of another session for as long as the test runs.
func (p *fixture) hold(t *testing.T) {
	t.Helper()
	p.exec(t, `create table report (id int)`)
	tx, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	_, err = tx.ExecContext(t.Context(), `insert into report values (1)`)
	expectNoError(t, err)
}

// Reads lock all partitions, and on a slow server somebody always reads. Each of
// these takes longer than the shortest wait for a lock.
func TestRing_TruncatesBesideReadsThatNeverPause(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.hold(t)
	const partitions, readers, mostRounds = 3, 4, 30
	for turn := range int64(partitions) {
		p.leaveDead(t, turn)
	}
	p.enter(t, partitions)
	ctx, stop := context.WithCancel(t.Context())
	var reading sync.WaitGroup
	defer reading.Wait()
	defer stop()
	text := p.expand(t, `select pg_sleep($1::int / 1000.0) from (select count(*) from {{outbox}}) o`)
	for i := range readers {
		took := 40 + 20*i // ms: even if they begin together, they do not end together
		reading.Go(func() {
			for ctx.Err() == nil {
				if _, err := p.db.ExecContext(t.Context(), text, took); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	eventually(t, "all readers read", func() bool {
		return p.count(t, `select count(*) from pg_locks where granted and relation = '{{outbox_0}}'::regclass`) == readers
	})
	truncated, rounds := 0, 0
	for ; truncated < partitions && rounds < mostRounds; rounds++ {
		truncated += p.maintain(t).Truncated
	}
	t.Logf("%d truncations in %d rounds", truncated, rounds)
	if truncated != partitions {
		t.Errorf("%d truncations in %d rounds, want %d", truncated, rounds, partitions)
	}
}

// Where reads pass over many dead rows of the partition being written, the ids go
// on to the next one, so that it can be truncated; but not while another one holds
// rows: a backlog would fill the whole ring.
func TestRing_TurnsEarlyOnceTheOthersAreClean(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.hold(t)
	p.leaveDead(t, 0)
	p.leaveDead(t, 1)
	p.enter(t, 4)
	p.publish(t, newMessage("owed", ""))
	p.enter(t, 5)
	turn := func() int64 {
		last, err := p.queue.LastID(t.Context())
		expectNoError(t, err)
		return (last + 1) >> 16 // of the next id
	}
	passed := func() int {
		return p.count(t, `select sum(pg_stat_get_tuples_returned(indexrelid) - pg_stat_get_tuples_fetched(indexrelid))
			from pg_index where indrelid in ('{{outbox_0}}'::regclass, '{{outbox_1}}'::regclass)`)
	}
	look := func() outboxstore.Maintained {
		p.read(t)
		return p.maintain(t)
	}
	look()
	before := passed()
	eventually(t, "reads have passed over many dead rows", func() bool {
		if done := look(); done.Turned+done.Truncated > 0 {
			t.Errorf("with a row in another partition the upkeep did %+v", done)
		}
		return passed()-before > 4*idsPerPartition
	})
	if n := turn(); n != 5 {
		t.Errorf("the ids are in turn %d", n)
	}
	p.remove(t, refs(p.read(t))...)
	var done outboxstore.Maintained
	eventually(t, "the upkeep meets no lock", func() bool {
		done = p.maintain(t)
		return done.Blocked == 0
	})
	if done.Truncated != 1 || done.Turned != 1 || done.Again == 0 {
		t.Errorf("the upkeep did %+v", done)
	}
	if n := turn(); n != 6 {
		t.Errorf("the ids are in turn %d", n)
	}
	p.publish(t, newMessage("next", ""))
	p.expectTruncated(t, 1) // what was left early
	if n := p.size(t, 0) + p.size(t, 1); n != 0 {
		t.Errorf("%d bytes", n)
	}
	// Nothing is dead any more: there is nothing to turn for.
	for range 20 {
		if done := look(); done.Turned != 0 {
			t.Errorf("the upkeep did %+v", done)
		}
	}
	expectIDs(t, p.read(t), "next")
}
