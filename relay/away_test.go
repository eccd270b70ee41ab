package relay_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// The database of a working relay goes away and comes back, longer than a lease.
// A lone worker knows what it has published, so nothing is repeated.
func TestRelay_ResumesWhenItsDatabaseComesBack(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	p := onServer(t, server)
	box, w := p.box(t), &wire{}

	// The relay is started while the server is down, and waits for it.
	all := spread(30, 10)
	commit(t, box, all...)
	server.Stop()
	log := &logbook{}
	cfg := relay.Config{Lease: time.Second, Window: 16, Logger: slog.New(log)}
	start(t, box, &sink{name: "w", wire: w, handle: slow(2 * time.Millisecond)}, cfg)
	eventually(t, "it says that it waits", func() bool { return log.count("database is not available; trying again") > 0 })
	server.Start()
	p.awaitNothingOwed(t)

	for i, stop := range []func(){server.Stop, server.Crash} {
		var more []*message.Message
		for _, m := range spread(30, 40) {
			m.UUID += [...]string{"/stopped", "/crashed"}[i]
			more = append(more, m)
		}
		commit(t, box, more...)
		all = append(all, more...)
		w.await(t, len(all)-len(more)/2) // in the middle of it
		stop()
		testserver.Pause(t.Context(), 1500*time.Millisecond) // longer than the lease
		server.Start()
		p.awaitNothingOwed(t)
	}
	w.check(t, all, 0)
}

func TestRelay_LosesAndRepeatsNothingWhileItsConnectionsAreCut(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "application_name=relay_cut")
	box, w := p.box(t), &wire{}
	sheltered := p.boxOn(t, p.open(t, "application_name=writer"), outbox.NoHistory)
	r := start(t, box, &sink{name: "w", wire: w, handle: slow(time.Millisecond)}, relay.Config{Lease: 3 * time.Second})
	killer := p.open(t, "application_name=killer")
	ctx, cancel := context.WithCancel(t.Context())
	var cut atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			killed, err := countIn(t.Context(), killer, `
				select count(*) filter (where pg_terminate_backend(pid))
				from pg_stat_activity where application_name = 'relay_cut' and query like $1`, "%"+p.cfg.Schema+"%")
			if err != nil {
				t.Errorf("cut: %v", err)
			}
			cut.Add(int64(killed))
			testserver.Pause(t.Context(), 30*time.Millisecond)
		}
	}()
	var all []*message.Message
	for i := 0; i < 100 || cut.Load() < 20 && i < 5000; i++ {
		for k := range 20 {
			all = append(all, keyed(string(rune('a'+k)), i, 1)...)
		}
		commit(t, sheltered, all[len(all)-20:]...)
		testserver.Pause(t.Context(), 10*time.Millisecond)
	}
	cancel()
	<-ended
	n := cut.Load()
	t.Logf("%d connections cut", n)
	if n < 20 {
		t.Errorf("%d connections cut: the run says nothing", n)
	}
	eventually(t, "nothing is owed", func() bool {
		left, err := countIn(t.Context(), killer, database.Of(p.cfg).Expand(`select count(*) from {{outbox}}`))
		return err == nil && left == 0
	})
	w.check(t, all, 0)
	if n := r.outcomes(t, "confirmed"); n != len(all) {
		t.Errorf("%d confirmed, want %d", n, len(all))
	}
}

func TestRelay_ReturnsWhatWaitingCannotMend(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		run := func(t *testing.T) error {
			r, err := relay.New(p.box(t), &sink{wire: &wire{}}, relay.Config{Logger: quiet})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), maxWait) // not for ever, should it work
			defer cancel()
			return r.Run(ctx)
		}
		wantSchema := func(t *testing.T, err error, set string, have, want int) {
			t.Helper()
			var schema *oncemill.SchemaError
			if !errors.As(err, &schema) || schema.Set != set || schema.Have != have || schema.Want != want {
				t.Errorf("error %v, want a SchemaError for %s, have %d, want %d", err, set, have, want)
			}
		}
		for _, set := range []string{"relay", "outbox", "dlq"} {
			latest := p.count(t, `select max(version) from {{migrations}} where set_name = $1`, set)
			compatible := p.count(t, `select compatible from {{migrations}} where set_name = $1 and version = $2`, set, latest)
			p.execute(t, `update {{migrations}} set version = 99, compatible = 99 where set_name = $1 and version = $2`, set, latest)
			wantSchema(t, run(t), set, 99, latest)
			p.execute(t, `update {{migrations}} set version = $2, compatible = $3 where set_name = $1 and version = 99`, set, latest, compatible)

			p.execute(t, `update {{migrations}} set set_name = 'moved' where set_name = $1`, set)
			wantSchema(t, run(t), set, 0, latest)
			p.execute(t, `update {{migrations}} set set_name = $1 where set_name = 'moved'`, set)
		}

		commit(t, p.box(t), keyed("k", 0, 5)...)
		if p.postgres() {
			p.execute(t, `alter sequence {{outbox_id}} restart with 2`)
		} else {
			p.execute(t, `update sqlite_sequence set seq = 1 where '"' || name || '"' = '{{outbox}}'`)
		}
		if err := run(t); !errors.Is(err, outbox.ErrSequenceBehind) {
			t.Errorf("error %v, want ErrSequenceBehind", err)
		}
		if _, err := outboxqueue.Of(p.box(t)).RepairSequence(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		if p.postgres() {
			p.execute(t, `alter sequence {{outbox_id}} cache 20`)
			if err := run(t); !errors.Is(err, outbox.ErrSequenceCached) {
				t.Errorf("error %v, want ErrSequenceCached", err)
			}
			p.execute(t, `alter sequence {{outbox_id}} cache 1`)
		}
		w := &wire{}
		start(t, p.box(t), &sink{name: "w", wire: w}, unhurried)
		p.awaitNothingOwed(t)
		w.check(t, keyed("k", 0, 5), 0)
	})
}

// A database without any table of oncemill's.
func TestRelay_ReturnsAnErrorIfNothingIsMigrated(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	box, err := outbox.New(pg.DB, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	r, err := relay.New(box, &sink{wire: &wire{}}, relay.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	var schema *oncemill.SchemaError
	if err := r.Run(t.Context()); !errors.As(err, &schema) || schema.Have != 0 {
		t.Errorf("error %v, want a SchemaError", err)
	}
}

// A sink that gives up ends the relay, with its lanes given back.
func TestRelay_EndsWithItsSink(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		for name, cause := range map[string]error{"with an error": errors.New("no such exchange type"), "without one": nil} {
			t.Run(name, func(t *testing.T) {
				r, err := relay.New(p.box(t), &quitter{cause: cause, p: p, t: t}, relay.Config{Logger: quiet, Lease: 5 * time.Second})
				if err != nil {
					t.Fatal(err)
				}
				if err := r.Run(t.Context()); err == nil || cause != nil && !errors.Is(err, cause) {
					t.Errorf("error %v, want the sink's", err)
				}
				if n := p.count(t, `select count(*) from {{relay_leases}} where owner <> ''`); n != 0 {
					t.Errorf("%d leases are not given back", n)
				}
			})
		}
	})
}

// quitter gives up once the relay has lanes.
type quitter struct {
	cause error
	p     testDB
	t     *testing.T
}

func (q *quitter) Run(context.Context) error {
	eventually(q.t, "lanes", func() bool {
		return q.p.count(q.t, `select count(*) from {{relay_leases}} where owner <> ''`) > 0
	})
	return q.cause
}

func (q *quitter) Publish(context.Context, []*relay.Message, func(*relay.Message, error)) {}
