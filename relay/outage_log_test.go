package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
)

// A server that is away under load is a dozen lines, and its return some more. Every call of
// the database fails meanwhile, many times.
func TestRelay_LogsAnOutageOfItsDatabaseInADozenLines(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	p := onServer(t, server)
	box, w, log := p.box(t), &wire{}, &logbook{}
	commit(t, box, spread(10, 10)...)
	start(t, box, &sink{name: "w", wire: w, handle: slow(2 * time.Millisecond)}, relay.Config{Lease: time.Second, Logger: slog.New(log)})
	p.awaitNothingOwed(t)
	before := len(log.lines())
	commit(t, box, spread(10, 10)...)
	server.Stop()
	testserver.Pause(t.Context(), 12*time.Second)
	away := log.lines()[before:]
	server.Start()
	eventually(t, "leases are renewed", func() bool { return log.count("leases are renewed again") > 0 })
	p.awaitNothingOwed(t)
	all := log.lines()[before:]
	if n := log.count("leases could not be renewed; publishing stops when they expire"); n < 5 {
		t.Errorf("%d heartbeats failed: the test proves nothing", n)
	}
	again := map[string]bool{} // what a connection answered that was closed later than another one
	for _, line := range away {
		if strings.HasSuffix(line, " again") && !strings.HasSuffix(line, "trying again") {
			again[line] = true
		}
	}
	pairs := 2 * min(len(again), 2) // each failed before that
	if len(away) > 12+pairs || len(all) > 24+pairs {
		t.Errorf("%d lines, %d with the return:\n%s", len(away), len(all), strings.Join(all, "\n"))
	}
	if !slices.Contains(away, "leases could not be renewed; publishing stops when they expire") {
		t.Errorf("no word of it:\n%s", strings.Join(away, "\n"))
	}
}

// An upkeep that has failed and then has no answer does not work again.
func TestRelay_CallsNoUpkeepWellThatHasNoAnswer(t *testing.T) {
	t.Parallel()
	p, log := onPostgres(t), &logbook{}
	proxy, behind := p.behindProxy(t)
	const (
		failed = "upkeep of the outbox failed; trying again"
		silent = "lease of the upkeep given up: no answer from the database"
		well   = "upkeep of the outbox works again"
	)
	start(t, p.boxOn(t, behind, 0), &sink{name: "w", wire: &wire{}}, relay.Config{Lease: time.Second, Logger: slog.New(log)})
	const days = `from pg_inherits where inhparent = '{{outbox_history}}'::regclass`
	eventually(t, "the history has partitions", func() bool { return p.count(t, `select count(*) `+days) > 0 })
	var day string
	if err := p.db.QueryRowContext(t.Context(), database.Of(p.cfg).Expand(`select max(inhrelid::regclass::text) `+days)).Scan(&day); err != nil {
		t.Fatal(err)
	}
	told := func(line string) int {
		return len(slices.DeleteFunc(log.lines(), func(l string) bool { return l != line }))
	}
	begun := told(failed)
	p.execute(t, `alter table {{outbox_history}} detach partition `+day) // it cannot be made again while its name is taken
	eventually(t, "the upkeep fails", func() bool { return told(failed) > begun })
	gone, again := told(silent), told(well)
	proxy.Silence(silencing{parts: []string{"'{{outbox_history}}'::regclass"}}.matcher(p), math.MaxInt)
	eventually(t, "the upkeep has no answer", func() bool { return proxy.Silenced() > 0 && told(silent) > gone })
	before := log.count(failed)
	proxy.Resume()
	eventually(t, "the upkeep fails again", func() bool { return log.count(failed) > before })
	if n := told(well) - again; n > 0 {
		t.Errorf("%q %d times", well, n)
	}
	p.execute(t, `drop table `+day)
	eventually(t, "the upkeep works", func() bool { return told(well) > again })
}

// A broker that is away for ten minutes of simulated time (four in short), while messages are written all the time,
// is fewer than 40 lines: the outage, a summary each minute, and the end. The database's clock is a
// real one, which does no harm to leases that are renewed.
func TestRelay_LogsTenMinutesWithoutItsBrokerInFewLines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, log, w := onSQLite(t), &logbook{}, &wire{}
		box := p.box(t)
		var back atomic.Bool
		running := start(t, box, &sink{name: "w", wire: w, handle: func(context.Context, *relay.Message) error {
			if !back.Load() {
				return relay.Unavailable(errors.New("connection refused"))
			}
			return nil
		}}, relay.Config{Logger: slog.New(log)})
		minutes, topics := testserver.Rounds(4, 10), 3
		rounds := 6 * minutes
		for i := range rounds {
			for n := range topics {
				publish(t, box, fmt.Sprint("topic ", n), message.NewMessage(fmt.Sprint(i, "/", n), nil))
			}
			time.Sleep(10 * time.Second) // simulated
		}
		away := log.lines()
		back.Store(true)
		for w.count() < rounds*topics {
			time.Sleep(time.Second)
		}
		running.stop()
		all := log.lines()
		if n := log.count("messages relayed"); n < minutes-1 {
			t.Errorf("%d summaries in %d minutes", n, minutes)
		}
		if len(all) > 10+3*minutes || len(all) == len(away) {
			t.Errorf("%d lines, %d while it was away:\n%s", len(all), len(away), strings.Join(all, "\n"))
		}
	})
}

// A broker that takes nothing of a thousand topics is a dozen lines.
func TestRelay_LogsUnavailableTopicsInADozenLines(t *testing.T) {
	t.Parallel()
	p, log := onSQLite(t), &logbook{}
	box := p.box(t)
	var fixed atomic.Bool
	start(t, box, &sink{name: "w", wire: &wire{}, handle: func(context.Context, *relay.Message) error {
		if fixed.Load() {
			return nil
		}
		return relay.Unavailable(errors.New("not yet"))
	}}, relay.Config{Logger: slog.New(log)})
	for i := range 10 {
		err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			for j := range 100 {
				if err := box.Publish(ctx, tx, fmt.Sprint("reply.", i, ".", j), message.NewMessage(fmt.Sprint(i, "/", j), nil)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	const unavailable, more = "topic unavailable; its messages wait", "more topics unavailable; their messages wait"
	eventually(t, "many topics fail", func() bool { return log.count(unavailable)+log.count(more) > 100 })
	fixed.Store(true)
	p.awaitNothingOwed(t)
	lines := log.lines()
	count := func(text string) (n int) {
		for _, line := range lines {
			if line == text {
				n++
			}
		}
		return n
	}
	if count(unavailable) == 0 || count(unavailable) > 16 || count(more) == 0 || len(lines) > 40 {
		t.Errorf("%d lines:\n%s", len(lines), strings.Join(lines, "\n"))
	}
}

// Topics that fail once each, one after the other, are no more lines than topics that fail
// together.
func TestRelay_LogsTopicsThatFailByTurnsInADozenLines(t *testing.T) {
	t.Parallel()
	p, log := onSQLite(t), &logbook{}
	box := p.box(t)
	failed := map[string]bool{}
	var mu sync.Mutex
	start(t, box, &sink{name: "w", wire: &wire{}, handle: func(_ context.Context, m *relay.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if failed[m.Topic] {
			return nil
		}
		failed[m.Topic] = true
		return relay.Unavailable(errors.New("not yet"))
	}}, relay.Config{Logger: slog.New(log)})
	const topics = 60
	for i := range topics {
		publish(t, box, fmt.Sprint("reply.", i), message.NewMessage(fmt.Sprint(i), nil))
		p.awaitNothingOwed(t)
	}
	const unavailable, more, again = "topic unavailable; its messages wait", "more topics unavailable; their messages wait", "topic available again"
	if n := log.count(unavailable) + log.count(more); n < topics {
		t.Errorf("%d failures: the test proves nothing", n)
	}
	if lines := log.lines(); len(lines) > 40 {
		t.Errorf("%d lines:\n%s", len(lines), strings.Join(lines, "\n"))
	}
}
