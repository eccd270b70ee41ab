package status_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/status"
)

// moody is a sink that refuses some messages and finds a topic unavailable.
type moody struct{ calls *atomic.Int64 }

func (m moody) Publish(topic string, _ ...*message.Message) error {
	time.Sleep(2 * time.Millisecond) //nolint:forbidigo // a broker takes time
	switch n := m.calls.Add(1); {
	case topic == "nowhere":
		return relay.Unavailable(fmt.Errorf("no queue"))
	case n%7 == 0:
		return relay.Refused(fmt.Errorf("not this one"))
	}
	return nil
}
func (moody) Close() error { return nil }

// While a worker delivers, retries and gives up, and producers write, each number that is not
// marked is what a count by hand finds in the same snapshot.
func TestRead_IsRightAgainstACountByHandUnderLoad(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(pg.DB, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	where := database.Of(box.Config().Database)
	worker, err := relay.New(box, relay.FromPublisher(moody{&atomic.Int64{}}), relay.Config{Retry: relay.Retry{MaxAttempts: 2, Initial: 200 * time.Millisecond}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	group.Go(func() {
		if err := worker.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	group.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			_ = box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error { // it ends with the test
				for i := range 20 {
					m := message.NewMessage(fmt.Sprintf("%d-%d", n, i), nil)
					outbox.SetKey(m, fmt.Sprint("k", rand.IntN(500)))
					if err := box.Publish(ctx, tx, []string{"orders", "bills", "nowhere"}[i%3], m); err != nil {
						return err
					}
				}
				return nil
			})
		}
	})
	// All statements of one connection run in one transaction, which has one snapshot.
	one := pg.Open(t)
	defer one.Close() //nolint:errcheck // nothing was written
	one.SetMaxOpenConns(1)
	one.SetMaxIdleConns(1)
	reader, err := status.New(one, status.Config{Database: pg.Config, Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	exec := func(statement string) {
		t.Helper()
		if _, err := one.ExecContext(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	moved := map[string]bool{}
	still := func() []string { // always 0 so far
		return slices.DeleteFunc([]string{"the outbox", "retrying", "set aside", "dead letters"}, func(what string) bool { return moved[what] })
	}
	for moment := 0; moment < 10 || moment < 500 && len(still()) > 0; moment++ {
		testserver.Pause(t.Context(), time.Duration(200+rand.IntN(400))*time.Millisecond)
		exec(`begin isolation level repeatable read read only`)
		s, err := reader.Read(t.Context())
		if err != nil || len(s.Silent)+len(s.Forbidden) > 0 {
			t.Fatalf("%+v, %v", s, err)
		}
		for what, c := range map[string]struct {
			count status.Count
			query string
		}{
			"the outbox":      {s.Outbox.Depth, `select count(*) from {{outbox}}`},
			"retrying":        {s.Relay.Retrying, `select count(*) from {{parked}} where next_at is not null`},
			"set aside":       {s.Relay.SetAside, `select count(*) from {{parked}} where next_at is not null and attempts = 0`},
			"behind":          {s.Relay.Behind, `select count(*) from {{parked}} where next_at is null and not held`},
			"dead letters":    {s.DeadLetters.Total, `select count(*) from {{dead_letters}} where state in ('dead', 'held', 'replaying', 'discarding')`},
			"scheduled":       {s.Outbox.Scheduled, `select count(*) from {{scheduled}}`},
			"lanes of nobody": {status.Count{N: int64(len(s.Relay.Unowned))}, `select count(*) from {{relay_leases}} where lane >= 0 and (owner = '' or lease_until < clock_timestamp())`},
		} {
			var n int64
			if err := one.QueryRowContext(t.Context(), where.Expand(c.query)).Scan(&n); err != nil {
				t.Fatal(err)
			}
			if n != c.count.N || c.count.AtLeast || c.count.Estimate {
				t.Errorf("moment %d: %s is %v, counted by hand %d", moment, what, c.count, n)
			}
			moved[what] = moved[what] || n > 0
		}
		exec(`rollback`)
	}
	if what := still(); len(what) > 0 {
		t.Errorf("%q: always 0, the test proves nothing", what)
	}
}

// A reading costs the same however much waits: it reads as many pages of four times as much.
// Relays read every five seconds for their metrics, or after a hundred times as long as the last
// reading took: at most 1% of the time.
func TestRead_CostsLittleAtTwoMillionRows(t *testing.T) {
	t.Parallel()
	rows := testserver.Rounds(200_000, 2_000_000)
	pg := testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		t.Fatal(err)
	}
	where, err := database.Resolve(pg.DB, pg.Config)
	if err != nil {
		t.Fatal(err)
	}
	fill := func(from, to int) {
		t.Helper()
		onOneConnection(t, pg, func(db *sql.DB) { fillTables(t, db, where, from, to) })
		onOneConnection(t, pg, func(db *sql.DB) { // or what was inserted would be added to the result
			for _, table := range []string{"outbox", "dead_letters", "parked"} {
				if _, err := db.ExecContext(t.Context(), where.Expand(`vacuum analyze {{`+table+`}}`)); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
	limit := testserver.Rounds(100, 1000)
	fill(0, rows/4)
	few, _ := readPages(t, pg, limit)
	fill(rows/4, rows)
	many, s := readPages(t, pg, limit)
	t.Logf("a reading takes %d pages of %d rows, and %d of %d", few, rows/4, many, rows)
	if many > few*6/5 {
		t.Errorf("a reading takes %d pages of %d rows, and %d of %d", few, rows/4, many, rows)
	}
	n := s.Outbox.Depth
	if !n.Estimate || n.N < int64(rows)*9/10 || n.N > int64(rows)*11/10 {
		t.Errorf("%d rows wait, shown as %v", rows, n)
	}
	if d := s.DeadLetters.Total; !d.AtLeast || d.N != int64(limit) {
		t.Errorf("%d dead letters, shown as %v", rows/10, d)
	}
	reader, err := status.New(pg.DB, status.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	const reads = 20
	var total, longest time.Duration
	for range reads {
		began := time.Now()
		if _, err := reader.Read(t.Context()); err != nil {
			t.Fatal(err)
		}
		took := time.Since(began)
		total, longest = total+took, max(longest, took)
	}
	mean := total / reads
	t.Logf("%d rows, %d dead letters, %d set aside: a reading takes %v, at most %v; every 5 s that is %.2f%% of the time", rows, rows/10, rows/10, mean, longest, 100*mean.Seconds()/5)
}

// readPages reads the status, and returns how many pages of tables and indexes that took: the
// least of a few readings, since others may vacuum meanwhile.
func readPages(t *testing.T, pg testserver.PG, limit int) (pages int64, s *status.Status) {
	t.Helper()
	counted := func() (n int64) {
		t.Helper()
		const sum = `select sum(coalesce(heap_blks_read, 0) + coalesce(heap_blks_hit, 0) + coalesce(idx_blks_read, 0) + coalesce(idx_blks_hit, 0))::bigint from pg_statio_user_tables where schemaname = $1`
		if err := pg.DB.QueryRowContext(t.Context(), sum, pg.Config.Schema).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for range 3 {
		before := counted()
		// The server adds what a connection has read when it ends.
		onOneConnection(t, pg, func(db *sql.DB) {
			reader, err := status.New(db, status.Config{Database: pg.Config, Limit: limit})
			if err != nil {
				t.Fatal(err)
			}
			if s, err = reader.Read(t.Context()); err != nil || len(s.Silent) > 0 {
				t.Fatalf("%+v, %v", s, err)
			}
		})
		testserver.Eventually(t, "the reading is counted", func() bool { return counted() > before })
		if n := counted() - before; pages == 0 || n < pages {
			pages = n
		}
	}
	return pages, s
}

// onOneConnection calls f with a pool of one connection, and returns when the server has ended it.
func onOneConnection(t *testing.T, pg testserver.PG, f func(db *sql.DB)) {
	t.Helper()
	one := pg.Open(t)
	one.SetMaxOpenConns(1)
	var pid int
	if err := one.QueryRowContext(t.Context(), `select pg_backend_pid()`).Scan(&pid); err != nil {
		t.Fatal(err)
	}
	f(one)
	if err := one.Close(); err != nil {
		t.Fatal(err)
	}
	testserver.Eventually(t, "the connection has ended", func() (ended bool) {
		if err := pg.DB.QueryRowContext(t.Context(), `select not exists (select from pg_stat_activity where pid = $1)`, pid).Scan(&ended); err != nil {
			t.Fatal(err)
		}
		return ended
	})
}

func fillTables(t *testing.T, db *sql.DB, where database.Database, from, to int) {
	t.Helper()
	for _, statement := range []string{
		`insert into {{outbox}} (lane, topic, message_id, key, payload) select i % 32, 'orders', 'm' || i, 'k' || i % 1000, '{}' from generate_series($1::int + 1, $2::int) i`,
		`insert into {{dead_letters}} (state, source, consumer, topic, message_id, payload, reason, error, fingerprint)
			select 'dead', 'consumer', 'c' || i % 5, 'orders', 'd' || i, '{}', 'failed', 'it failed', 'f' || i % 40 from generate_series($1::int / 10 + 1, $2::int / 10) i`,
		`insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
			select i % 32, i, 'nowhere', 'p' || i, '', '{}', '', now(), now() from generate_series($1::int / 10 + 1, $2::int / 10) i`,
	} {
		if _, err := db.ExecContext(t.Context(), where.Expand(statement), from, to); err != nil {
			t.Fatal(err)
		}
	}
}
