// Package rabbitmq subscribes an inbox to RabbitMQ. It has a [Subscriber] with as many
// messages in flight as its prefetch, and a [Marshaler] that reads every delivery. Queues,
// bindings, names and connection settings are those of watermill-amqp/v2.
//
//	cfg := amqp.NewDurablePubSubConfig(uri, amqp.GenerateQueueNameTopicNameWithSuffix("stock"))
//	cfg.Consume.Qos.PrefetchCount = 100
//	subscriber, err := rabbitmq.New(cfg, rabbitmq.Config{Malformed: in.Refuse})
//	if err != nil {
//		return err
//	}
//	router.AddConsumerHandler("reserve", "orders", subscriber, reserve).AddMiddleware(in.Middleware)
//
// What it guarantees: every delivery is acknowledged after its message was, or goes back
// to its queue. Messages of one ordering key are handed out one at a time in the order of
// their delivery, also across nacks and the loss of the channel. A message that was
// acknowledged before Close returned is not delivered again.
//
// What it does not guarantee: a message whose acknowledgement did not reach the broker is
// delivered again, and the inbox removes the duplicate. With several consumers of a queue
// there is no order between them; with [Shards] there is.
//
// A delivery is
//
//	waiting     for an earlier one of its key, or for its handler
//	handed out  to the handler
//	delayed     nacked, and to be handed out again
//	settled     acknowledged or rejected
//
// The [Marshaler] also works with watermill-amqp's own subscriber. That subscriber
// otherwise takes a delivery with a header that is not a string again and again, without
// end; RabbitMQ itself adds such headers when it dead-letters or delays a message. A
// delivery without any id is read too. Its Watermill UUID is empty, and the inbox refuses
// it with inbox.ErrNoMessageID.
package rabbitmq
