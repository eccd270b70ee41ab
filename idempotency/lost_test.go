package idempotency_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
)

// SQLite may end a transaction by itself, and then commits the rest statement by statement.
// A handler that has prepared its statements and overlooks the first error leaves nothing
// behind.
func TestTxMiddleware_NothingCommitsAloneAfterSQLiteHasEndedTheTransaction(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*idempotency.Config){
		"alone": nil, "in a group": func(c *idempotency.Config) { c.Transactions.GroupSize = 50 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := onSQLite(t)
			p.exec(t, `create table names (name text primary key)`)
			p.exec(t, `insert into names values ('taken')`)
			lose := true
			handler := p.engine(t, change).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if err := prepared(r.Context(), `insert or rollback into names values ('taken')`); lose && err == nil {
					t.Error("the transaction was not lost")
				}
				err := prepared(r.Context(), `insert into effects (name) values ('a')`)
				if err == nil && lose {
					t.Error("the next statement succeeded")
				}
				w.WriteHeader(http.StatusCreated) // overlooked
			}))
			if w := do(t, handler, post("/", "x")); w.Code != http.StatusInternalServerError {
				t.Errorf("got %d %s", w.Code, w.Body)
			}
			if n := p.count(t, `select count(*) from effects`); n != 0 {
				t.Errorf("%d effects of a transaction that was rolled back", n)
			}
			lose = false
			p.exec(t, `delete from names`)
			if w := do(t, handler, post("/", "x")); w.Code != http.StatusCreated || p.count(t, `select count(*) from effects`) != 1 {
				t.Errorf("then %d %s", w.Code, w.Body)
			}
		})
	}
}

// prepared executes a statement that it prepares in the transaction of ctx.
func prepared(ctx context.Context, text string) error {
	tx, _ := idempotency.TxFromContext(ctx)
	stmt, err := tx.PrepareContext(ctx, text)
	if err != nil {
		return err
	}
	defer stmt.Close() //nolint:errcheck // the transaction closes it
	_, err = stmt.ExecContext(ctx)
	return err
}
