package doctorstore

import (
	"database/sql"
	"os"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements/plantest"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

func TestPlans_NoStatementScansATable(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	for name, c := range map[string]struct {
		db  *sql.DB
		cfg oncemill.Config
	}{
		"PostgreSQL": {pg.DB, pg.Config},
		"SQLite":     {testserver.SQLite(t), oncemill.Config{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := oncemill.Migrate(t.Context(), c.db, c.cfg, outbox.Migrations, relay.Migrations, dlq.Migrations, inbox.Migrations, idempotency.Migrations); err != nil {
				t.Fatal(err)
			}
			where, err := database.Resolve(c.db, c.cfg)
			if err != nil {
				t.Fatal(err)
			}
			fill(t, c.db, where)
			plantest.Check(t, c.db, where, files)
		})
	}
}

// fill writes rows into all tables that statements name.
func fill(t *testing.T, db *sql.DB, where database.Database) {
	t.Helper()
	now, triggers := `cast(unixepoch('subsec') * 1000000 as integer)`, []string(nil)
	if where.Dialect == oncemill.PostgreSQL {
		now, triggers = `clock_timestamp()`, []string{
			`alter table {{inbox}} disable trigger user`, // the seal
			`create table {{outbox_history_all}} partition of {{outbox_history}} for values from ('2000-01-01') to ('9999-01-01')`,
		}
	}
	const rows = `with recursive n (i) as (select 1 union all select i + 1 from n where i < 10000) `
	for _, text := range append(triggers,
		`insert into {{outbox}} (id, lane, topic, message_id, key, payload) `+rows+`select 1 + i % 5000 + (i / 2500) * 65536, i % 32, 'orders', 'm' || i, '', '' from n`,
		`insert into {{scheduled}} (lane, topic, message_id, key, payload, deliver_at) `+rows+`select i % 32, 'orders', 'm' || i, '', '', NOW from n`,
		`insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at) `+rows+`select i, i % 32, 'orders', 'm' || i, '', '', '', NOW, NOW from n`,
		`insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at) `+rows+`select i % 32, i, 'orders', 'm' || i, '', '', '', NOW from n`,
		`insert into {{relay_workers}} (owner, name, seen_until, ready, stopping) values ('o', 'n', NOW, true, false)`,
		`insert into {{dead_letters}} (state, source, topic, message_id, key, payload, reason, error, fingerprint, died_at, closed_at) `+rows+
			`select 'replayed', 'consumer', 't', 'm' || i, '', '', 'refused', '', 'f', NOW, NOW from n`,
		`insert into {{inbox}} (consumer, message_id, received_at) `+rows+`select 'consumer ' || (i % 4), 'm' || i, NOW from n`,
		`insert into {{inbox_failures}} (consumer, message_id, key, seq, changed_at) `+rows+`select 'consumer ' || (i % 4), 'm' || i, '', i, NOW from n`,
		`insert into {{idempotency}} (key_hash, caller, fingerprint, state, owner, fence, endpoint, completed_at, created_at, lease_until, expires_at, forget_at) `+rows+
			`select cast(('k' || i) as KEY), '', '', 2, '', 1, 'POST /', NOW, NOW, NOW, NOW, NOW from n`,
		`analyze {{outbox}}`, `analyze {{scheduled}}`, `analyze {{outbox_history}}`, `analyze {{parked}}`, `analyze {{relay_workers}}`, // alone: others
		`analyze {{dead_letters}}`, `analyze {{inbox}}`, `analyze {{inbox_failures}}`, `analyze {{idempotency}}`, // fill tables of the server
	) {
		key := "blob"
		if where.Dialect == oncemill.PostgreSQL {
			key = "bytea"
		}
		text = where.Expand(strings.NewReplacer("NOW", now, "KEY", key).Replace(text))
		if _, err := db.ExecContext(t.Context(), text); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
}
