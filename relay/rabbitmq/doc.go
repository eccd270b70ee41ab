// Package rabbitmq is the relay's way out to RabbitMQ: a [Sink] that publishes
// with pipelined publisher confirms, one AMQP channel for each lane, on a
// connection of its own. Exchanges, names, routing keys, marshaler and
// connection settings are those of watermill-amqp/v2, so a stock watermill-amqp
// subscriber reads what it publishes.
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
// What it guarantees: a message is reported as delivered only after the broker
// has confirmed it and has not returned it as unroutable; every message is
// published persistent and mandatory; messages of one lane are written in the
// order in which they were handed over; every message gets exactly one outcome,
// at the latest when the context given to Publish ends. What it does not: a
// message without an outcome from the broker (lost connection, lost confirm,
// deadline) may have arrived and arrives again when the relay repeats it; the
// inbox removes the repeat. Whether queues survive the broker is the topology's
// business: use durable queues.
//
// A message waits in its lane, is then in flight on the lane's channel, and ends
// as one of:
//
//	delivered    confirmed, not returned
//	refused      unroutable, not to be marshalled, larger than AMQP or the broker allows
//	unavailable  everything else: no connection, blocked broker, nack, channel or
//	             connection closed, exchange missing or forbidden, no answer in time
//
// On the wire a message carries its id as AMQP message-id, its topic as type,
// the time of its insert as timestamp, its metadata as string headers, and the
// string headers oncemill_id ("lane/id", which matches returns to messages) and,
// if it has an ordering key, oncemill_key.
package rabbitmq
