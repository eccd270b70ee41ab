package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// setSequence makes id+1 the next id.
func (p *fixture) setSequence(t *testing.T, id int64) {
	t.Helper()
	if p.isSQLite() {
		p.exec(t, `update sqlite_sequence set seq = $1 where name = trim('{{outbox}}', '"')`, id)
		return
	}
	p.exec(t, `select setval('{{outbox_id}}', $1)`, id)
}

// insert writes a row with an id of the test's choice, as a restore does.
func (p *fixture) insert(t *testing.T, id int64, key, messageID string) {
	t.Helper()
	p.exec(t, `insert into {{outbox}} (id, lane, topic, message_id, key, payload) values ($1, $2, 'orders', $3, $4, $5)`,
		id, outbox.Lane(key, messageID), messageID, key, []byte{})
}

// A server that lost its tail gives ids out again, while a worker still has to
// delete the rows that it read before.
func TestRemove_SparesANewRowWithAnOldID(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		for _, history := range []time.Duration{time.Hour, outbox.NoHistory} {
			p.use(t, p.db, func(cfg *outbox.Config) { cfg.History = history })
			p.publish(t, newMessage("older", "k"))
			p.remove(t, p.read(t)[0].Ref)
			p.publish(t, newMessage("old 1", "k"), newMessage("old 2", "k"))
			old := p.read(t)
			loseTail := func() {
				p.exec(t, `delete from {{outbox}}`)
				p.setSequence(t, old[0].ID-1)
			}
			loseTail()
			p.publish(t, newMessage("new 1", "k"), newMessage("old 2", "k")) // one is published again
			anew := p.read(t)
			for i := range anew {
				if anew[i].ID != old[i].ID || anew[i].Lane != old[i].Lane {
					t.Fatalf("the ids were not given out again: %+v", anew)
				}
			}
			p.remove(t, refs(old)...)
			expectIDs(t, p.read(t), "new 1", "old 2")

			for _, r := range old {
				p.exec(t, `delete from {{outbox}} where lane = $1 and id = $2`, r.Lane, r.ID)
			}
			if n := len(p.read(t)); n != 0 {
				t.Errorf("a naive deletion left %d rows: the test shows nothing", n)
			}
			loseTail()
		}
	})
}

// The same, with a server that really loses its tail.
func TestRemove_SparesNewRowsAfterACrashThatLostCommits(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t, "synchronous_commit=off", "bgwriter_lru_maxpages=0", "autovacuum=off")
	cfg := outbox.Config{Database: oncemill.Config{Dialect: oncemill.PostgreSQL}}
	p := newFixture(t, &pq.Driver{}, server.DSN()+"&binary_parameters=yes", cfg)
	p.publish(t, newMessage("durable", "k"))
	p.exec(t, `checkpoint`)
	// Without its writer the log stays in memory; the crash takes it away.
	writer := p.count(t, `select pid from pg_stat_activity where backend_type = 'walwriter'`)
	expectNoError(t, syscall.Kill(writer, syscall.SIGSTOP))
	p.publish(t, messages("lost", 500)...)
	old := p.read(t)
	server.Kill()
	server.Start()
	eventually(t, "the pool has new connections", func() bool { return p.db.PingContext(t.Context()) == nil })
	expectIDs(t, p.read(t), "durable")
	expectNoError(t, p.queue.Check(t.Context()))

	p.publish(t, messages("new", 500)...)
	again := map[int64]bool{}
	for _, r := range p.read(t) {
		again[r.ID] = true
	}
	repeated := 0
	for _, r := range old {
		if again[r.ID] && r.MessageID != "durable" {
			repeated++
		}
	}
	if repeated < 100 {
		t.Fatalf("%d ids were given out again: the test shows nothing", repeated)
	}
	p.remove(t, refs(old)...)
	if n := p.count(t, `select count(*) from {{outbox}} where message_id like 'new%'`); n != 500 {
		t.Errorf("%d of 500 new rows are left", n)
	}
	expectNoError(t, p.queue.Check(t.Context()))
	for _, r := range old {
		p.exec(t, `delete from {{outbox}} where id = $1`, r.ID)
	}
	if n := p.count(t, `select count(*) from {{outbox}}`); n > 500-repeated {
		t.Errorf("a naive deletion by id left %d rows: the test shows nothing", n)
	}
}

func TestCheck_PassesWhereIDsOnlyGrow(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		expectNoError(t, p.queue.Check(t.Context())) // nothing was ever published
		p.publish(t, messages("m", 40)...)
		expectNoError(t, p.queue.Check(t.Context()))
		p.remove(t, refs(p.read(t))...)
		expectNoError(t, p.queue.Check(t.Context()))
		p.exec(t, `delete from {{outbox_history}}`)
		expectNoError(t, p.queue.Check(t.Context()))
	})
}

func TestCheck_RefusesASequenceBehindItsRows(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, newMessage("1", "k"), newMessage("2", "k"), newMessage("3", "k"))
		rows := p.read(t)
		if p.isSQLite() {
			p.remove(t, rows[2].Ref) // SQLite itself looks at the rows of the table
		}
		p.setSequence(t, rows[0].ID)
		err := p.queue.Check(t.Context())
		expectError(t, err, outbox.ErrSequenceBehind)

		// A naive producer that goes on either fails or takes the id of
		// another message.
		err = p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			return p.box.Publisher(tx).Publish("orders", newMessage("4", "k"))
		})
		switch {
		case p.isSQLite():
			if err != nil || p.count(t, `select count(*) from {{outbox}} o join {{outbox_history}} h on h.id = o.id`) != 1 {
				t.Errorf("a naive producer got %v, no id twice: the test shows nothing", err)
			}
		case sqlerr.State(err) != "23505":
			t.Errorf("a naive producer got %v: the test shows nothing", err)
		}
	})
}

func TestCheck_RefusesASequenceBehindTheHistory(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, newMessage("1", "k"), newMessage("2", "k"))
		rows := p.read(t)
		p.remove(t, refs(rows)...)
		p.setSequence(t, rows[0].ID)
		expectError(t, p.queue.Check(t.Context()), outbox.ErrSequenceBehind)
		last, err := p.queue.RepairSequence(t.Context(), 0)
		if err != nil || last != rows[1].ID {
			t.Errorf("repaired to %d, %v; want %d", last, err, rows[1].ID)
		}
		expectNoError(t, p.queue.Check(t.Context()))
		p.publish(t, newMessage("3", "k"))
		if got := p.read(t)[0].ID; got != rows[1].ID+1 {
			t.Errorf("the next id is %d", got)
		}
	})
}

// Scheduled messages have a sequence of their own. SQLite looks at its rows itself.
func TestCheck_RefusesASequenceBehindWhatIsScheduled(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	when := time.Now().Add(time.Hour)
	later := func(id string) *message.Message {
		m := newMessage(id, "k")
		outbox.SetDeliverAt(m, when)
		return m
	}
	expectNoError(t, p.queue.Check(t.Context()))
	p.publish(t, later("1"), later("2"), later("3"))
	expectNoError(t, p.queue.Check(t.Context()))
	restart := func() { p.exec(t, `alter table {{scheduled}} alter column seq restart`) }
	restart()
	expectError(t, p.queue.Check(t.Context()), outbox.ErrSequenceBehind)
	err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		return p.box.Publisher(tx).Publish("orders", later("4"))
	})
	if err == nil {
		t.Error("a naive producer succeeded: the test shows nothing")
	}
	restart()
	if _, err := p.queue.RepairSequence(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	expectNoError(t, p.queue.Check(t.Context()))
	p.publish(t, later("4"))
	if highest := p.count(t, `select seq from {{scheduled}} where message_id = '4'`); highest != 4 {
		t.Errorf("the next of them is %d", highest)
	}
	if _, err := p.queue.RepairSequence(t.Context(), 0); err != nil || p.count(t, `select nextval(pg_get_serial_sequence('{{scheduled}}', 'seq'))`) != 5 {
		t.Errorf("repaired where nothing was wrong: %v", err)
	}
}

func TestCheck_RefusesASequenceWithACache(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	p.exec(t, `alter sequence {{outbox_id}} cache 2`)
	expectError(t, p.queue.Check(t.Context()), outbox.ErrSequenceCached)
	p.exec(t, `alter sequence {{outbox_id}} cache 1`)
	expectNoError(t, p.queue.Check(t.Context()))
}

func TestCheck_RefusesTablesThatAreNotMigrated(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.exec(t, `delete from {{migrations}}`)
		var schema *oncemill.SchemaError
		if err := p.queue.Check(t.Context()); !errors.As(err, &schema) || schema.Set != "outbox" || schema.Have != 0 || schema.Want < 1 {
			t.Errorf("got %v", err)
		}
	})
}

func TestRepairSequence_IsHarmlessWhereNothingIsWrong(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		_, err := p.queue.RepairSequence(t.Context(), 0)
		expectNoError(t, err)
		p.publish(t, newMessage("1", "k"), newMessage("2", "k"))
		rows := p.read(t)
		for range 2 {
			last, err := p.queue.RepairSequence(t.Context(), 0)
			if err != nil || last != rows[1].ID {
				t.Errorf("repaired to %d, %v; want %d", last, err, rows[1].ID)
			}
		}
		p.publish(t, newMessage("3", "k"))
		expectIDs(t, p.read(t), "1", "2", "3")
		expectNoError(t, p.queue.Check(t.Context()))
	})
}

// Ids that the outbox knows nothing of are in use elsewhere.
func TestRepairSequence_SetsItAboveTheFloor(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, newMessage("1", "k"))
		first := p.read(t)[0].ID
		if last, err := p.queue.LastID(t.Context()); err != nil || last != first {
			t.Errorf("the last id is %d, %v; want %d", last, err, first)
		}
		for floor, want := range map[int64]int64{0: first, first + 40: first + 40} {
			if last, err := p.queue.RepairSequence(t.Context(), floor); err != nil || last < want {
				t.Errorf("repaired to %d, %v; want %d", last, err, want)
			}
		}
		p.publish(t, newMessage("2", "k"))
		if got := p.read(t)[1].ID; got != first+41 {
			t.Errorf("the next id is %d, want %d", got, first+41)
		}
	})
}

// Producers go on while the sequence is mended: none gets an id below one that
// was in use.
func TestRepairSequence_MendsWhileOthersPublish(t *testing.T) {
	const highest = int64(1) << 40 // nobody counts up to there
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.insert(t, highest, "k", "restored")
		p.setSequence(t, 1)
		if p.isSQLite() {
			p.remove(t, refs(p.read(t))...)
		}
		expectError(t, p.queue.Check(t.Context()), outbox.ErrSequenceBehind)

		publishing, stop := context.WithCancel(t.Context())
		defer stop()
		var writers sync.WaitGroup
		for w := range 3 {
			writers.Go(func() {
				for i := 0; publishing.Err() == nil; i++ {
					err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
						return p.box.Publisher(tx).Publish("orders", newMessage(fmt.Sprint(w, "-", i), ""))
					})
					expectNoError(t, err)
				}
			})
		}
		eventually(t, "somebody publishes", func() bool {
			return p.count(t, `select count(*) from {{outbox}} where message_id <> 'restored'`) > 3
		})
		last, err := p.queue.RepairSequence(t.Context(), 0)
		if err != nil || last < highest {
			t.Errorf("repaired to %d, %v", last, err)
		}
		expectNoError(t, p.queue.Check(t.Context()))
		eventually(t, "somebody publishes after the repair", func() bool {
			return p.count(t, `select count(*) from {{outbox}} where id > $1`, last+3) > 0
		})
		stop()
		writers.Wait()
		// Ids below are of before, those above of after the repair: no gap was
		// taken by anybody later.
		if n := p.count(t, `select count(*) from {{outbox}} where id between $1 and $2`, last-100, last); n > 1 {
			t.Errorf("%d ids just below the repaired one", n)
		}
	})
}

// The highest id is looked up once nobody writes any more.
func TestRepairSequence_WaitsForOpenWriters(t *testing.T) {
	t.Parallel()
	for name, open := range databases {
		if name == "sqlite" {
			continue // has one writer anyway
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t)
			tx, err := p.db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback()
			_, err = tx.ExecContext(t.Context(), p.expand(t, `insert into {{outbox}} (id, lane, topic, message_id, payload) values (1000, 1, 'orders', 'restored', '')`))
			expectNoError(t, err)
			var last int64
			var repair sync.WaitGroup
			repair.Go(func() {
				var err error
				last, err = p.queue.RepairSequence(t.Context(), 0)
				expectNoError(t, err)
			})
			eventually(t, "the repair waits", func() bool {
				return p.count(t, `select count(*) from pg_locks where not granted and relation = $1::regclass`, p.expand(t, `{{outbox}}`)) == 1
			})
			expectNoError(t, tx.Commit())
			repair.Wait()
			if last != 1000 {
				t.Errorf("repaired to %d: the writer's id was overlooked", last)
			}
			expectNoError(t, p.queue.Check(t.Context()))
		})
	}
}

// A writer that stays open costs the repair its time, and others little: they do not wait
// behind it for ever.
func TestRepairSequence_DoesNotWaitForEver(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	tx, err := p.db.BeginTx(t.Context(), nil)
	expectNoError(t, err)
	defer tx.Rollback()
	_, err = tx.ExecContext(t.Context(), p.expand(t, `insert into {{outbox}} (id, lane, topic, message_id, payload) values (1000, 1, 'orders', 'open', '')`))
	expectNoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if last, err := p.queue.RepairSequence(ctx, 0); sqlerr.State(err) != "55P03" {
		t.Errorf("repaired to %d, %v, beside an open writer", last, err)
	}
	p.publish(t, message.NewMessage("after", nil))
}
