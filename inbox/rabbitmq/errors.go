package rabbitmq

import (
	"errors"
)

var (
	// ErrClosed is returned by Subscribe, SubscribeInitialize and Publish after the
	// subscriber has been closed.
	ErrClosed = errors.New("rabbitmq: the subscriber is closed")

	// ErrNoShards is returned for Config.Shards if the broker does not have the type of
	// exchange that distributes messages over shards. Enable RabbitMQ's plugin, which is
	// part of its distribution, on every node: rabbitmq-plugins enable
	// rabbitmq_consistent_hash_exchange.
	ErrNoShards = errors.New("rabbitmq: the broker cannot distribute messages over shards; on every node run: rabbitmq-plugins enable rabbitmq_consistent_hash_exchange")

	// ErrShardCount is returned for Config.Shards if the consumer has shards of another
	// count. Set Shards.Previous to that count and call MoveShards, or correct
	// Shards.Count.
	ErrShardCount = errors.New("rabbitmq: the consumer has another number of shards; set Shards.Previous to it and call MoveShards, or correct Shards.Count")

	errNoExchange    = errors.New("shards need an exchange; amqp.Config.Exchange.GenerateName returned none for this topic")
	errShardGone     = errors.New("the shard does not exist")
	errCallTimeout   = errors.New("no answer from the broker in time")
	errConsumerGone  = errors.New("the broker has canceled the consumer; is the queue deleted?")
	errClosedQuietly = errors.New("channel closed")
	errStuck         = errors.New("deliveries wait for a handler that has run longer than Config.AckTimeout")
	errUnreadable    = errors.New("the delivery cannot be read")
	errNoMessage     = errors.New("the marshaler returned neither a message nor an error")
	errNotConfirmed  = errors.New("the broker has not confirmed a message")
	errNoQueue       = errors.New("no such queue; subscribe to the topic first, or declare it")
	errGoexit        = errors.New("a function of the configuration ended its goroutine")
	errNoMalformed   = errors.New("set Config.Malformed to keep it elsewhere")
)
