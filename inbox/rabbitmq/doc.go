// Package rabbitmq connects an inbox to RabbitMQ through watermill-amqp's
// subscriber. [Marshaler] reads every delivery: the stock marshaler refuses one
// with a header that is not a string, as RabbitMQ itself adds when it
// dead-letters or delays, and the subscriber then takes it again without end.
//
//	cfg := amqp.NewDurablePubSubConfig(uri, amqp.GenerateQueueNameTopicNameWithSuffix("stock"))
//	cfg.Marshaler = rabbitmq.Marshaler{}
//	subscriber, err := amqp.NewSubscriber(cfg, logger)
//
// A delivery without any id is read too. Its Watermill UUID is empty, and the
// inbox refuses it with inbox.ErrNoMessageID.
package rabbitmq
