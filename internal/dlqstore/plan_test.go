package dlqstore_test

import (
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/statements/plantest"
)

// fill writes dead letters that differ in all that a list can be narrowed down by.
func (f *fixture) fill(t *testing.T) {
	t.Helper()
	died := `clock_timestamp() - i * interval '1 minute'`
	if f.where.Dialect == oncemill.SQLite {
		died = `cast(unixepoch('subsec') * 1000000 as integer) - i * 60000000`
	}
	f.exec(t, strings.ReplaceAll(`
		insert into {{dead_letters}} (state, source, consumer, topic, message_id, key, payload, reason, error, fingerprint, died_at, closed_at)
		with recursive n (i) as (select 1 union all select i + 1 from n where i < 20000)
		select case when i % 500 = 0 then 'replayed' else 'dead' end, 'consumer', 'consumer ' || (i % 400), 'topic ' || (i % 300), 'm' || i, 'key ' || (i % 1000), '',
			'refused', '', 'f' || (i % 200), DIED, case when i % 500 = 0 then DIED end
		from n`, "DIED", died))
	f.exec(t, `insert into {{dead_letter_notes}} (letter, actor, text) select (id - 1) / 2 + 1, 'ada', 'seen' from {{dead_letters}}`)
	f.exec(t, strings.ReplaceAll(`
		insert into {{dead_letter_jobs}} (state, actor, reason, filter, bound, canary, rate, stop_after, ended_at)
		with recursive n (i) as (select 1 union all select i + 1 from n where i < 2000)
		select case when i < 1990 then 'finished' else 'running' end, 'ada', '', '{}', 1, 0, 1, 0, case when i < 1990 then DIED end
		from n`, "DIED", died))
	f.exec(t, `insert into {{dead_letter_job_letters}} (job, letter, state) select 1 + id % 50, id, case when id % 10 = 0 then 'asked' when id % 10 = 1 then 'pending' else 'replayed' end from {{dead_letters}}`)
	f.exec(t, `
		insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
		select id % 32, id, topic, message_id, key, '', '', died_at, died_at from {{dead_letters}}`)
	f.exec(t, `analyze {{parked}}`)
	f.exec(t, `analyze {{dead_letter_jobs}}`)
	f.exec(t, `analyze {{dead_letter_job_letters}}`)
	f.exec(t, `analyze {{dead_letters}}`)
	f.exec(t, `analyze {{dead_letter_notes}}`)
}

// Without one of the indexes, statements that need it are noticed.
func TestPlans_NoStatementScansTheTable(t *testing.T) {
	eachDatabase(t, []string{"read committed"}, func(t *testing.T, f *fixture) {
		f.fill(t)
		plantest.Check(t, f.db, f.where, dlqstore.Files)
		for index, statements := range map[string][]string{
			"closed": {"purge"}, "died": {"newest_by_time", "oldest_by_time"}, "message": {"newest_by_message", "oldest_by_message", "failed_again", "import"},
			"key": {"newest_by_key", "oldest_by_key"}, "fingerprint": {"newest_by_fingerprint", "oldest_by_fingerprint"},
			"consumer": {"newest_by_consumer", "oldest_by_consumer"}, "topic": {"newest_by_topic", "oldest_by_topic"},
			"state": {"newest_by_state", "oldest_by_state", "count_open", "groups", "stuck"},
		} {
			drop := `drop index {{dead_letters_` + index + `}}`
			if f.where.Dialect == oncemill.SQLite {
				drop = `drop index {{name:dead_letters_` + index + `}}`
			}
			f.exec(t, drop)
			faults := strings.Join(plantest.Faults(t, f.db, f.where, dlqstore.Files), "\n")
			for _, name := range statements {
				if !strings.Contains(faults, name+": ") {
					t.Errorf("without dead_letters_%s, %s has no fault: %s", index, name, faults)
				}
			}
		}
	})
}
