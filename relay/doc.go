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
// clean stop repeats nothing. Consumers remove repeats with package inbox.
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
// # Where a message is
//
//	outbox   owed; a worker that reads it knows it as
//	           waiting    behind another message of its key
//	           ready      to be published
//	           withheld   its topic is unavailable, or suspected to be
//	           in flight  handed to the sink
//	           confirmed  to be deleted
//	parked   refused, and to be tried again at a time; or behind such a one
//	dead     given up: in package dlq, until an operator replays or discards it
//
// An outage of the sink, of whatever length, costs nothing but time: nothing is
// counted against messages that found no way out, nacks and missing queues among
// them. A message that the sink refuses ([Refused]) is tried again, by
// Config.Retry, and then a dead letter; its key's later messages wait behind it,
// in order, and no other key notices. An error of unknown kind, and a message
// that nobody takes ([NoRoute]), counts only if other messages of the topic
// pass.
//
// A message that kills its worker is found out: after two crashes in a row its lane
// goes on one message at a time, and only one that was alone in flight is charged.
package relay
