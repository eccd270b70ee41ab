package outbox_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// private returns an outbox on a server of the test's own, whose ring is as given and
// which keeps no history.
func private(t *testing.T, truncate outbox.Truncation, settings ...string) (*fixture, *testserver.PostgresServer) {
	t.Helper()
	server := testserver.PrivatePostgres(t, settings...)
	p := newFixture(t, &pq.Driver{}, server.DSN(), outbox.Config{Database: oncemill.Config{Dialect: oncemill.PostgreSQL}})
	p.url = func(params ...string) string { return server.DSN() + strings.Join(params, "") }
	p.use(t, p.db, func(cfg *outbox.Config) { cfg.History, cfg.Truncate = outbox.NoHistory, truncate })
	return p, server
}

// A standby that serves a query on the outbox would have to end it, or to stop
// replaying, when it comes to a truncation.
func TestRing_IsLeftToVacuumWhileAStandbyReplays(t *testing.T) {
	t.Parallel()
	p, server := private(t, outbox.TruncateAuto, "max_standby_streaming_delay=-1")
	standby := server.Standby()
	replica := standby.Open()
	eventually(t, "the standby is connected", func() bool {
		return p.count(t, `select count(*) from pg_stat_replication where state = 'streaming'`) == 1
	})
	p.leaveDead(t, 0)
	p.leaveDead(t, 1)
	p.enter(t, 2)
	reader, err := replica.BeginTx(t.Context(), &sql.TxOptions{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Rollback()
	eventually(t, "the reader on the standby has locked the outbox", func() bool {
		_, err := reader.ExecContext(t.Context(), p.expand(t, `lock table {{outbox}} in access share mode`))
		return err == nil
	})
	for range 3 {
		if done := p.maintain(t); done != (outboxstore.Maintained{}) {
			t.Errorf("the upkeep did %+v", done)
		}
	}
	p.exec(t, `vacuum {{outbox_0}}`) // neither does vacuum truncate
	p.exec(t, `vacuum {{outbox_1}}`)
	p.publish(t, newMessage("after it", ""))
	eventually(t, "the standby has replayed what came after", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // the query waits where replay does
		defer cancel()
		var n int
		err := replica.QueryRowContext(ctx, p.expand(t, `select count(*) from {{outbox}}`)).Scan(&n)
		return err == nil && n == 1
	})

	// A role that may not see the state of others sees that there is a standby.
	p.exec(t, `create role nobody`)
	p.exec(t, `grant usage on schema {{schema}} to nobody`)
	p.exec(t, `grant select on {{outbox_id}} to nobody`)
	box, err := outbox.New(p.open(t, "&role=nobody"), p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if done, err := outboxqueue.Of(box).Maintain(t.Context(), always); err != nil || done != (outboxstore.Maintained{}) {
		t.Errorf("as a role without rights: %+v, %v", done, err)
	}

	// It is truncated beside the standby if that is asked for.
	expectNoError(t, reader.Rollback())
	auto := p.cfg
	p.use(t, p.db, func(cfg *outbox.Config) { cfg.Truncate = outbox.TruncateAlways })
	p.expectTruncated(t, 2)
	p.cfg = auto
	p.use(t, p.db, nil)
	p.leaveDead(t, 4)
	p.leaveDead(t, 5)
	p.enter(t, 6)

	// Neither is it while the standby is away but has a slot.
	expectNoError(t, replica.Close())
	standby.Stop()
	eventually(t, "the standby is gone", func() bool { return p.count(t, `select count(*) from pg_stat_replication`) == 0 })
	p.exec(t, `select pg_drop_replication_slot(slot_name) from pg_replication_slots`)
	p.exec(t, `select pg_create_physical_replication_slot('away')`)
	p.expectTruncated(t, 0)
	p.exec(t, `select pg_drop_replication_slot('away')`)
	truncated := 0
	eventually(t, "both are truncated", func() bool { // one that others are reading is left for later
		truncated += p.maintain(t).Truncated
		return truncated == 2
	})
}

func TestRing_IsNeverTruncatedIfThatIsAskedFor(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.use(t, p.db, func(cfg *outbox.Config) { cfg.Truncate = outbox.TruncateNever })
	p.leaveDead(t, 0)
	p.enter(t, 1)
	p.expectTruncated(t, 0)
}

// What reads pass over in less than a millisecond is left to vacuum, unless they
// pass over it again and again.
func TestRing_SmallPartitionsAreTruncatedOnceReadsPayForThem(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.hold(t)
	p.exec(t, `alter table {{outbox_0}} set (autovacuum_enabled = off)`)
	p.exec(t, `insert into {{outbox}} (lane, topic, message_id, payload) select 0, 'orders', i::text, decode(repeat('ab', 200), 'hex') from generate_series(1, 10000) i`)
	p.exec(t, `delete from {{outbox}}`)
	p.enter(t, 1)
	if n := p.size(t, 0); n < 1<<20 || n >= 8<<20 {
		t.Fatalf("%d bytes are dead: the test shows nothing", n)
	}
	p.expectTruncated(t, 0)
	truncated, reads := 0, 0
	eventually(t, "the partition is truncated", func() bool {
		p.read(t)
		reads++
		truncated += p.maintain(t).Truncated
		return truncated == 1
	})
	if reads < 10 {
		t.Errorf("%d reads have paid for 10,000 entries each", reads)
	}
	if n := p.size(t, 0); n != 0 {
		t.Errorf("%d bytes", n)
	}
}
