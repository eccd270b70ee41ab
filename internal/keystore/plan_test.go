package keystore_test

import (
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/keystore"
	"github.com/oncemill/oncemill/internal/statements/plantest"
)

// fill writes 20,000 records as a service has them: most completed, half with a large
// response, few started, due or refused.
func (s *suite) fill() {
	s.Helper()
	text := `
		insert into {{idempotency}} (
			key_hash, caller, fingerprint, state, owner, fence, endpoint, created_at, completed_at, lease_until, expires_at, forget_at, status, response, large
		)
		with recursive n (i) as (select 1 union all select i + 1 from n where i < 20000)
		select
			KEY, CALLER, '', case when i % 500 = 0 then 1 else 2 end, '', 1, 'POST /', NOW, case when i % 500 = 0 then null else NOW end, NOW,
			NOW + (i % 1000) * SECOND, NOW + (i % 1000 + case when i % 100 = 1 then 60 else 0 end) * SECOND, 201,
			case when i % 2 = 0 then null else KEY end, i % 2 = 0
		from n`
	values := []string{"KEY", "sha256(int8send(i))", "CALLER", "int8send(i % 300)", "NOW", "clock_timestamp()", "SECOND", "interval '1 second'"}
	if s.sqlite {
		values = []string{"KEY", "cast('key ' || i as blob)", "CALLER", "cast(i % 300 as blob)", "NOW", "cast(unixepoch('subsec') * 1000000 as integer)", "SECOND", "1000000"}
	}
	s.changes(strings.NewReplacer(values...).Replace(text))
	s.changes(`insert into {{idempotency_body}} (key_hash, response) select key_hash, key_hash from {{idempotency}} where large`)
	s.changes(`analyze {{idempotency}}`)
	s.changes(`analyze {{idempotency_body}}`)
}

func TestPlans_NoStatementScansATable(t *testing.T) {
	t.Parallel()
	for name, open := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSuite(t, open, false)
			s.fill()
			plantest.Check(t, s.db, s.where, keystore.Files)
		})
	}
}

func TestPlans_FailWithoutAnIndex(t *testing.T) {
	t.Parallel()
	for name, open := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSuite(t, open, false)
			s.fill()
			purge, expire, drop := "purge", "expire", `drop index {{idempotency_INDEX}}`
			if s.sqlite {
				purge, expire, drop = "purgeable", "expired", `drop index {{name:idempotency_INDEX}}`
			}
			for index, statement := range map[string]string{"outstanding": "count_started", "forget": purge, "expire": expire} {
				s.changes(strings.Replace(drop, "INDEX", index, 1))
				if faults := strings.Join(plantest.Faults(t, s.db, s.where, keystore.Files), "\n"); !strings.Contains(faults, statement+": ") {
					t.Errorf("without idempotency_%s, %s has no fault: %s", index, statement, faults)
				}
			}
		})
	}
}
