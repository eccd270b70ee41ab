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

// Partitions is the number of partitions of the outbox on PostgreSQL.
const Partitions = 4

// Ring describes the partitions of the outbox, which ids go through in turns: 65,536 ids
// go into one partition, then into the next.
type Ring struct {
	Last       int64 // the last id given out
	Partitions []Partition
}

// Partition is a partition of the outbox.
type Partition struct {
	Bytes int64 // without its indexes

	// PassedOver is the number of index entries that scans have read without finding a
	// row, since the server's statistics began.
	PassedOver int64
}

// PartitionOf returns the partition of an id.
func PartitionOf(id int64) int { return int(id >> 16 & (Partitions - 1)) }

// TurnOf returns the number of the turn of an id: ids of one turn are in one partition.
func TurnOf(id int64) int64 { return id >> 16 }

// Maintained is the result of outboxqueue.Queue.Maintain.
type Maintained struct {
	Truncated int   // partitions of the ring emptied of dead rows
	Blocked   int   // partitions of the ring not truncated because of a lock; see Held
	Turned    int   // 1: ids moved to the next partition early, since reads passed over too many dead rows
	Made      int   // partitions of the history created
	Retired   int64 // partitions (PostgreSQL) or rows (SQLite) of the history removed

	// Again is set if another call is worthwhile sooner than usual: a partition is to
	// be truncated that others lock only briefly. It is the time to wait before that
	// call; 0: none is due.
	Again time.Duration
}
