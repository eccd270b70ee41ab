package relaystore

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements/plantest"
	"github.com/oncemill/oncemill/internal/testserver"
)

// eachFilled runs a test on both databases, with many rows in the tables that grow.
func eachFilled(t *testing.T, test func(t *testing.T, p *fixture)) {
	t.Parallel()
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		pg := testserver.Postgres(t)
		p := newFixture(t, pg.Open(t), pg.Config, time.Hour)
		p.spread(t, `now()`)
		test(t, p)
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		p := newFixture(t, testserver.OpenSQLite(t, migratedSQLite(t)), oncemill.Config{}, time.Hour)
		p.spread(t, sqliteNow)
		test(t, p)
	})
}

// spread loads rows of all lanes. Some of parked are heads, few of the dead letters have
// commands.
func (p *fixture) spread(t *testing.T, now string) {
	t.Helper()
	for _, text := range []string{
		`insert into {{outbox}} (lane, id, topic, message_id, key, payload)
		with recursive n (i) as (select 1 union all select i + 1 from n where i < 20000)
		select i % 32, i * 10, 't', 'm' || i, 'k' || i, '' from n`,
		`insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
		with recursive n (i) as (select 1 union all select i + 1 from n where i < 20000)
		select i % 32, i, 't' || (i % 20), 'm' || i, case when i % 5 = 0 then '' else 'k' || (i % 1000) end, '', '', NOW, case when i % 50 = 0 then NOW end from n`,
		`insert into {{dead_letters}} (state, held, source, lane, row_id, topic, message_id, key, payload, created_at, reason, error, fingerprint)
		with recursive n (i) as (select 1 union all select i + 1 from n where i < 20000)
		select case when i % 500 = 0 then 'replaying' else 'dead' end, false, 'relay', i % 32, i, 't', 'm' || i, 'k', '', NOW, 'refused', '', 'f' from n`,
		`insert into {{relay_workers}} (owner, name, seen_until, ready, stopping)
		with recursive n (i) as (select 1 union all select i + 1 from n where i < 5000) select 'worker ' || i, 'w', NOW, true, false from n`,
		`insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at) values (1, 1, 't', 'm', '', '', '', NOW, NOW)`,
	} {
		p.exec(t, strings.ReplaceAll(text, "NOW", now))
	}
	if !p.sqlite() { // heartbeats leave dead rows
		p.exec(t, `do $$ begin for i in 1..300 loop update {{relay_leases}} set lease_until = lease_until; end loop; end $$`)
	}
	for _, table := range []string{"outbox", "parked", "dead_letters", "relay_leases", "relay_workers"} {
		p.exec(t, `analyze {{`+table+`}}`)
	}
}

func (p *fixture) faults(t *testing.T) []string {
	t.Helper()
	return plantest.Faults(t, p.db, database.Of(p.box.Config().Database), files)
}

func TestPlans_NoStatementScansATable(t *testing.T) {
	eachFilled(t, func(t *testing.T, p *fixture) {
		for _, fault := range p.faults(t) {
			t.Error(fault)
		}
	})
}

func TestPlans_FailWithoutAnIndex(t *testing.T) {
	eachFilled(t, func(t *testing.T, p *fixture) {
		for index, statements := range map[string][]string{
			"dead_letters_open": {"highest_id"},
		} {
			name := `{{` + index + `}}`
			if p.sqlite() {
				name = `{{name:` + index + `}}`
			}
			p.exec(t, `drop index `+name)
			faults := p.faults(t)
			for _, name := range statements {
				if !slices.ContainsFunc(faults, func(f string) bool { return strings.HasPrefix(f, name+": ") }) {
					t.Errorf("without %s, %s has no fault: %q", index, name, faults)
				}
			}
		}
	})
}
