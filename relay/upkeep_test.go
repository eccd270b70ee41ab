package relay_test

import (
	"context"
	"crypto/rand"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// limitedRole returns a role that may use the tables, but does not own them.
func (p testDB) limitedRole(t testing.TB) string {
	t.Helper()
	role := "limited_" + strings.ToLower(rand.Text()[:12])
	p.execute(t, `create role `+role)
	t.Cleanup(func() {
		if _, err := p.db.ExecContext(context.WithoutCancel(t.Context()), `drop owned by `+role+`; drop role `+role); err != nil {
			t.Error(err)
		}
	})
	for _, grant := range []string{
		`grant usage on schema {{schema}} to `, `grant all on all tables in schema {{schema}} to `,
		`grant all on all sequences in schema {{schema}} to `, `grant all on all functions in schema {{schema}} to `,
	} {
		p.execute(t, grant+role)
	}
	return role
}

// The worker that has the upkeep may not read a table any more. Another one takes the
// upkeep over, as it does the lanes.
func TestRelay_LeavesTheUpkeepIfItsTablesFailTheirCheck(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	role := p.limitedRole(t)
	w := &wire{}
	cfg := relay.Config{Lease: silenceLease}
	start(t, p.boxOn(t, p.open(t, "role="+role), outbox.NoHistory), &sink{name: "a", wire: w}, cfg)
	until(t, "the upkeep is a's", func() bool { return p.tends(t, "a") }, still)
	start(t, p.boxOn(t, p.open(t), outbox.NoHistory), &sink{name: "b", wire: w}, cfg)
	p.awaitShares(t, map[string]int{"a": outbox.Lanes / 2, "b": outbox.Lanes / 2})
	p.execute(t, `revoke all on {{migrations}} from `+role)
	until(t, "the lanes and the upkeep are b's", func() bool { return p.shares(t)["b"] == outbox.Lanes && p.tends(t, "b") }, still)
	later := message.NewMessage("later", nil)
	outbox.SetDeliverAfter(later, 100*time.Millisecond)
	commit(t, p.boxOn(t, p.db, outbox.NoHistory), later)
	w.await(t, 1)
}

// The reads of the archive have no answer at the worker that has the upkeep. Another
// one does the archiving.
func TestRelay_ArchivesWhereTheDatabaseAnswers(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	p.execute(t, `create table {{outbox_history_20200101}} partition of {{outbox_history}} for values from ('2020-01-01') to ('2020-01-02')`)
	p.execute(t, `insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
		values (0, 1, 'orders', 'old', '', '', '', '2020-01-01 12:00Z', '2020-01-01 12:00Z')`)
	proxy, behind := p.behindProxy(t)
	var given atomic.Int64
	cfg := outbox.Config{Database: p.cfg, Logger: quiet, Archive: func(_ context.Context, rows []outbox.HistoryRow) error {
		given.Add(int64(len(rows)))
		return nil
	}}
	a, err := outbox.New(behind, cfg)
	if err != nil {
		t.Fatal(err)
	}
	b, err := outbox.New(p.open(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	proxy.Silence(func(statement string) bool { return strings.Contains(statement, "over (order by f.id rows between") }, 1000)
	start(t, a, &sink{name: "a", wire: &wire{}}, relay.Config{Lease: silenceLease})
	until(t, "the archive is read", func() bool { return proxy.Silenced() > 0 }, still)
	start(t, b, &sink{name: "b", wire: &wire{}}, relay.Config{Lease: silenceLease})
	until(t, "the row is archived", func() bool { return given.Load() > 0 }, still)
}
