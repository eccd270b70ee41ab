// Package relay delivers what the outbox holds: every committed message reaches
// the broker, confirmed, in order per key, and leaves the outbox only then.
//
//	worker, err := relay.New(box, sink, relay.Config{})
//	if err != nil {
//		return err
//	}
//	return worker.Run(ctx) // until ctx ends
//
// The sink is relay/rabbitmq, or any Watermill publisher by [FromPublisher], or
// several of them behind a [Router].
//
// # What it guarantees
//
// At least once: a message is repeated only after a crash, a lost confirm, a lost
// lease or a restore of the database, and then at most what was in flight. A
// clean stop repeats nothing. A confirm counts however late it comes: a message
// that has waited for Config.PublishTimeout is tried again, but neither relay/rabbitmq
// nor [FromPublisher] sends a second copy while the first is in flight. Consumers
// remove repeats with package inbox.
//
// In order per key: of the messages of one key at most one is unconfirmed in
// flight, and the first copies arrive in the order in which the producers, who
// serialise on the key, committed. Messages without a key have no order, and
// keys none among each other.
//
// Any number of workers in any number of processes share 32 lanes by leases in
// the database. A worker that dies holds its lanes for Config.Lease, no longer;
// one that is cut off from the database stops publishing before its leases end;
// one that was frozen may repeat what it had in hand, and no more. All times are
// the database's; nothing depends on a session, so a pooler in transaction mode
// is fine.
//
// Every call of the database ends for the worker in bounded time, even if the
// driver never returns. A worker without an answer for half of Config.Lease is
// unfit: it gives its lanes to others until the database answers again.
// [Relay.Ready] reports that. A lock that another program holds on an outbox row
// delays the deletion of that row, and nothing else.
//
// # Where a message is
//
//	outbox   owed; a worker that reads it knows it as
//	           waiting    behind another message of its key
//	           ready      to be published
//	           withheld   its topic is unavailable
//	           suspected  it failed, by its own fault or its topic's
//	           in flight  handed to the sink
//	           confirmed  to be deleted; skipped while another transaction has it locked
//	parked   retrying: refused, and tried again later;
//	         postponed: failed without being charged, or set aside, and tried again later;
//	         or behind such a message of its key
//	dead     given up: in package dlq, until an operator replays or discards it
//
// A message that waits may be hollow: the worker knows it without its payload, and
// reads it again before it goes out. A worker keeps at most 32 suspects and 64
// topics in trouble while the sink works. What is beyond is postponed, and at most
// 100 messages a second that were parked may fail again. A key with very many
// messages behind its first is swept: they are moved to parked without being read.
// Where more of a lane waits than goes out, the reader looks ahead in it for messages
// that may go before those in front of them.
//
// An outage of the sink, of whatever length, costs nothing but time: nothing is
// counted against messages that found no way out, nacks and missing queues among
// them. A message that the sink refuses ([Refused]) is tried again, by
// Config.Retry, and then a dead letter; its key's later messages wait behind it,
// in order, and no other key notices. An error of unknown kind, a message
// that nobody takes ([NoRoute]), and one that is never confirmed in time count
// only if other messages pass: of the topic, or for five minutes of others. If the
// sink has replaced what a lane publishes on ([Interrupted]), nothing is counted
// either.
//
// A dead letter may have been delivered: its message may have been refused after an
// attempt whose answer was lost. The letter says so.
//
// A message that kills its worker is found out: after two crashes in a row its lane
// goes on one message at a time, and only one that was alone in flight is charged.
package relay
