package outbox

import (
	"context"
	"time"
)

// Holder is somebody who keeps dead rows from being removed.
type Holder struct {
	Kind        string        // "session", "prepared transaction" or "replication slot"
	PID         int           // of the server's process; 0 if there is none
	Application string        // what a session calls itself, or the name of the transaction or the slot
	State       string        // of a session, as in pg_stat_activity: "idle in transaction", say
	Age         time.Duration // of its transaction; 0 if the server does not tell
}

// Held says what keeps the outbox from being cleaned.
type Held struct {
	// Blocked are those whose locks a truncation of the ring would have to wait
	// for, longest first: a dump, or a transaction that is open. The ring is not
	// truncated meanwhile, and reads pass over what is dead in it.
	Blocked []Holder

	// Oldest is the one whose snapshot is the oldest of the server. Vacuum removes
	// nothing that is younger; the ring stands that, the history, the scheduled
	// messages and your own tables do not. Nil if there is none.
	Oldest *Holder
}

// Held looks for what keeps dead rows in the tables. It is some statements on
// system views: ask every few seconds at most. A role without pg_read_all_stats
// sees no age of other roles' transactions. On SQLite it is empty.
func (q *Queue) Held(ctx context.Context) (Held, error) { return q.box.store.held(ctx) }
