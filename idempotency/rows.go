package idempotency

import (
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

func (h *handlerRows) opened(rows *sql.Rows) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.many) == cap(h.many) { // before it grows
		h.many = slices.DeleteFunc(h.many, closed)
	}
	h.many = append(h.many, rows)
}

func (h *handlerRows) openedOne(row *sql.Row) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.one = row
}

// closed reports whether rows are closed; then they have no columns.
func closed(rows *sql.Rows) bool {
	_, err := rows.Columns()
	return err != nil
}

// takeOpen returns a function that closes what is open, or nil if nothing is. The
// next statement returns what goes wrong.
func (h *handlerRows) takeOpen() func() {
	h.mu.Lock()
	defer h.mu.Unlock()
	many, one := slices.DeleteFunc(h.many, closed), h.one
	h.many, h.one = nil, nil
	if len(many) == 0 && one == nil {
		return nil
	}
	return func() {
		for _, rows := range many {
			_ = rows.Close() // after it has read the rest
		}
		if one != nil {
			_ = one.Scan() // which closes it, if it is open
		}
	}
}
