package idempotency_test

import (
	"sync/atomic"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A late owner that commits a large answer while an erasure deletes its key leaves nothing of
// it: no key would ever lead to it again.
func TestAdmin_ErasesALargeAnswerThatIsJustCommitted(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	admin := p.admin(t, idempotency.AdminConfig{})
	var runs atomic.Int64
	do(t, p.engine(t, nil).Middleware(badGateway(&runs)), post("/", "x"))
	key := onlyKey(t, admin, idempotency.Filter{})
	// The erasure has begun its statement when the owner commits.
	p.exec(t, `create table gate (i int)`)
	p.exec(t, `create function await_gate() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock('gate'::regclass::oid::bigint); return null; end $$`)
	p.exec(t, `create trigger await_gate before delete on {{idempotency}} for each statement execute function await_gate()`)
	owner, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Rollback() //nolint:errcheck // a no-op after the commit
	for _, text := range []string{
		`select pg_advisory_xact_lock('gate'::regclass::oid::bigint)`,
		`update {{idempotency}} set state = 2, status = 200, large = true, completed_at = now(), expires_at = now() + interval '1 day', forget_at = now() + interval '1 day'`,
		`insert into {{idempotency_body}} (key_hash, response) select key_hash, 'personal data' from {{idempotency}}`,
	} {
		if _, err := owner.ExecContext(t.Context(), p.expand(t, text)); err != nil {
			t.Fatal(err)
		}
	}
	erased := make(chan idempotency.Erased, 1)
	go func() {
		done, err := admin.Erase(t.Context(), key.Caller, byAda)
		if err != nil {
			t.Error(err)
		}
		erased <- done
	}()
	testserver.Eventually(t, "the erasure waits", func() bool {
		return p.count(t, `select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = 'gate'::regclass::oid`) == 1
	})
	if err := owner.Commit(); err != nil {
		t.Fatal(err)
	}
	done := <-erased
	if n, bodies := p.count(t, `select count(*) from {{idempotency}}`), p.count(t, `select count(*) from {{idempotency_body}}`); n != bodies || n+done.Keys != 1 || n != done.Left {
		t.Errorf("%d keys and %d bodies are left of %+v", n, bodies, done)
	}
}
