package outboxstore

import "time"

// Holder is a session, prepared transaction or slot that keeps dead rows from being
// removed.
type Holder struct {
	Kind        string        // "session", "prepared transaction" or "replication slot"
	PID         int           // of the server's process; 0 if there is none
	Application string        // application_name of a session, or the name of the transaction or the slot
	State       string        // of a session, as in pg_stat_activity, for example "idle in transaction"
	Age         time.Duration // of its transaction; 0 if the server does not report it
}

// Held describes what keeps dead rows in the outbox.
type Held struct {
	// Blocked lists the holders of locks that a truncation of the ring would have to
	// wait for, longest first: a dump, or an open transaction. Meanwhile the ring is
	// not truncated, and reads pass over its dead rows.
	Blocked []Holder

	// Oldest is the holder of the oldest snapshot on the server. Vacuum removes nothing
	// younger than that. The ring tolerates this; the history, the scheduled messages
	// and your own tables do not. Nil if there is none.
	Oldest *Holder
}
