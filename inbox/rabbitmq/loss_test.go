package rabbitmq_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// lose cuts the connections of a subscriber and waits until it consumes again. It may be back before
// anybody has seen that it was away, so what counts is its next connection.
func lose(t *testing.T, s *rabbitmq.Subscriber, p *testserver.AMQPProxy, dials func() int32) {
	t.Helper()
	before := dials()
	p.Cut()
	eventually(t, "the subscriber connects again", func() bool { return dials() > before })
	eventually(t, "the consumer is back", s.Ready)
}

// What is handled when its channel is lost keeps its key until its handler has
// finished, though the broker delivers it again at once.
func TestSubscriber_KeepsAKeySerialOverTheLossOfItsChannel(t *testing.T) {
	t.Parallel()
	direct := testserver.RabbitMQ(t)
	p, uri := testserver.ProxyAMQP(t, direct)
	a := newAdmin(t, direct)
	s := subscriber(t, queues(uri, 10), rabbitmq.Config{})
	out := subscribe(t, s, "orders")
	a.publish("orders", publishing("a1", "a"), publishing("a2", "a"))
	a1 := next(t, out)
	lose(t, s, p, p.Dials.Load)
	a.publish("orders", publishing("b1", "b"))
	next(t, out).Ack() // b1: the others of a wait
	none(t, out)
	if err := a1.Context().Err(); err != nil {
		t.Errorf("the context of a running handler: %v", err)
	}
	a1.Ack() // nobody hears it
	for _, want := range []string{"a1", "a2"} {
		msg := next(t, out)
		d, _ := inbox.DeliveryFromContext(msg.Context())
		if msg.UUID != want || !d.Redelivered() {
			t.Errorf("got %q, redelivered %t", msg.UUID, d.Redelivered())
		}
		msg.Ack()
	}
	none(t, out)
}

// Addresses are tried in turn, and a connection that is lost goes on with the next.
func TestSubscriber_TriesTheNextAddress(t *testing.T) {
	t.Parallel()
	direct := testserver.RabbitMQ(t)
	_, vhost, _ := strings.Cut(strings.TrimPrefix(direct, "amqp://"), "/")
	silent := testserver.Listen(t)
	t.Cleanup(func() { _ = silent.Close() })
	first, firstURI := testserver.ProxyAMQP(t, direct)
	second, secondURI := testserver.ProxyAMQP(t, direct)
	a := newAdmin(t, direct)
	s := subscriber(t, queues("amqp://guest:guest@"+silent.Addr().String()+"/"+vhost, 10), rabbitmq.Config{
		Addresses: []string{firstURI, secondURI}, DialTimeout: 5 * time.Second,
	})
	out := subscribe(t, s, "orders")
	used := func(id string, f, s int32) {
		t.Helper()
		a.publish("orders", publishing(id, ""))
		for got := ""; got != id; { // an acknowledgement may be lost with its connection
			msg := next(t, out)
			got = msg.UUID
			msg.Ack()
		}
		if n, m := first.Dials.Load(), second.Dials.Load(); n != f || m != s {
			t.Errorf("%d and %d connections, want %d and %d", n, m, f, s)
		}
	}
	dials := func() int32 { return first.Dials.Load() + second.Dials.Load() }
	used("a", 1, 0)
	lose(t, s, first, dials)
	used("b", 1, 1)
	lose(t, s, second, dials)
	used("c", 2, 1)
}

func TestSubscriber_DeclaresAQueueThatWasDeleted(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	s := subscriber(t, queues(uri, 10), rabbitmq.Config{})
	out := subscribe(t, s, "orders")
	for i := range 3 {
		if _, err := a.ch.QueueDelete("orders", false, false, false); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the queue is there again", func() bool { return a.exists("orders") })
		eventually(t, "the consumer is back", s.Ready)
		id := fmt.Sprint(i)
		a.publish("orders", publishing(id, ""))
		if msg := next(t, out); msg.UUID != id || !msg.Ack() {
			t.Errorf("got %q", msg.UUID)
		}
	}
}

// Deliveries that wait behind a handler go back together when they have waited
// for too long. While two consumers are there, they come in any order.
func TestSubscriber_GivesBackWhatHasWaitedTooLong(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	out := subscribe(t, subscriber(t, queues(uri, 10), rabbitmq.Config{AckTimeout: time.Second}), "orders")
	a.publish("orders", publishing("a1", "a"), publishing("a2", "a"), publishing("a3", "a"))
	a1 := next(t, out)
	select {
	case <-a1.Context().Done():
	case <-time.After(maxWait):
		t.Fatal("the context does not end")
	}
	other := subscribe(t, subscriber(t, queues(uri, 10), rabbitmq.Config{}), "orders")
	var got []string
	for range 3 {
		msg := next(t, other)
		got = append(got, msg.UUID)
		msg.Ack()
	}
	if slices.Sort(got); !slices.Equal(got, []string{"a1", "a2", "a3"}) {
		t.Errorf("got %v", got)
	}
	a1.Nack()
	none(t, out)
}

// One node for what needs a node of its own, one after the other. The shards of another consumer
// still divide keys among them after each restart, and nothing is returned as unroutable.
func TestSubscriber_SurvivesOutages(t *testing.T) {
	t.Parallel()
	node := testserver.PrivateRabbitMQ(t)
	keys := placeKeys(t, node)
	// A second to acknowledge, looked at twice a second. New channels see it.
	node.Eval("application:set_env(rabbit, consumer_timeout, 1000), application:set_env(rabbit, channel_tick_interval, 500)")
	s := subscriber(t, queues(node.URI(), 20), rabbitmq.Config{NackDelay: time.Millisecond, AckTimeout: 2 * time.Second})
	var seen sync.Map
	var hang atomic.Bool
	out := subscribe(t, s, "orders")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var handlers sync.WaitGroup
		defer handlers.Wait()
		for msg := range out {
			if hang.CompareAndSwap(true, false) {
				continue // neither acknowledged nor nacked
			}
			seen.Store(msg.UUID, true)
			handlers.Go(func() { msg.Ack() })
		}
	}()
	id := 0
	exchange := func(n int) {
		t.Helper()
		a := newAdmin(t, node.URI())
		var want []string
		for range n {
			id++
			want = append(want, fmt.Sprint(id))
			a.publish("orders", publishing(want[len(want)-1], fmt.Sprint(id%7)))
		}
		eventually(t, "all are handled", func() bool {
			for _, id := range want {
				if _, ok := seen.Load(id); !ok {
					return false
				}
			}
			return true
		})
	}
	exchange(10)
	t.Run("acknowledgement timeout of the broker", func(t *testing.T) {
		hang.Store(true)
		exchange(10) // among them the one that hangs, when it comes again
	})
	node.Eval("application:set_env(rabbit, consumer_timeout, 1800000)")
	t.Run("broker stopped", func(t *testing.T) {
		node.StopApp()
		eventually(t, "the consumer is lost", func() bool { return !s.Ready() })
		node.StartApp()
		exchange(10)
	})
	keys.expectDivided()
	if testserver.Long() {
		t.Run("node stopped", func(t *testing.T) {
			node.Stop() // it closes connections
			node.Start()
			exchange(10)
			keys.expectDivided()
		})
		t.Run("connections closed by the broker", func(t *testing.T) {
			node.Eval(testserver.CloseConnections)
			exchange(10)
		})
		t.Run("node killed", func(t *testing.T) {
			node.Kill()
			node.Start()
			exchange(10)
			keys.expectDivided()
		})
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	<-ended
	if n, _ := newAdmin(t, node.URI()).left("orders"); n != 0 {
		t.Errorf("%d messages are left", n)
	}
	keys.expectNoShards()
}

// Connections are cut every second (in CI every 300 ms) while messages come.
// Every message has its effect, once, and those of a key in their order.
func TestSubscriber_WithAnInboxUnderConnectionKills(t *testing.T) {
	t.Parallel()
	duration, every := testserver.Rounds(5*time.Second, 2*time.Minute), testserver.Rounds(300*time.Millisecond, time.Second)
	direct := testserver.RabbitMQ(t)
	p, uri := testserver.ProxyAMQP(t, direct)
	pg := testserver.Postgres(t)
	pg.DB.SetMaxOpenConns(20)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, inbox.Migrations); err != nil {
		t.Fatal(err)
	}
	if _, err := pg.DB.ExecContext(t.Context(), `create table effects (n bigint generated always as identity, key text, number int)`); err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(pg.DB, inbox.Config{Consumer: "stock", Database: pg.Config, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	s := subscriber(t, queues(uri, 50), rabbitmq.Config{NackDelay: time.Millisecond, CloseTimeout: 10 * time.Second})
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddConsumerHandler("reserve", "orders", s, func(msg *message.Message) error {
		tx, _ := inbox.TxFromContext(msg.Context())
		_, err := tx.ExecContext(msg.Context(), `insert into effects (key, number) values ($1, $2::text::int)`,
			msg.Metadata.Get(rabbitmq.KeyHeader), string(msg.Payload))
		return err
	}).AddMiddleware(in.Middleware)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	defer cancel()
	stopped := make(chan error)
	go func() { stopped <- router.Run(ctx) }()
	<-router.Running()

	killing, stopKilling := context.WithCancel(ctx)
	var killer sync.WaitGroup
	killer.Go(func() {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				p.Cut()
			case <-killing.Done():
				return
			}
		}
	})
	a := newAdmin(t, direct)
	const keys = 20
	sent := 0
	pace := time.NewTicker(50 * time.Millisecond)
	defer pace.Stop()
	for begin := time.Now(); time.Since(begin) < duration; <-pace.C {
		var batch []amqp091.Publishing
		for range keys {
			p := publishing(fmt.Sprintf("m%d", sent), fmt.Sprintf("key %d", sent%keys))
			p.Body = fmt.Appendf(nil, "%d", sent/keys)
			batch = append(batch, p)
			sent++
		}
		a.publish("orders", batch...)
	}
	stopKilling()
	killer.Wait()
	count := func(query string) (n int) {
		if err := pg.DB.QueryRowContext(t.Context(), query).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, "all have their effects", func() bool { return count(`select count(*) from effects`) >= sent })
	if err := router.Close(); err != nil {
		t.Error(err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if n := count(`select count(*) from effects`); n != sent {
		t.Errorf("%d effects of %d messages", n, sent)
	}
	if n := count(`select count(*) from (select number, lag(number) over (partition by key order by n) as before from effects) e where number <> before + 1`); n != 0 {
		t.Errorf("%d effects are not in the order of their key", n)
	}
	if n, _ := a.left("orders"); n != 0 {
		t.Errorf("%d messages are left", n)
	}
	if n := p.Dials.Load(); n < 5 {
		t.Errorf("only %d connections were made", n)
	}
	t.Logf("%d messages over %d connections", sent, p.Dials.Load())
}
