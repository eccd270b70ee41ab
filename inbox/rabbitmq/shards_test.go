package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// fanout is the configuration of a consumer whose queue, or shards, are bound to the exchange
// of the topic.
func fanout(uri string, prefetch int) wamqp.Config {
	cfg := wamqp.NewDurablePubSubConfig(uri, wamqp.GenerateQueueNameTopicNameWithSuffix("stock"))
	cfg.Consume.Qos.PrefetchCount = prefetch
	return cfg
}

func shards(count, previous int) rabbitmq.Config {
	if count == 0 {
		return rabbitmq.Config{}
	}
	return rabbitmq.Config{Shards: rabbitmq.Shards{Count: count, Previous: previous, Rebalance: 20 * time.Millisecond}}
}

func shardName(count, i int) string { return fmt.Sprintf("orders_stock.%d.%03d", count, i) }

// shardsOf takes want messages from the shards, and returns in which shard each id was.
func (a *admin) shardsOf(count, want int) map[string]int {
	a.t.Helper()
	conn, err := amqp091.Dial(a.uri)
	if err != nil {
		a.t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // everything was read
	channel, err := conn.Channel()
	if err != nil {
		a.t.Fatal(err)
	}
	taken := make(chan amqp091.Delivery)
	var forwarding sync.WaitGroup
	defer forwarding.Wait()
	defer channel.Close() //nolint:errcheck // the same
	for i := range count {
		deliveries, err := channel.Consume(shardName(count, i), strconv.Itoa(i), true, false, false, false, nil)
		if err != nil {
			a.t.Fatal(err)
		}
		forwarding.Go(func() {
			for d := range deliveries {
				taken <- d
			}
		})
	}
	found := map[string]int{}
	for range want {
		select {
		case d := <-taken:
			i, err := strconv.Atoi(d.ConsumerTag)
			if _, again := found[d.MessageId]; again || err != nil {
				a.t.Errorf("%q is in more than one shard, %v", d.MessageId, err)
			}
			found[d.MessageId] = i
		case <-time.After(maxWait):
			a.t.Fatalf("%d messages of %d", len(found), want)
		}
	}
	return found
}

// exists reports whether the broker has a queue.
func (a *admin) exists(queue string) bool {
	a.t.Helper()
	channel, err := a.conn.Channel()
	if err != nil {
		a.t.Fatal(err)
	}
	defer channel.Close() //nolint:errcheck // only asked, and it is closed if there is none
	_, err = channel.QueueDeclarePassive(queue, true, false, false, false, nil)
	var refused *amqp091.Error
	if err != nil && (!errors.As(err, &refused) || refused.Code != amqp091.NotFound) {
		a.t.Fatal(err)
	}
	return err == nil
}

// placed is a consumer with shards on a node that is restarted.
type placed struct {
	t    *testing.T
	node *testserver.RabbitServer
	s    *rabbitmq.Subscriber
	out  <-chan *message.Message // of another topic with shards
}

const placedShards, placedKeys = 12, 100 // more than ten: names sort as numbers

// placeKeys declares shards and checks how keys are divided among them.
func placeKeys(t *testing.T, node *testserver.RabbitServer) *placed {
	t.Helper()
	cfg := shards(placedShards, 0)
	cfg.Shards.Rebalance = time.Second
	p := &placed{t: t, node: node, s: subscriber(t, fanout(node.URI(), 10), cfg)}
	p.out = subscribe(t, p.s, "returns")
	p.expectDivided()
	return p
}

// expectDivided checks that a key has one shard, that keys and messages without keys are spread
// over the shards, and that consumers of shards go on. After a restart of the whole broker a key may
// have another shard than before: docs/growing.md.
func (p *placed) expectDivided() {
	p.t.Helper()
	// Declared again after a restart, which changes nothing.
	if err := p.s.SubscribeInitialize("orders"); err != nil {
		p.t.Fatal(err)
	}
	a := newAdmin(p.t, p.node.URI())
	returned := a.ch.NotifyReturn(make(chan amqp091.Return, 3*placedKeys))
	id := func(kind string, i int) string { return fmt.Sprintf("%s of %d", kind, i) }
	var all []amqp091.Publishing
	for i := range placedKeys {
		key := "key " + strconv.Itoa(i)
		all = append(all, publishing(id("first", i), key), publishing(id("second", i), key), publishing(id("none", i), ""))
	}
	a.send("orders", "", all...)
	if len(returned) > 0 {
		p.t.Fatalf("%d messages were unroutable", len(returned))
	}
	places := a.shardsOf(placedShards, 3*placedKeys)
	withKeys, without := map[int]bool{}, map[int]bool{}
	for i := range placedKeys {
		first, second := places[id("first", i)], places[id("second", i)]
		if first != second {
			p.t.Errorf("a key is in the shards %d and %d", first, second)
		}
		withKeys[first], without[places[id("none", i)]] = true, true
	}
	if n, m := len(withKeys), len(without); n < placedShards/2 || m < placedShards/2 {
		p.t.Errorf("keys have %d shards, messages without keys %d of %d", n, m, placedShards)
	}
	deliverAll(p.t, newAdmin(p.t, p.node.URI()), "returns", p.out, placedKeys)
}

// expectNoShards checks what consumers with shards are told of a node that cannot have any.
func (p *placed) expectNoShards() {
	p.t.Helper()
	p.node.Eval(`rabbit_registry:unregister(exchange, <<"x-consistent-hash">>)`) // as without the plugin
	if _, err := p.s.Subscribe(p.t.Context(), "invoices"); !errors.Is(err, rabbitmq.ErrNoShards) {
		p.t.Errorf("without the plugin: %v", err)
	}
}

// deliverAll sends a message of each of many keys, and takes all of them.
func deliverAll(t *testing.T, a *admin, topic string, out <-chan *message.Message, keys int) {
	t.Helper()
	for i := range keys {
		a.send(topic, "", publishing("of "+strconv.Itoa(i), "key "+strconv.Itoa(i)))
	}
	seen := map[string]bool{}
	for len(seen) < keys {
		msg := next(t, out)
		seen[msg.UUID] = true
		msg.Ack()
	}
}

// A shard that somebody has deleted is declared again.
func TestShards_ADeletedShardIsDeclaredAgain(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	out := subscribe(t, subscriber(t, fanout(uri, 10), shards(3, 0)), "orders")
	deliverAll(t, a, "orders", out, 20)
	if _, err := a.ch.QueueDelete(shardName(3, 1), false, false, false); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the shard is there", func() bool { return a.exists(shardName(3, 1)) })
	deliverAll(t, a, "orders", out, 20)
}

// watch handles what its subscribers deliver. It checks that each key has one message at a time
// and each message once, in order, whatever happens to the contexts of the messages.
type watch struct {
	t       *testing.T
	handled sync.WaitGroup

	mu   sync.Mutex
	busy map[string]bool
	last map[string]int // completed
	by   map[string]int // who completed it
}

func (w *watch) consume(who int, out <-chan *message.Message) {
	w.handled.Go(func() {
		for msg := range out {
			w.handled.Go(func() { w.handle(who, msg) })
		}
	})
}

func (w *watch) handle(who int, msg *message.Message) {
	key := msg.Metadata.Get(rabbitmq.KeyHeader)
	n, err := strconv.Atoi(string(msg.Payload))
	if err != nil {
		w.t.Error(err)
	}
	w.mu.Lock()
	if last := w.last[key]; n != last+1 || w.busy[key] {
		w.t.Errorf("%d handles %d of %s after %d; another one is handled: %t", who, n, key, last, w.busy[key])
	}
	w.busy[key] = true
	w.mu.Unlock()
	testserver.Pause(context.WithoutCancel(msg.Context()), 5*time.Millisecond)
	w.mu.Lock()
	w.busy[key], w.last[key], w.by[key] = false, n, who
	w.mu.Unlock()
	msg.Ack()
}

// Processes share the shards, and each key keeps its order while they come and go.
func TestShards_AreSharedByProcessesThatComeAndGo(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	const count, keys = 6, 60
	if err := subscriber(t, fanout(uri, 10), shards(count, 0)).SubscribeInitialize("orders"); err != nil {
		t.Fatal(err)
	}
	key := func(i int) string { return "key " + strconv.Itoa(i) }
	for i := range keys {
		a.send("orders", "", publishing(key(i), key(i)))
	}
	shardOf := a.shardsOf(count, keys)
	w := &watch{t: t, busy: map[string]bool{}, last: map[string]int{}, by: map[string]int{}}
	processes := map[int]*rabbitmq.Subscriber{}
	start := func(who int) {
		cfg := shards(count, 0)
		cfg.CloseTimeout = maxWait
		s := subscriber(t, fanout(uri, 10), cfg)
		w.consume(who, subscribe(t, s, "orders"))
		processes[who] = s
	}
	round := 0
	produce := func() {
		round++
		var all []amqp091.Publishing
		for i := range keys {
			p := publishing(fmt.Sprintf("%s round %d", key(i), round), key(i))
			p.Body = []byte(strconv.Itoa(round))
			all = append(all, p)
		}
		a.send("orders", "", all...)
	}
	lastRounds := func() (sum int) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, n := range w.last {
			sum += n
		}
		return sum
	}
	// shared reports whether each of the processes has its share.
	shared := func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		owned := map[int]map[int]bool{}
		for i := range keys {
			if owned[w.by[key(i)]] == nil {
				owned[w.by[key(i)]] = map[int]bool{}
			}
			owned[w.by[key(i)]][shardOf[key(i)]] = true
		}
		for who := range processes {
			if len(owned[who]) != count/len(processes) {
				return false
			}
		}
		return len(owned) == len(processes)
	}
	await := func() {
		t.Helper()
		testserver.EventuallyMoving(t, "the shards are shared", func() bool {
			if round*keys-lastRounds() < 2*keys {
				produce()
			}
			return shared()
		}, lastRounds)
	}
	for who := 1; who <= 3; who++ {
		start(who)
		await()
	}
	for who := 1; who <= 2; who++ {
		leaving := processes[who]
		delete(processes, who)
		if err := leaving.Close(); err != nil {
			t.Error(err)
		}
		await()
	}
	testserver.EventuallyMoving(t, "everything is handled", func() bool { return lastRounds() == round*keys }, lastRounds)
	if err := processes[3].Close(); err != nil {
		t.Error(err)
	}
	w.handled.Wait()
}

// All shards together have as many messages in flight as the prefetch.
func TestShards_TogetherHaveThePrefetchInFlight(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	const prefetch = 4
	out := subscribe(t, subscriber(t, fanout(uri, prefetch), shards(3, 0)), "orders")
	const total = 60
	for i := range total {
		a.send("orders", "", publishing(strconv.Itoa(i), ""))
	}
	seen := map[string]bool{}
	var flying []*message.Message
	for range prefetch {
		flying = append(flying, next(t, out))
	}
	none(t, out)
	for i := range total {
		msg := flying[0]
		seen[msg.UUID] = true
		if i%2 == 0 {
			msg.Ack()
		} else { // it gives its place to another, and comes again
			msg.Nack()
			delete(seen, msg.UUID)
		}
		flying = append(flying[1:], next(t, out))
	}
	none(t, out)
	for _, msg := range flying {
		msg.Ack()
		seen[msg.UUID] = true
	}
	for len(seen) < total {
		msg := next(t, out)
		msg.Ack()
		seen[msg.UUID] = true
	}
}

// What goes back to a consumer with shards goes to the shard of its key.
func TestShards_ReplaysGoToTheShardOfTheirKey(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	const count, keys = 4, 20
	s := subscriber(t, fanout(uri, 10), shards(count, 0))
	if err := s.Publish("orders", message.NewMessage("early", nil)); err == nil {
		t.Error("published to shards that do not exist")
	}
	if err := s.SubscribeInitialize("orders"); err != nil {
		t.Fatal(err)
	}
	var replays []*message.Message
	for i := range keys {
		key := "key " + strconv.Itoa(i)
		a.send("orders", "", publishing("first of "+key, key))
		msg := message.NewMessage("replay of "+key, nil)
		msg.Metadata.Set(rabbitmq.KeyHeader, key)
		replays = append(replays, msg)
	}
	if err := s.Publish("orders", replays...); err != nil {
		t.Fatal(err)
	}
	found := a.shardsOf(count, 2*keys)
	for i := range keys {
		key := "key " + strconv.Itoa(i)
		if was, is := found["first of "+key], found["replay of "+key]; was != is {
			t.Errorf("%s is in shard %d, its replay in %d", key, was, is)
		}
	}
}

// A process whose Count is not that of the others does not consume, and does not lead
// messages elsewhere.
func TestShards_AnotherCountIsAnError(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	if err := subscriber(t, fanout(uri, 10), shards(2, 0)).SubscribeInitialize("orders"); err != nil {
		t.Fatal(err)
	}
	other := subscriber(t, fanout(uri, 10), shards(3, 0))
	if _, err := other.Subscribe(t.Context(), "orders"); !errors.Is(err, rabbitmq.ErrShardCount) {
		t.Errorf("got %v", err)
	}
	var wrong *oncemill.ConfigError
	if err := other.MoveShards(t.Context(), "orders"); !errors.As(err, &wrong) {
		t.Errorf("moved without Previous: %v", err)
	}
	if a.exists(shardName(3, 0)) || !a.exists(shardName(2, 1)) {
		t.Error("shards of the wrong count were declared, or those of the right one are missing")
	}
}

func TestShards_BadValuesAreReportedTogether(t *testing.T) {
	t.Parallel()
	queue := fanout("amqp://localhost", 1)
	queue.Queue.Durable, queue.Consume.Exclusive = false, true
	queue.Queue.Arguments = amqp091.Table{"x-single-active-consumer": false}
	for name, c := range map[string]struct {
		queue  wamqp.Config
		shards rabbitmq.Shards
		fields []string
	}{
		"queue":         {queue, rabbitmq.Shards{Count: 2}, []string{"amqp.Config.Queue", "Exclusive", "PrefetchCount", "x-single-active-consumer"}},
		"too many":      {fanout("amqp://localhost", 10), rabbitmq.Shards{Count: 257, Previous: 257, Header: "x-key", Rebalance: 1}, []string{"Count", "Previous", "Header", "Rebalance"}},
		"negative":      {fanout("amqp://localhost", 10), rabbitmq.Shards{Count: -1, Previous: -1}, []string{"Count", "Previous"}},
		"without count": {fanout("amqp://localhost", 10), rabbitmq.Shards{Previous: 4}, []string{"Count"}},
	} {
		_, err := rabbitmq.New(c.queue, rabbitmq.Config{Shards: c.shards})
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		if n := strings.Count(err.Error(), "\n") + 1; n != len(c.fields) {
			t.Errorf("%s: %d problems: %v", name, n, err)
		}
		for _, field := range c.fields {
			if !strings.Contains(err.Error(), field) {
				t.Errorf("%s: %s is missing in %v", name, field, err)
			}
		}
	}
	direct := wamqp.NewDurableQueueConfig("amqp://localhost")
	direct.Consume.Qos.PrefetchCount = 10
	s, err := rabbitmq.New(direct, shards(2, 0))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Subscribe(context.WithoutCancel(t.Context()), "orders"); err == nil || !strings.Contains(err.Error(), "exchange") {
		t.Errorf("shards without an exchange: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
