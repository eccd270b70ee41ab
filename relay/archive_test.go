package relay_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/outbox"
)

// What the history gives up goes to the user's function, again until it takes it,
// while messages are delivered.
func TestRelay_ArchivesWhatTheHistoryGivesUp(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) { // what differs is in the tests of the outbox
		var calls, given atomic.Int64
		log := &logbook{}
		box, err := outbox.New(p.db, outbox.Config{
			Database: p.cfg, Logger: quiet,
			Archive: func(_ context.Context, rows []outbox.HistoryRow) error {
				if calls.Add(1) == 1 {
					return errors.New("the store is away")
				}
				given.Add(int64(len(rows)))
				return nil
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		old := any(time.Now().Add(-100 * 24 * time.Hour).UnixMicro())
		if p.postgres() {
			p.execute(t, `create table {{outbox_history_20200101}} partition of {{outbox_history}} for values from ('2020-01-01') to ('2020-01-02')`)
			old = time.Date(2020, 1, 1, 12, 0, 0, 0, time.UTC)
		}
		p.execute(t, `insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
			values (0, 1, 'orders', 'old', '', $1, $1, $2, $2)`, []byte{}, old)
		w, cfg := &wire{}, p.unhurried()
		cfg.Logger = slog.New(log)
		r := start(t, box, &sink{name: "w", wire: w}, cfg)
		commit(t, box, keyed("k", 0, 5)...)
		w.await(t, 5)
		eventually(t, "the old row is archived", func() bool { return r.counter(t, "oncemill.relay.history_archived") == 1 })
		p.awaitNothingOwed(t)
		if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 5 || given.Load() != 1 {
			t.Errorf("%d rows are left, %d were given", n, given.Load())
		}
		if n := log.count("archiving the history failed; it is kept, trying again"); n != 1 {
			t.Errorf("the failure was logged %d times", n)
		}
	})
}
