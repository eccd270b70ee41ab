package bounded

import (
	"context"
	"database/sql"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// openLimit is how long opening a connection apart from calls may take.
const openLimit = 15 * time.Second

// opener opens connections for which calls have no time.
//
// To open one may take longer than a call: of several addresses the first may be silent, and a
// server that has just become the primary has many clients to accept. A connection that is given
// up half-way costs the server nearly as much as one that is used, and whoever gave it up begins
// anew. So a busy server whose clients have short limits might stay busy for ever, and none of
// them ever be connected.
//
// Therefore, after a call without an answer, a connection is opened apart from calls, for longer, and
// left idle in the pool. One is enough: calls are short, and those that find it open no other. Calls
// never wait for it, so they are no worse off than without.
type opener struct {
	db *sql.DB

	mu      sync.Mutex
	opening bool // guarded by mu
}

// open begins to open a connection, unless the pool has an idle one: the pool would return that, and
// if it leads to a server that is silent, a call has to find out. ctx only lends its values.
func (o *opener) open(ctx context.Context) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.db.Stats().Idle > 0 || o.opening {
		return
	}
	o.opening = true
	go func() {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), openLimit)
		defer cancel()
		defer func() { // also when the driver ends its goroutine
			o.mu.Lock()
			defer o.mu.Unlock()
			o.opening = false
		}()
		_ = nopanic.Call(func() error { // calls see why it fails
			conn, err := o.db.Conn(limited)
			if err != nil {
				return err
			}
			return conn.Close() // to the pool
		})
	}()
}
