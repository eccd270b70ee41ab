// Package relaystore stores the state of relays in PostgreSQL or SQLite: the leases of
// lanes, the running workers, and the messages that are retrying. Those are in the table
// parked: messages that were refused and wait for their next attempt, with the
// successors of their keys behind them.
//
// All times are by the clock of the database. A method does one thing once: it does not
// retry, wait for longer than its context, or log.
//
// # Where a message is
//
// At any time a message is in exactly one of outbox, parked and dead_letters. The
// exception is a message that holds its key: its row stays in parked, with a dead letter
// that points to it. Every move inserts what its delete returned, in one statement or in
// one transaction of the only writer.
//
// # Fenced writes
//
// A write that must not come from a former owner of a lane names owner and epoch. On
// PostgreSQL it is one statement that takes FOR KEY SHARE on the row of the lease. A
// takeover locks that row FOR UPDATE: it waits for a running write, and a write that
// waited for a takeover finds another owner and changes nothing. The owner's own renewal
// is not delayed. On SQLite it is a transaction that is the only writer from its start,
// and reads the row of the lease first.
//
// Deleting what the broker has confirmed is right whoever holds the lane. It needs no
// fence.
//
// # Heads
//
// The first row of a key in parked is its head. It has the time of the next attempt,
// unless it is held; the rows behind it have none. A row without a key always has its
// own.
//
// On PostgreSQL a statement that puts a row behind a head has locked that head FOR
// UPDATE. A statement that deletes a head looks for its successor later, with a newer
// snapshot, or is fenced and cannot run at the same time. Both wait for locks, so a row
// that was deleted meanwhile is passed over for the next one. A statement that deletes
// another row leaves the search to the one that deletes the head, so the locks of a key
// are taken in the order of its rows. Conditions on columns that others change are
// tested on the locked rows, never on the snapshot.
//
// # What was alone in flight
//
// A lease names the message that its worker had in flight, alone, in the column suspect. A
// statement that records that message as failed clears it, or the next owner would blame
// the message again. WholeLane stands for several messages of the lane. Once a lane has two
// crashes, its worker has something of it in flight only while suspect is set, so a
// takeover counts no crash otherwise.
//
// # What may have arrived
//
// A worker that lets its lease expire may have sent what was created before. So may one that gives
// the lane back and says so. The column unsure_until of the lease says until when that was, and is
// never cleared: a row of parked may not be looked at for days, by many owners.
package relaystore
