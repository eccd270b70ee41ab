package idempotency_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
)

// A tenant that one request sets for its statements never applies to another request, also
// in groups.
func TestGroup_SettingsReachNobodyElse(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	p.exec(t, `create table tenants (key text, tenant text)`)
	for i, text := range []string{
		`set local app.tenant = 'T'`, `/* */ SET LOCAL app.tenant to 'T'`, `select set_config('app.tenant', 'T', true)`,
		`select 1; set local app.tenant = 'T'`, `-- name: SetTenant
			set local app.tenant = 'T'`,
	} {
		keys := keysUpTo(12)
		engine := p.engine(t, grouped)
		answers := sendTogether(t, engine, keys, func(w http.ResponseWriter, r *http.Request) {
			key := r.Header.Get("Idempotency-Key")
			tx, _ := idempotency.TxFromContext(r.Context())
			var err error
			if key == keys[3] || key == keys[7] {
				_, _ = tx.ExecContext(r.Context(), strings.ReplaceAll(text, "'T'", "'"+key+"'")) // it does not mind
			}
			_, err = tx.ExecContext(r.Context(), `insert into tenants values ($1, coalesce(current_setting('app.tenant', true), ''))`, key)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError) // its group may have been given up
			}
		})
		for _, key := range keys {
			if w := answers[key]; w.Code != http.StatusOK {
				t.Errorf("%d, %s: %d %s", i, key, w.Code, w.Body)
			}
		}
		if n := p.count(t, `select count(*) from tenants where tenant <> '' and (tenant <> key or key not in ($1, $2))`, keys[3], keys[7]); n != 0 {
			t.Errorf("%s: reaches %d others", text, n)
		}
		if n := p.count(t, `select count(*) from tenants where tenant = key`); n != 2 {
			t.Errorf("%s: %d have theirs", text, n)
		}
		p.exec(t, `delete from tenants`)
		p.exec(t, `delete from {{idempotency}}`)
	}
}

// A statement that ends a transaction, hidden in what only looks like a string, is refused.
func TestTxMiddleware_NoTextLeavesAnEffectBehind(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	for i, text := range []string{
		`select '\; /*'; rollback; insert into effects values ('survivor'); --*/`,
		`select '\;--'; rollback; insert into effects values ('survivor')`,
	} {
		handler := p.engine(t, nil).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			tx, _ := idempotency.TxFromContext(r.Context())
			_, _ = tx.ExecContext(r.Context(), text)
			w.WriteHeader(http.StatusCreated)
		}))
		w := do(t, handler, post("/", "x", withKey(string(rune('a'+i)))))
		if n := p.count(t, `select count(*) from effects`); n != 0 || w.Code != http.StatusInternalServerError {
			t.Errorf("%s: %d, %d effects", text, w.Code, n)
		}
	}
}
