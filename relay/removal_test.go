package relay_test

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/relay"
)

// logbook counts what is logged, and keeps the latest of each kind.
type logbook struct {
	mu   sync.Mutex
	n    map[string]int
	last map[string]slog.Record
	told []string // from level info on
}

func (l *logbook) Enabled(context.Context, slog.Level) bool { return true }
func (l *logbook) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logbook) WithGroup(string) slog.Handler            { return l }

func (l *logbook) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n == nil {
		l.n, l.last = map[string]int{}, map[string]slog.Record{}
	}
	l.n[r.Message]++
	if r.Level >= slog.LevelInfo {
		l.told = append(l.told, r.Message)
	}
	l.last[r.Message] = r.Clone()
	return nil
}

// lines returns the messages of the records from level info on.
func (l *logbook) lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.told)
}

func (l *logbook) count(message string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n[message]
}

// attr returns an attribute of the latest record with this message.
func (l *logbook) attr(message, key string) (text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last[message].Attrs(func(a slog.Attr) bool {
		if a.Key == key {
			text = a.Value.String()
		}
		return a.Key != key
	})
	return text
}

// What is confirmed and cannot be deleted is deleted later, and not published
// again in the meantime.
func TestRelay_PublishesNothingAgainWhileDeletionsFail(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		fail, mend := `create trigger refuse before delete on {{outbox}}
			begin select raise(abort, 'not now'); end`, `drop trigger refuse`
		if p.postgres() {
			p.execute(t, `create function refuse() returns trigger language plpgsql as $$ begin raise 'not now'; end $$`)
			fail = `create trigger refuse before delete on {{outbox}} for each row execute function refuse()`
			mend = `drop trigger refuse on {{outbox}}`
		}
		p.execute(t, fail)
		box, w, log := p.box(t), &wire{}, &logbook{}
		cfg := relay.Config{Lease: unhurried.Lease, Logger: slog.New(log)}
		start(t, box, &sink{name: "w", wire: w}, cfg)
		first, second := spread(20, 1), keyed("second", 0, 10)
		commit(t, box, first...)
		w.await(t, 1)
		commit(t, box, second...) // worth a read, which would find every row again
		eventually(t, "deletions fail", func() bool { return log.count("deleting confirmed messages failed; trying again") >= 5 })
		if n := p.owed(t); n != len(first)+len(second) {
			t.Errorf("%d rows owed although no deletion can have passed", n)
		}
		p.execute(t, mend)
		p.awaitNothingOwed(t)
		w.check(t, append(first, second...), 0)
	})
}

// Somebody's lock keeps rows from being deleted while the relay reads on, and deletes
// others.
func TestRelay_PublishesNothingAgainWhileRowsAreLocked(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	box, w := p.box(t), &wire{}
	first := spread(20, 1)
	commit(t, box, first...)
	locker, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer locker.Rollback()
	if _, err := locker.ExecContext(t.Context(), database.Of(p.cfg).Expand(`select from {{outbox}} for update`)); err != nil {
		t.Fatal(err)
	}
	start(t, box, &sink{name: "w", wire: w}, unhurried)
	w.await(t, len(first))
	all := first
	for i := range 20 { // each one is another read
		more := keyed("more", i, 1)
		commit(t, box, more...)
		all = append(all, more...)
		if i == 0 {
			w.await(t, len(all))
		}
	}
	// The second of a key does not wait for the first one's deletion.
	w.await(t, len(all))
	eventually(t, "the others are deleted", func() bool { return p.owed(t) == len(first) })
	if err := locker.Rollback(); err != nil {
		t.Fatal(err)
	}
	p.awaitNothingOwed(t)
	w.check(t, all, 0)
}
