package relay_test

import (
	"context"
	"errors"
	"log/slog"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

const readOnlyMessage = "the database is read-only; nothing is published until this worker is connected to a server that takes writes"

// A worker that is started against a standby says so and ends; one whose
// connections are led to a standby says so, publishes nothing, and goes on when
// the standby is promoted.
func TestRelay_TakesAStandbyForWhatItIs(t *testing.T) {
	t.Parallel()
	primary := testserver.PrivatePostgres(t)
	db, x := openSwitched(t, primary)
	p := migrated(t, testDB{db: db, driver: "postgres", dsn: primary.DSN()})
	standby := primary.Standby()
	behind := p
	behind.db = standby.Open()

	mustRefuse := func(what string, p testDB) {
		t.Helper()
		r, err := relay.New(p.box(t), &sink{wire: &wire{}}, relay.Config{Logger: quiet})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), maxWait)
		defer cancel()
		if err := r.Run(ctx); !errors.Is(err, outbox.ErrReadOnly) {
			t.Errorf("%s: error %v, want ErrReadOnly", what, err)
		}
	}
	eventually(t, "the standby follows", func() bool {
		return behind.count(t, `select count(*) from {{migrations}}`) == p.count(t, `select count(*) from {{migrations}}`)
	})
	mustRefuse("standby", behind)
	restricted := p
	restricted.db = primary.Open("default_transaction_read_only=on")
	mustRefuse("read-only role", restricted)

	w, log := &wire{}, &logbook{}
	all := spread(30, 10)
	commit(t, p.box(t), all...)
	r := start(t, p.box(t), &sink{name: "w", wire: w}, relay.Config{Lease: 2 * time.Second, Logger: slog.New(log)})
	p.awaitNothingOwed(t)
	eventually(t, "the standby knows it", func() bool { return behind.owed(t) == 0 })

	// What is committed now reaches the standby, and the worker, too, which sees
	// it there and cannot have a lease.
	more := keyed("k", 0, 20)
	x.turn(t, standby)
	eventually(t, "it says that the server is read-only", func() bool { return log.count(readOnlyMessage) > 0 })
	box := p.boxOn(t, primary.Open(), outbox.NoHistory)
	eventually(t, "its leases have run out", func() bool {
		return behind.count(t, `select count(*) from {{relay_leases}} where owner <> '' and lease_until > clock_timestamp()`) == 0
	})
	commit(t, box, more...)
	eventually(t, "the standby has them", func() bool { return behind.owed(t) == len(more) })
	if n := w.count(); n != len(all) {
		t.Errorf("%d messages arrived while the server took no writes", n-len(all))
	}

	primary.Stop()
	behind.execute(t, `select pg_promote()`)
	behind.awaitNothingOwed(t)
	w.check(t, append(all, more...), 0)
	if n := log.count(readOnlyMessage); n != 1 {
		t.Errorf("said %d times that the server is read-only, want once", n)
	}
	eventually(t, "it says that it goes on", func() bool { return log.count("leases are renewed again") > 0 })
	r.stop()
}

// The primary is lost with commits that the standby has not got: what is out of
// those are ghosts. All that the standby has, and all that is committed there
// afterwards with ids that were given out before, arrives.
func TestRelay_LosesNothingThatAPromotedStandbyHolds(t *testing.T) {
	t.Parallel()
	primary := testserver.PrivatePostgres(t, "wal_sender_timeout=0", "wal_receiver_timeout=0") // the sender is stopped for long
	db, x := openSwitched(t, primary)
	p := migrated(t, testDB{db: db, driver: "postgres", dsn: primary.DSN()})
	p.execute(t, makeFacts)
	standby := primary.Standby()
	behind := p
	behind.db = standby.Open()

	w := &wire{}
	var workers []running
	var logs []*logbook
	for _, name := range []string{"a", "b"} {
		log := &logbook{}
		cfg := relay.Config{Lease: 2 * time.Second, Logger: slog.New(log)}
		workers, logs = append(workers, start(t, p.box(t), &sink{name: name, wire: w, handle: slow(100 * time.Millisecond)}, cfg)), append(logs, log)
	}
	load := p.produce(t, testserver.Rounds(3, 6), 2*time.Millisecond)
	eventually(t, "the standby follows", func() bool {
		n, err := countIn(t.Context(), behind.db, `select count(*) from pg_class where relname = 'facts'`)
		return err == nil && n == 1 && behind.count(t, `select count(*) from facts`) > 100
	})
	// The sender is stopped, so that the primary goes with a tail of its own.
	sender := p.count(t, `select pid from pg_stat_replication`)
	if err := syscall.Kill(sender, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	before := load.count()
	eventually(t, "a tail", func() bool { return load.count() > before+200 })
	// The workers still have something to delete of that tail when it goes.
	p.execute(t, `create function refuse() returns trigger language plpgsql as $$ begin raise 'not now'; end $$`)
	p.execute(t, `create trigger refuse before delete on {{outbox}} for each row execute function refuse()`)
	for _, log := range logs {
		eventually(t, "deletions fail", func() bool { return log.count("deleting confirmed messages failed; trying again") > 0 })
	}
	highest := p.count(t, `select last_value from {{outbox_id}}`)
	primary.Kill()
	behind.execute(t, `select pg_promote()`)
	known := behind.count(t, `select count(*) from facts`)
	lost, owed := load.count()-known, behind.owedInAll(t)
	next := behind.count(t, `select last_value from {{outbox_id}}`)
	// Before they get there their ids have been given out again.
	others := behind.produce(t, 2, time.Millisecond)
	eventually(t, "ids are given out again", func() bool { return behind.count(t, `select last_value from {{outbox_id}}`) > highest+50 })
	others.halt()
	x.turn(t, standby)
	if lost < 100 || next >= highest {
		t.Errorf("%d commits lost, ids go on from %d and were at %d: the test shows nothing", lost, next, highest)
	}
	after := load.count()
	eventually(t, "traffic on the new server", func() bool { return load.count() > after+testserver.Rounds(200, 500) })
	load.halt()
	p.awaitNothingOwedInAll(t)
	c := p.audit(t, w)
	t.Logf("%d commits lost with the primary, the promoted standby owes %d; in the end %v", lost, owed, c)
	if c.reused == 0 {
		t.Error("no id was given out again: the test shows nothing")
	}
	if c.ghosts > lost {
		t.Errorf("%d ghosts, more than the %d commits that were lost", c.ghosts, lost)
	}
	for _, r := range workers {
		if n := r.outcomes(t, "refused") + r.outcomes(t, "unknown"); n > 0 {
			t.Errorf("%d messages were charged", n)
		}
		r.stop()
	}
	if n := p.count(t, `select count(*) from {{dead_letters}}`); n > 0 {
		t.Errorf("%d dead letters", n)
	}
}
