// Package relay delivers the messages of the outbox. Every committed message reaches
// the broker, in order per key. A message leaves the outbox only once it is confirmed.
//
//	worker, err := relay.New(box, sink, relay.Config{})
//	if err != nil {
//		return err
//	}
//	return worker.Run(ctx) // until ctx ends
//
// The sink is relay/rabbitmq, any Watermill publisher through [FromPublisher], or
// several of them behind a [Router].
//
// # What it guarantees
//
// At least once: a message is repeated only after a crash, a lost confirm, a lost lease
// or a restore of the database. At most the messages that were in flight are repeated.
// A clean stop repeats nothing. A confirm counts however late it comes: a message that
// has waited for Config.PublishTimeout is retried, but neither relay/rabbitmq nor
// [FromPublisher] sends a second copy while the first is in flight. Consumers remove
// duplicates with package inbox.
//
// In order per key: at most one unconfirmed message of a key is in flight. The first
// copies arrive in the order in which the producers, who serialize on the key,
// committed. Messages without a key have no order, and different keys are not ordered
// relative to each other.
//
// Any number of workers in any number of processes share 32 lanes through leases in the
// database. A worker that dies holds its lanes for Config.Lease at most. A worker that
// is cut off from the database stops publishing before its leases end. A worker that
// was frozen may repeat the messages it held, and no more. All times are the
// database's. Nothing depends on a session, so a pooler in transaction mode is fine.
//
// The worker bounds the time of every database call, even if the driver never returns.
// A worker whose heartbeats are answered, but calls of another kind are not for half of
// Config.Lease, is unfit: it gives its lanes to others until they are. [Relay.Ready]
// reports that. A lock that another program holds on an outbox row delays the deletion of
// that row, and nothing else.
//
// # Pauses
//
// Operators can pause topics, sinks ([Route].Name), lanes and keys, and resume them: package steer.
// A worker learns of that within a second or two. What is in flight then gets its outcome. A paused
// message uses up no attempt, and its key waits behind it. A worker that cannot read the pauses keeps
// to those it read last, and publishes nothing before it has read any. Without the tables of package
// steer, or the right to read them, nothing is paused.
//
// # Where a message is
//
// Retrying messages are in the table parked.
//
//	outbox        not confirmed; a worker that reads it knows it as
//	                waiting    behind another message of its key
//	                ready      to be published
//	                withheld   its topic is unavailable, or an operator has paused it
//	                unclear    it failed, through its own fault or its topic's
//	                in flight  handed to the sink
//	                confirmed  to be deleted; skipped while another transaction has it locked
//	parked        retrying: refused, to be retried later;
//	              postponed: it failed without using up an attempt, or was set aside;
//	              or behind such a message of its key
//	dead_letters  given up, until an operator replays or discards it (package dlq)
//
// A waiting message may be hollow: the worker knows it without its payload, and reads
// it again before it is sent. While the sink works, a worker keeps at most 32 unclear
// messages and 64 topics in trouble. Any more are postponed, and at most 100 retrying
// messages a second may fail again. A key with very many messages behind its first is
// swept: they are moved to the table parked without being read. If more of a lane waits
// than is sent, the reader looks ahead in it for messages that may go before those in
// front of them.
//
// An outage of the sink, however long, costs nothing but time. It uses up no attempts
// of messages that could not be delivered; nacks and missing queues count as an outage
// too. A message that the sink refuses ([Refused]) is retried, by Config.Retry, and
// then becomes a dead letter. The later messages of its key wait behind it, in order;
// other keys are not affected. Three outcomes use up an attempt only if other messages
// pass, of the topic or, for five minutes, of other topics: an error of unknown kind, a
// message without a receiver ([Unroutable]), and one that is never confirmed in time. If
// the sink has replaced the channel that a lane publishes on ([Interrupted]), no
// attempts are used up either.
//
// A dead letter may have been delivered: its message may have been refused after an
// attempt whose answer was lost. The dead letter records that.
//
// A message that crashes its worker is detected. After two crashes in a row the lanes take
// turns, four at a time, or up to sixteen where confirms are slow. After a third, each of those
// that had messages in flight takes turns of its own, few beside one another; after a fourth, such a
// lane publishes one message at a time, and only a message that was alone in flight is blamed.
package relay
