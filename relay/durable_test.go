package relay_test

import (
	"context"
	"database/sql"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
)

// forgetful is a server that keeps in memory what it has committed, as long as
// nobody asks for more: what a crash takes away is all since the last durable
// commit.
func forgetful(t *testing.T) (*testserver.PostgresServer, testDB) {
	t.Helper()
	server := testserver.PrivatePostgres(t, "synchronous_commit=off", "wal_writer_delay=10s", "wal_writer_flush_after=1GB",
		"wal_buffers=64MB", "bgwriter_lru_maxpages=0", "autovacuum=off")
	p := onServer(t, server)
	p.execute(t, `create table facts (message_id text primary key)`)
	return server, p
}

// commitFact commits a message with a row that tells that it was.
func (p testDB) commitFact(ctx context.Context, t testing.TB, id string) error {
	box := p.box(t)
	return box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `insert into facts values ($1)`, id); err != nil {
			return err
		}
		return box.Publisher(tx).Publish("orders", message.NewMessage(id, []byte("payload")))
	})
}

// ghosts counts messages that have arrived and were never committed, as the
// server remembers it.
func (p testDB) ghosts(t testing.TB, w *wire) (n int) {
	t.Helper()
	known := map[string]bool{}
	for _, id := range p.texts(t, `select message_id from facts`) {
		known[id] = true
	}
	seen := map[string]bool{}
	for _, a := range w.all() {
		if !known[a.message] && !seen[a.message] {
			n++
		}
		seen[a.message] = true
	}
	return n
}

func (p testDB) texts(t testing.TB, query string, args ...any) (all []string) {
	t.Helper()
	rows, err := p.db.QueryContext(t.Context(), database.Of(p.cfg).Expand(query), args...)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var text string
		if err := rows.Scan(&text); err != nil {
			t.Fatal(err)
		}
		all = append(all, text)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// A server that commits without waiting for its disk is killed again and again under
// a relay at work.
func TestRelay_PublishesNothingThatACrashTakesBackIfItRequiresDurable(t *testing.T) {
	t.Parallel()
	server, p := forgetful(t)
	crashes := testserver.Rounds(1, 2)
	for _, durable := range []bool{false, true} {
		w := &wire{}
		r := start(t, p.box(t), &sink{name: fmt.Sprint("durable ", durable), wire: w}, relay.Config{Lease: 2 * time.Second, RequireDurable: durable})
		before := 0
		for round := range crashes {
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				for i := 0; ctx.Err() == nil; i++ {
					// An error is the crash: whether it committed is for the server to say.
					_ = p.commitFact(ctx, t, fmt.Sprintf("%v/%d/%d", durable, round, i))
				}
			}()
			w.await(t, w.distinct()+30)
			// Without its writer the log stays in memory until somebody asks for more.
			writer := p.count(t, `select pid from pg_stat_activity where backend_type = 'walwriter'`)
			if err := syscall.Kill(writer, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			w.await(t, w.distinct()+30)
			server.Kill()
			cancel()
			<-ended
			server.Start()
			p.awaitNothingOwed(t)
			now := p.ghosts(t, w)
			t.Logf("RequireDurable %v: %d messages arrived, %d more of them unknown to the server after crash %d", durable, w.distinct(), now-before, round+1)
			before = now
		}
		switch {
		case durable && before > 0:
			t.Errorf("%d messages are out whose transactions the server has forgotten", before)
		case !durable && before == 0:
			t.Error("no message was out before its transaction was durable: the test shows nothing")
		}
		if n := p.count(t, `select count(*) from facts where message_id like $1`, fmt.Sprint(durable, "/%")); n > w.distinct() {
			t.Errorf("%d messages committed, %d arrived", n, w.distinct())
		}
		r.stop()
	}
}

// What it costs is logged, not asserted: one durable commit for each read.
func TestRelay_DeliversAllWithRequireDurable(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	messages, single := testserver.Rounds(2_000, 10_000), testserver.Rounds(20, 100)
	for _, durable := range []bool{false, true} {
		w, all, box := &wire{}, unkeyed(messages), p.box(t)
		commit(t, box, all...)
		r := start(t, box, &sink{name: "w", wire: w}, relay.Config{RequireDurable: durable})
		begin := time.Now()
		p.awaitNothingOwed(t)
		drained := time.Since(begin)
		begin = time.Now()
		for range single {
			one := unkeyed(1)
			all = append(all, one...)
			commit(t, box, one...)
			eventually(t, "it arrives", func() bool { return w.count() == len(all) })
		}
		t.Logf("RequireDurable %v: %d messages drained in %v; one committed and awaited alone takes %v",
			durable, messages, drained.Round(time.Millisecond), (time.Since(begin) / time.Duration(single)).Round(10*time.Microsecond))
		w.check(t, all, 0)
		r.stop()
	}
}
