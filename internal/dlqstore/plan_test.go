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
	f.exec(t, `analyze {{dead_letters}}`)
}

func TestPlans_NoStatementScansTheTable(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.fill(t)
		plantest.Check(t, f.db, f.where, dlqstore.Files)
	})
}

func TestPlans_FailWithoutAnIndex(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.fill(t)
		for _, index := range []string{"topic", "closed"} {
			if f.where.Dialect == oncemill.SQLite {
				f.exec(t, `drop index {{name:dead_letters_`+index+`}}`)
			} else {
				f.exec(t, `drop index {{dead_letters_`+index+`}}`)
			}
		}
		faults := strings.Join(plantest.Faults(t, f.db, f.where, dlqstore.Files), "\n")
		if !strings.Contains(faults, "purge: ") {
			t.Errorf("without its index a purge is faultless: %q", faults)
		}
	})
}
