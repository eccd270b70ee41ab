package inboxstore_test

import (
	"database/sql"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/internal/statements/plantest"
)

// fill writes the ids of four consumers, some of them of failing messages.
func (f *fixture) fill(t *testing.T) {
	t.Helper()
	at := `clock_timestamp() - i * interval '1 second'`
	if f.where.Dialect == oncemill.SQLite {
		at = `cast(unixepoch('subsec') * 1000000 as integer) - i * 1000000`
	}
	if f.where.Dialect == oncemill.PostgreSQL {
		f.exec(t, `alter table {{inbox}} disable trigger user`) // the seal
	}
	const numbers = `with recursive n (i) as (select 1 union all select i + 1 from n where i < 20000)`
	f.exec(t, strings.ReplaceAll(`insert into {{inbox}} (consumer, message_id, received_at) `+numbers+` select 'consumer ' || (i % 4), 'm' || i, AT from n`, "AT", at))
	f.exec(t, strings.ReplaceAll(`insert into {{inbox_failures}} (consumer, message_id, key, seq, changed_at) `+numbers+` select 'consumer ' || (i % 4), 'f' || i, 'key ' || (i % 500), i, AT from n`, "AT", at))
	f.exec(t, `insert into {{inbox_sequences}} (consumer, key, seq) `+numbers+` select 'consumer ' || (i % 4), 'key ' || i, i from n`)
	f.exec(t, `insert into {{inbox_refused}} (consumer, topic, reason, refused, total) `+numbers+` select 'consumer ' || (i % 4), 'topic ' || i, 'malformed', 1, 1 from n`)
	for _, table := range []string{"inbox", "inbox_failures", "inbox_sequences", "inbox_refused"} {
		f.exec(t, `analyze {{`+table+`}}`)
	}
}

func TestPlans_NoStatementScansATable(t *testing.T) {
	eachDatabase(t, []sql.IsolationLevel{sql.LevelReadCommitted}, func(t *testing.T, f *fixture) {
		f.fill(t)
		plantest.Check(t, f.db, f.where, inboxstore.Files)
	})
}

func TestPlans_FailWithoutAnIndex(t *testing.T) {
	eachDatabase(t, []sql.IsolationLevel{sql.LevelReadCommitted}, func(t *testing.T, f *fixture) {
		f.fill(t)
		for index, statement := range map[string]string{"inbox_received": "purge_ids", "inbox_failures_changed": "purge_failures", "inbox_failures_sequence": "retried"} {
			drop := `drop index {{` + index + `}}`
			if f.where.Dialect == oncemill.SQLite {
				drop = `drop index {{name:` + index + `}}`
			}
			f.exec(t, drop)
			faults := strings.Join(plantest.Faults(t, f.db, f.where, inboxstore.Files), "\n")
			if !strings.Contains(faults, statement+": ") {
				t.Errorf("without %s, %s has no fault: %s", index, statement, faults)
			}
		}
	})
}

// Anybody can send messages that become dead letters, whose ids stay.
func TestPlans_ThePurgeOfIDsReadsNoneOfDeadLetters(t *testing.T) {
	eachDatabase(t, []sql.IsolationLevel{sql.LevelReadCommitted}, func(t *testing.T, f *fixture) {
		index := `select pg_get_indexdef(to_regclass('{{inbox_received}}'))`
		if f.where.Dialect == oncemill.SQLite {
			index = `select sql from sqlite_schema where name = trim('{{name:inbox_received}}', '"')`
		}
		var definition string
		must(t, f.db.QueryRowContext(t.Context(), f.where.Expand(index)).Scan(&definition))
		if !strings.Contains(definition, "dead") {
			t.Errorf("the index has the ids of dead letters: %s", definition)
		}
	})
}
