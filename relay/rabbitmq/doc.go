// Package rabbitmq provides a relay's sink for RabbitMQ. A [Sink] publishes with pipelined
// publisher confirms, one AMQP channel for each lane, on a connection of its own.
// Exchanges, names, routing keys, marshaler and connection settings are those of
// watermill-amqp/v2, so a stock watermill-amqp subscriber reads what it publishes.
//
//	sink, err := rabbitmq.New(amqp.NewDurablePubSubConfig(uri, nil), rabbitmq.Config{})
//	if err != nil {
//		return err
//	}
//	r, err := relay.New(box, sink, relay.Config{})
//	if err != nil {
//		return err
//	}
//	return r.Run(ctx) // runs the sink too
//
// What it guarantees: a message is reported as delivered only after the broker has
// confirmed it and has not returned it as unroutable. Every message is published
// persistent and mandatory. Messages of one lane are written in the order in which they
// were passed to the sink. Every message gets an outcome, at the latest when the context
// given to Publish ends.
//
// What it does not guarantee: a message without an outcome from the broker (lost
// connection, lost confirm) may have arrived, and arrives again when the relay repeats it;
// the inbox removes the duplicate. The topology decides whether queues survive a restart
// of the broker: use durable queues.
//
// A message waits in its lane, is then in flight on the lane's channel, and ends as one
// of:
//
//	delivered    confirmed, not returned
//	refused      unroutable, not to be marshalled, larger than AMQP or the broker allows
//	interrupted  its channel was replaced: it did not answer while others did, or only
//	             nacked a topic
//	unavailable  everything else: no connection, blocked broker, nack, channel or
//	             connection closed, exchange missing or forbidden, no answer in time
//
// A confirm counts whenever it arrives. A message whose context has ended stays in flight.
// If it is passed to the sink again meanwhile, the copy in flight serves, and a confirm
// that arrives before that is reported as a second outcome. So a broker or network that is
// slow gets every message once, unless the channel is replaced meanwhile.
//
// A channel is judged by its progress, not by the age of its messages. It is stalled when
// it does not answer for 5 s (a sixth of Config.ConfirmTimeout) although messages of the
// same topic that were sent later are confirmed on the connection; for 7.5 s if only those
// of other topics are. A dead leader of a quorum queue does this to some channels. The
// lane continues with a new channel. Two old ones are kept for up to 5 minutes, and their
// confirms count. Each replacement in 5 minutes doubles the time until the next, up to
// ConfirmTimeout. In OrderPerKeyPipelined a replacement ends the term: none of its
// messages that was not sent is sent on the new channel.
//
// On the wire a message carries its id as AMQP message-id, its topic as type, the time of
// its insert as timestamp (to the second), its metadata as string headers, and the string headers
// oncemill_id ("lane/id", which matches returns to messages), oncemill-created-at (the time of
// the insert, exactly, in RFC 3339) and, if it has an ordering key, oncemill_key. A message
// whose headers would not fit into a frame has no oncemill-created-at.
package rabbitmq
