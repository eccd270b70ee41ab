package rabbitmq

import (
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/amqpconn"
)

// Shards divides a consumer's messages among several queues, its shards, so that several
// processes can work on them in order. Messages of one ordering key are in one shard. Each
// shard is a queue with a single active consumer. All processes subscribe to all shards, and
// the broker gives each shard to one process at a time. A process that has more than its
// share hands shards over, between two messages of each key. If a process dies, its shards go
// to others at once. So the effects of a key happen in the order of its messages, whatever
// happens to the processes. docs/growing.md has the details.
//
// amqp.Config.Consume.Qos.PrefetchCount is the number of messages that are handled at once, of
// all shards of the process together. Each shard may hold as many.
//
// The broker needs the plugin rabbitmq_consistent_hash_exchange; see [ErrNoShards]. The
// queues are quorum queues unless amqp.Config.Queue.Arguments has another x-queue-type. They
// are bound to the exchange of the topic through further exchanges, so nothing changes for
// producers and for other consumers. All names begin with the name that the queue would have
// without shards.
type Shards struct {
	// Count is the number of shards, at most 256. At most as many processes receive messages.
	// Three or more for each process divide the work evenly; each costs a queue, and a
	// channel in each process. All processes must have the same. Default: 0, one queue
	// without a single active consumer.
	Count int

	// Previous is the value of Count before it was changed. Until [Subscriber.MoveShards] is
	// called, messages continue to go to the shards of Previous. The shards of Count are
	// consumed when those of Previous are drained and removed. Replays that this process
	// publishes wait until then. Keep it until all shards of Previous are removed: a process
	// without it begins with the new shards at once. Default: 0, Count has not changed.
	Previous int

	// Header is the header that has the ordering key. Messages without it are divided by
	// their AMQP message id, and those without both go to one shard. Config.Key must return
	// the same key. Default: [KeyHeader].
	Header string

	// Rebalance is the time between two checks of whether this process has more shards than
	// its share. Default: 5 s. At least 10 ms.
	Rebalance time.Duration
}

const (
	maxShards        = 256
	defaultRebalance = 5 * time.Second
	minRebalance     = 10 * time.Millisecond

	singleActiveArgument = "x-single-active-consumer"
	queueTypeArgument    = "x-queue-type"
	alternateArgument    = "alternate-exchange"
)

func (s *settings) resolveShards(bad amqpconn.Report) {
	n := &s.Shards
	if n.Count == 0 {
		if *n != (Shards{}) {
			bad("rabbitmq.Config.Shards.Count", "0", "is required when other fields of Shards are set")
		}
		return
	}
	if n.Count < 1 || n.Count > maxShards {
		bad("rabbitmq.Config.Shards.Count", strconv.Itoa(n.Count), "must be 1 to "+strconv.Itoa(maxShards)+", or 0 for one queue")
	}
	if n.Previous < 0 || n.Previous > maxShards || n.Previous == n.Count {
		bad("rabbitmq.Config.Shards.Previous", strconv.Itoa(n.Previous), "must be 1 to "+strconv.Itoa(maxShards)+" and differ from Count, or 0 if the count has not changed")
	}
	if n.Header == "" {
		n.Header = KeyHeader
	}
	if problem := amqpconn.CheckShort(n.Header); problem != "" {
		bad("rabbitmq.Config.Shards.Header", strconv.Quote(n.Header), problem)
	}
	if strings.HasPrefix(n.Header, "x-") {
		bad("rabbitmq.Config.Shards.Header", strconv.Quote(n.Header), `must not begin with "x-": RabbitMQ does not match such headers`)
	}
	if n.Rebalance == 0 {
		n.Rebalance = defaultRebalance
	}
	if n.Rebalance < minRebalance {
		bad("rabbitmq.Config.Shards.Rebalance", n.Rebalance.String(), "must be at least "+minRebalance.String())
	}
	s.resolveShardQueues(bad)
}

// resolveShardQueues checks what amqp.Config says about queues, and completes it.
func (s *settings) resolveShardQueues(bad amqpconn.Report) {
	t := &s.topology
	if !t.Queue.Durable || t.Queue.AutoDelete || t.Queue.Exclusive {
		bad("amqp.Config.Queue", "(given)", "must be durable, and neither auto-deleted nor exclusive, with Shards: the queues outlive their consumers")
	}
	if t.Consume.Exclusive {
		bad("amqp.Config.Consume.Exclusive", "true", "must be false with Shards: all processes subscribe to all shards")
	}
	if t.Consume.Qos.PrefetchCount == 1 {
		bad("amqp.Config.Consume.Qos.PrefetchCount", "1", "must be at least 2 with Shards")
	}
	if single, given := t.Queue.Arguments[singleActiveArgument]; given && single != true {
		bad("amqp.Config.Queue.Arguments["+singleActiveArgument+"]", fmt.Sprint(single), "must be true with Shards, or left out")
	}
	arguments := amqp.Table{queueTypeArgument: "quorum"}
	maps.Copy(arguments, t.Queue.Arguments)
	arguments[singleActiveArgument] = true
	t.Queue.Arguments = arguments
}

// singleActive reports whether queues have a single active consumer.
func (s *settings) singleActive() bool {
	return s.topology.Queue.Arguments[singleActiveArgument] == true
}

// layout names what a number of shards has on the broker:
//
//	exchange of the topic -> entry -> keys -> queues    messages with an ordering key
//	                               -> ids  -> queues    others: keys does not match
type layout struct {
	base  string // name of the queue without shards
	count int
}

// layout returns the layout of Shards.Count.
func (s *settings) layout(topic string) (layout, error) {
	l := layout{s.topology.Queue.GenerateName(topic), s.Shards.Count}
	if s.topology.Exchange.GenerateName(topic) == "" {
		return l, errNoExchange
	}
	if longest := l.processes(); amqpconn.CheckShort(longest) != "" {
		return l, amqpconn.NameError(longest, amqpconn.CheckShort(longest))
	}
	return l, nil
}

func (l layout) entry() string      { return fmt.Sprintf("%s.%d", l.base, l.count) }
func (l layout) keys() string       { return l.entry() + ".keys" }
func (l layout) ids() string        { return l.entry() + ".ids" }
func (l layout) current() string    { return l.base + ".current" }
func (l layout) processes() string  { return l.base + ".processes" }
func (l layout) queue(i int) string { return fmt.Sprintf("%s.%03d", l.entry(), i) }

// hashExchange is the type of exchange that the plugin adds.
const hashExchange = "x-consistent-hash"

// What all exchanges and queues of shards are.
const durable, autoDelete, internal, exclusive, noWait = true, false, true, false, false

// declareHashes declares the exchanges that distribute messages. Nothing is sent to them yet.
func (s *settings) declareHashes(channel *amqp.Channel, l layout) error {
	for name, arguments := range map[string]amqp.Table{
		l.keys(): {"hash-header": s.Shards.Header},
		l.ids():  {"hash-property": "message_id"},
	} {
		if err := channel.ExchangeDeclare(name, hashExchange, durable, autoDelete, internal, noWait, arguments); err != nil {
			return fmt.Errorf("declare exchange %q: %w", name, err)
		}
	}
	return nil
}

// declareShard declares one queue. They must be declared in the order of their names: the
// order of an exchange's bindings decides which keys a queue gets, and after a restart the
// broker makes them again in this order. (Rarely, RabbitMQ 3.10 makes one behind the others:
// docs/growing.md.) Whoever else declares them keeps to it too.
func (s *settings) declareShard(channel *amqp.Channel, l layout, i int) error {
	queue := l.queue(i)
	if _, err := channel.QueueDeclare(queue, durable, autoDelete, exclusive, noWait, s.topology.Queue.Arguments); err != nil {
		return fmt.Errorf("declare queue %q: %w", queue, err)
	}
	const weight = "1"
	for _, exchange := range []string{l.keys(), l.ids()} {
		if err := channel.QueueBind(queue, weight, exchange, noWait, nil); err != nil {
			return fmt.Errorf("bind queue %q to %q: %w", queue, exchange, err)
		}
	}
	return nil
}

// declareEntry declares the exchange in front of the others. It is the last one, since
// nothing may be distributed among only some of the queues.
func (s *settings) declareEntry(channel *amqp.Channel, l layout) error {
	arguments := amqp.Table{alternateArgument: l.ids()}
	if err := channel.ExchangeDeclare(l.entry(), amqp.ExchangeHeaders, durable, autoDelete, !internal, noWait, arguments); err != nil {
		return fmt.Errorf("declare exchange %q: %w", l.entry(), err)
	}
	present := amqp.Table{"x-match": "all", s.Shards.Header: nil} // nil: any value
	if err := channel.ExchangeBind(l.keys(), "", l.entry(), noWait, present); err != nil {
		return fmt.Errorf("bind exchange %q to %q: %w", l.keys(), l.entry(), err)
	}
	return nil
}

// exists fails unless the entry exists, and with it everything behind it.
func (l layout) exists(channel *amqp.Channel) error {
	return channel.ExchangeDeclarePassive(l.entry(), amqp.ExchangeHeaders, durable, autoDelete, !internal, noWait, nil)
}

// bindShards leads the messages of the topic to l.
func (s *settings) bindShards(channel *amqp.Channel, topic string, l layout) error {
	exchange := s.topology.Exchange.GenerateName(topic)
	if err := s.topology.TopologyBuilder.ExchangeDeclare(channel, exchange, s.topology); err != nil {
		return fmt.Errorf("declare exchange %q: %w", exchange, err)
	}
	bind := s.topology.QueueBind
	if err := channel.ExchangeBind(l.entry(), bind.GenerateRoutingKey(l.base), exchange, noWait, bind.Arguments); err != nil {
		return fmt.Errorf("bind exchange %q to %q: %w", l.entry(), exchange, err)
	}
	return nil
}

// guard fails unless l is the current layout; see explained. The broker keeps it in the
// alternate exchange of an exchange without other use, since that is what it compares.
func (l layout) guard(channel *amqp.Channel) error {
	arguments := amqp.Table{alternateArgument: l.entry()}
	if err := channel.ExchangeDeclare(l.current(), amqp.ExchangeFanout, durable, autoDelete, internal, noWait, arguments); err != nil {
		return fmt.Errorf("declare exchange %q: %w", l.current(), err)
	}
	return nil
}

// explained adds what an error of the broker means for shards.
func explained(err error) error {
	var refused *amqp.Error
	switch {
	case !errors.As(err, &refused):
		return err
	case refused.Code == amqp.CommandInvalid: // it does not know the type of exchange
		return fmt.Errorf("%w: %w", ErrNoShards, err)
	case refused.Code == amqp.PreconditionFailed && strings.Contains(refused.Reason, alternateArgument):
		return fmt.Errorf("%w: %w", ErrShardCount, err)
	}
	return err
}
