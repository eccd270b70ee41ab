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
// # States of a message
//
//	waiting   behind another message of its key
//	ready     to be published
//	in flight handed to the sink
//	failed    to be published again, after a pause, alone in its lane
//	confirmed to be deleted
//
// They are a worker's memory. In the database there is one: the row is there, so
// the message is owed.
//
// An outage of the sink costs nothing but time: messages wait and go on when it
// is back. A message that the sink refuses holds its lane, loudly, until it
// passes; other lanes go on.
package relay
