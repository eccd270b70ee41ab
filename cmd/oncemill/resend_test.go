package main

import (
	"database/sql"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestResendCommand_SendsAWindowOfTheHistoryInBatches(t *testing.T) {
	t.Parallel()
	lite := filepath.Join(t.TempDir(), "shop.db")
	pg := testserver.Postgres(t)
	for name, c := range map[string]struct {
		db   *sql.DB
		cfg  oncemill.Config
		env  []string
		fill string
	}{
		"sqlite": {
			testserver.OpenSQLite(t, lite), oncemill.Config{Dialect: oncemill.SQLite}, []string{"ONCEMILL_DATABASE=sqlite:" + lite}, `
with recursive s (i) as (select 1 union all select i + 1 from s where i < 2600)
insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
select i, 0, case when i % 10 = 0 then 'bills' else 'orders' end, 'm' || i, 'k', '', '', 0,
	cast(unixepoch('subsec') * 1000000 as integer) - 3600 * 1000000 + max(i, 1500) * 1000
from s`,
		},
		"postgresql": {
			pg.DB, pg.Config, []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema}, `
create table every_day partition of {{outbox_history}} for values from ('2000-01-01') to ('2500-01-01');
insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
select i, 0, case when i % 10 = 0 then 'bills' else 'orders' end, 'm' || i, 'k', '', '', now(),
	date_trunc('hour', now()) + greatest(i, 1500) * interval '1 ms' - interval '1 s'
from generate_series(1, 2600) i`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := func(code int, args ...string) string {
				t.Helper()
				cmd, output := command(t.Context(), c.env, args...)
				_ = cmd.Run() // the exit code tells
				if got := cmd.ProcessState.ExitCode(); got != code {
					t.Fatalf("%v: exit code %d, want %d; output: %s", args, got, code, output)
				}
				return output.String()
			}
			run(0, "migrate")
			cfg, err := database.Resolve(c.db, c.cfg)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.db.ExecContext(t.Context(), cfg.Expand(c.fill)); err != nil {
				t.Fatal(err)
			}
			count := func(query string) (n int) {
				t.Helper()
				if err := c.db.QueryRowContext(t.Context(), cfg.Expand(query)).Scan(&n); err != nil {
					t.Fatal(err)
				}
				return n
			}
			const owed = `select count(*) from {{outbox}}`

			run(2, "resend")
			run(2, "resend", "--from", "yesterday")
			run(2, "resend", "--from", "1h", "--to", "2h")
			if out := run(0, "resend", "--from", "24h", "--dry-run"); !strings.Contains(out, "2600 messages would be sent again") || count(owed) != 0 {
				t.Errorf("a dry run sent %d: %s", count(owed), out)
			}
			if out := run(0, "resend", "--from", "24h", "--topic", "bills"); !strings.HasSuffix(out, "260 messages were sent again\n") || count(owed) != 260 {
				t.Errorf("%d are owed: %s", count(owed), out)
			}
			future := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
			if out := run(2, "resend", "--from", "24h", "--to", future); !strings.Contains(out, "in the future") || count(owed) != 260 {
				t.Errorf("%d are owed: %s", count(owed), out)
			}
			out := run(0, "resend", "--from", "24h")
			if batches := strings.Count(out, " of 2600 messages sent again\n"); batches < 2 || !strings.HasSuffix(out, "\n2600 messages were sent again\n") {
				t.Errorf("%d batches: %s", batches, out)
			}
			// The first window has 260 messages. All rows of this one have one key.
			disorder := count(`
select count(*)
from (
	select cast(substr(message_id, 2) as integer) as i, lag(cast(substr(message_id, 2) as integer), 1, 0) over (order by id) as before
	from (select id, message_id from {{outbox}} order by id desc limit 2600) last
) o
where i <= before`)
			if n := count(owed); n != 2860 || disorder != 0 {
				t.Errorf("%d are owed, %d out of order", n, disorder)
			}
		})
	}
}
