package idempotency

import (
	"context"
	"database/sql"
	"slices"
	"sync"
)

// handlerRows are the open results of a handler's queries. A result that stays open keeps
// the connection from executing another statement.
type handlerRows struct {
	mu   sync.Mutex
	many []*sql.Rows
	one  *sql.Row // the last; those before it have been read, or this could not have been queried
}

// QueryContext is like that of *sql.Tx.
func (t *sqlTx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	rows, err := t.Handle.QueryContext(ctx, query, args...) //nolint:sqlclosecheck // the handler closes it, or closeRows
	if err != nil {
		return nil, err
	}
	t.rows.mu.Lock()
	defer t.rows.mu.Unlock()
	if len(t.rows.many) == cap(t.rows.many) { // before it grows
		t.rows.many = slices.DeleteFunc(t.rows.many, closed)
	}
	t.rows.many = append(t.rows.many, rows)
	return rows, nil
}

// closed reports whether rows are closed; then they have no columns.
func closed(rows *sql.Rows) bool {
	_, err := rows.Columns()
	return err != nil
}

// QueryRowContext is like that of *sql.Tx.
func (t *sqlTx) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	row := t.Handle.QueryRowContext(ctx, query, args...)
	t.rows.mu.Lock()
	defer t.rows.mu.Unlock()
	t.rows.one = row
	return row
}

// closeRows closes what the handler has left open, as database/sql does at a commit. The
// handler has returned, and its context has not ended.
func (t *sqlTx) closeRows(ctx context.Context) {
	t.rows.mu.Lock()
	many, one := slices.DeleteFunc(t.rows.many, closed), t.rows.one
	t.rows.many, t.rows.one = nil, nil
	t.rows.mu.Unlock()
	if len(many) == 0 && one == nil {
		return
	}
	_ = t.step(ctx, func(context.Context) error { // what goes wrong shows in the next statement
		for _, rows := range many {
			_ = rows.Close() // after it has read the rest
		}
		if one != nil {
			_ = one.Scan() // which closes it, if nobody has
		}
		return nil
	})
}
