package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// One delayed key with a backlog far beyond the prefetch leaves the others theirs, and
// keeps its order.
func TestSubscriber_AKeyInTroubleDoesNotFillThePrefetch(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	for _, kind := range []string{"classic", "quorum"} {
		for _, trouble := range []string{"nacked", "hanging"} {
			t.Run(kind+" "+trouble, func(t *testing.T) {
				t.Parallel()
				a := newAdmin(t, uri)
				queue := strings.Join([]string{"orders", kind, trouble}, " ")
				args := amqp091.Table{"x-queue-type": kind}
				a.declare(queue, args)
				const prefetch, backlog, others = 20, 400, 200
				var all []amqp091.Publishing
				for i := range backlog {
					all = append(all, publishing(fmt.Sprint("evil ", i), "evil"))
				}
				for i := range others {
					all = append(all, publishing(fmt.Sprint("other ", i), fmt.Sprint("key ", i%50)))
				}
				a.publish(queue, all...)
				cfg := queues(uri, prefetch)
				cfg.Queue.Arguments = args
				out := subscribe(t, subscriber(t, cfg, rabbitmq.Config{}), queue)
				mended := make(chan struct{})
				var evil []string
				for handled := 0; handled < others; {
					msg := next(t, out)
					switch {
					case strings.HasPrefix(msg.UUID, "other"):
						handled++
						msg.Ack()
					case trouble == "nacked":
						evil = append(evil, msg.UUID)
						d, _ := inbox.DeliveryFromContext(msg.Context())
						d.DelayNack(time.Second)
						msg.Nack()
					default:
						evil = append(evil, msg.UUID)
						go func() {
							<-mended
							msg.Nack()
						}()
					}
				}
				for _, id := range evil {
					if id != "evil 0" {
						t.Errorf("%s came before its turn", id)
					}
				}
				close(mended)
				for i := range backlog {
					msg := next(t, out)
					if msg.UUID != fmt.Sprint("evil ", i) {
						t.Fatalf("got %s, want evil %d", msg.UUID, i)
					}
					msg.Ack()
				}
				// The consumers that were added go.
				eventually(t, "one consumer is left", func() bool {
					state, err := a.ch.QueueDeclarePassive(queue, true, false, false, false, args)
					return err == nil && state.Consumers == 1
				})
				none(t, out)
			})
		}
	}
}

// withLetters returns a database with the tables of an inbox, and its letters.
func withLetters(t *testing.T) (testserver.PG, *dlq.Store) {
	t.Helper()
	pg := testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, inbox.Migrations, audit.Migrations, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	letters, err := dlq.New(pg.DB, dlq.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	return pg, letters
}

// The rate of others beside a message that fails as the defaults have it, and all that
// follows it, is that without, in the same seconds on the same machine.
func TestSubscriber_APoisonKeyLeavesTheOthersTheirRate(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	pg, letters := withLetters(t)
	const prefetch, backlog, others, work = 20, 500, 2500, 20 * time.Millisecond
	rounds := 0
	prepare := func(poison bool) (handled *atomic.Int64, begin, end func()) {
		rounds++
		queue := "orders " + strconv.Itoa(rounds)
		in, err := inbox.New(pg.DB, inbox.Config{Consumer: queue, Database: pg.Config, DeadLetters: letters, Logger: quiet})
		if err != nil {
			t.Fatal(err)
		}
		a := newAdmin(t, uri)
		a.declare(queue, nil)
		var all []amqp091.Publishing
		if poison {
			for i := range backlog {
				all = append(all, publishing(fmt.Sprint("evil ", i), "evil"))
			}
		}
		for i := range others {
			all = append(all, publishing(fmt.Sprint("other ", i), fmt.Sprint("key ", i)))
		}
		a.publish(queue, all...)
		router := message.NewDefaultRouter(watermill.NopLogger{})
		handled = new(atomic.Int64)
		router.AddConsumerHandler("reserve", queue, subscriber(t, queues(uri, prefetch), rabbitmq.Config{}), func(msg *message.Message) error {
			if strings.HasPrefix(msg.UUID, "evil") {
				return errors.New("always")
			}
			testserver.Pause(t.Context(), work) // the rate is the handlers', not the machine's
			handled.Add(1)
			return nil
		}).AddMiddleware(in.Middleware)
		ended := make(chan error, 1)
		begin = func() { go func() { ended <- router.Run(context.WithoutCancel(t.Context())) }() }
		return handled, begin, func() {
			if err := errors.Join(router.Close(), <-ended); err != nil {
				t.Error(err)
			}
		}
	}
	for try := 1; ; try++ {
		with, beginWith, endWith := prepare(true)
		without, beginWithout, endWithout := prepare(false)
		beginWith()
		beginWithout()
		eventually(t, "all are handled without a poison key", func() bool { return without.Load() == int64(others) })
		share := float64(with.Load()) / float64(others)
		t.Logf("%.2f of the rate", share)
		eventually(t, "all others are handled", func() bool { return with.Load() == int64(others) })
		endWith()
		endWithout()
		if share >= 0.9 {
			return
		}
		if try == 4 { // the machine is others', too
			t.Error("too slow")
			return
		}
	}
}

// A message that is to come again after AckTimeout is given back to the queue before, with
// what follows it, and handled when it is time; nobody else notices.
func TestSubscriber_ARetryMayTakeLongerThanAckTimeout(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	pg, letters := withLetters(t)
	logger := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	in, err := inbox.New(pg.DB, inbox.Config{Consumer: "stock", Database: pg.Config, DeadLetters: letters, Retry: inbox.Retry{Delay: time.Millisecond}, Logger: logger})
	if err != nil {
		t.Fatal(err)
	}
	a := newAdmin(t, uri)
	a.declare("orders", nil)
	a.publish("orders", publishing("later", "k"), publishing("next", "k"), publishing("last", "k"), publishing("slow", ""))
	router := message.NewDefaultRouter(watermill.NopLogger{})
	var mu sync.Mutex
	var handled []string
	var at []time.Time
	begun := make(chan struct{}, 10)
	const wait = 4 * time.Second
	router.AddConsumerHandler("reserve", "orders", subscriber(t, queues(uri, 10), rabbitmq.Config{AckTimeout: time.Second, Logger: logger}), func(msg *message.Message) error {
		if msg.UUID == "slow" { // would be repeated if the subscription were
			begun <- struct{}{}
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		handled, at = append(handled, msg.UUID), append(at, time.Now())
		if len(handled) == 1 {
			return inbox.RetryAfter(errors.New("not now"), wait)
		}
		return nil
	}).AddMiddleware(in.Middleware)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.WithoutCancel(t.Context())) }()
	eventually(t, "all are handled", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.Contains(handled, "last")
	})
	if err := errors.Join(router.Close(), <-ended); err != nil {
		t.Error(err)
	}
	// A commit that takes longer than AckTimeout, as on a slow machine, is tried again.
	if got := slices.Compact(slices.Clone(handled)); !slices.Equal(got, []string{"later", "next", "last"}) || handled[1] != "later" {
		t.Errorf("handled %q", handled)
	}
	if waited := at[1].Sub(at[0]); waited < wait-200*time.Millisecond || len(begun) != 1 {
		t.Errorf("tried again after %v; slow ran %d times", waited, len(begun))
	}
}

// What is given back is handled before what its producer has sent meanwhile.
func TestSubscriber_NothingOvertakesWhatIsGivenBack(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	for _, kind := range []string{"classic", "quorum"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			a := newAdmin(t, uri)
			args := amqp091.Table{"x-queue-type": kind}
			a.declare(kind, args)
			cfg := queues(uri, 500)
			cfg.Queue.Arguments = args
			out := subscribe(t, subscriber(t, cfg, rabbitmq.Config{AckTimeout: 8 * time.Second}), kind)
			const width = "%06d"
			again, published := make(chan struct{}), make(chan int)
			go func() {
				for n := 0; ; n++ {
					select {
					case <-again:
						published <- n
						return
					default:
						a.publish(kind, publishing(fmt.Sprintf(width, n), "k"))
						testserver.Pause(t.Context(), testserver.Rounds(4*time.Millisecond, 0)) // still more than the prefetch
					}
				}
			}()
			first := next(t, out)
			d, _ := inbox.DeliveryFromContext(first.Context())
			d.DelayNack(maxWait)
			first.Nack()
			var got []string
			for last := 0; len(got) == 0 || got[len(got)-1] != fmt.Sprintf(width, last-1); {
				msg := next(t, out)
				if got = append(got, msg.UUID); len(got) == 1 {
					close(again)
					last = <-published
				}
				msg.Ack()
			}
			for i, id := range got {
				if want := fmt.Sprintf(width, i); id != want {
					t.Fatalf("got %s, want %s", id, want)
				}
			}
		})
	}
}

// Messages that wait for their turn behind handlers that take their time go back when it
// is time, and nobody notices.
func TestSubscriber_AKeyMayTakeLongerThanAckTimeout(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	s := subscriber(t, queues(uri, 200), rabbitmq.Config{AckTimeout: 8 * time.Second})
	out := subscribe(t, s, "orders")
	var all []amqp091.Publishing
	const messages = 100
	for i := range messages {
		all = append(all, publishing(fmt.Sprint(i), "k"))
	}
	a.publish("orders", all...)
	for i := range messages {
		msg := next(t, out)
		if msg.UUID != fmt.Sprint(i) {
			t.Fatalf("got %s, want %d", msg.UUID, i)
		}
		testserver.Pause(t.Context(), 100*time.Millisecond) // of the handler's
		if !s.Ready() {
			t.Fatal("the subscription is reset")
		}
		msg.Ack()
	}
	none(t, out)
}

// What is given back, and taken by another consumer, is not awaited for ever.
func TestSubscriber_WhatIsGivenBackMayGoElsewhere(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	one := subscribe(t, subscriber(t, queues(uri, 20), rabbitmq.Config{AckTimeout: 5 * time.Second}), "orders")
	const messages = 10
	publish := func(name string) {
		for i := range messages {
			a.publish("orders", publishing(fmt.Sprint(name, i), "k"))
		}
	}
	publish("before ")
	msg := next(t, one)
	d, _ := inbox.DeliveryFromContext(msg.Context())
	d.DelayNack(maxWait)
	msg.Nack()
	two := subscribe(t, subscriber(t, queues(uri, 20), rabbitmq.Config{}), "orders")
	handled := map[string]int{}
	handle := func(all int) {
		for len(handled) < all {
			select {
			case msg = <-one:
			case msg = <-two:
			case <-time.After(maxWait):
				t.Fatalf("%d handled, want %d", len(handled), all)
			}
			handled[msg.UUID]++
			if d, _ := inbox.DeliveryFromContext(msg.Context()); d.Redelivered() && strings.HasPrefix(msg.UUID, "after") {
				t.Errorf("%s has waited so long that it was given back", msg.UUID)
			}
			msg.Ack()
		}
	}
	publish("beside ")
	handle(2 * messages)
	publish("after ")
	handle(3 * messages)
	for id, n := range handled {
		if n > 1 {
			t.Errorf("%s was handled %d times", id, n)
		}
	}
}

// Consumers that were added go when delayed keys hold less, though they hold something.
func TestSubscriber_AddedConsumersGoWhenTheyAreNotNeeded(t *testing.T) {
	t.Parallel()
	a := newAdmin(t, testserver.RabbitMQ(t))
	const prefetch, backlog = 20, 400
	out, consumers := troubled(t, a, prefetch, backlog, 3*time.Second, rabbitmq.Config{})
	eventually(t, "consumers are added", func() bool { return consumers() > 2 })
	for handled := 0; handled < backlog; { // but for the last, which fails for ever
		msg := next(t, out)
		if handled++; handled < backlog {
			msg.Ack()
			continue
		}
		d, _ := inbox.DeliveryFromContext(msg.Context())
		d.DelayNack(2 * maxWait)
		msg.Nack()
	}
	eventually(t, "one consumer is left", func() bool { return consumers() == 1 })
}

// A delayed key holds no more than the prefetch and Config.Backlog.
func TestSubscriber_AKeyInTroubleHoldsNoMoreThanTheBacklog(t *testing.T) {
	t.Parallel()
	a := newAdmin(t, testserver.RabbitMQ(t))
	const prefetch, backlog, published = 20, 100, 1000
	_, consumers := troubled(t, a, prefetch, published, 2*maxWait, rabbitmq.Config{Backlog: backlog})
	least, since := published, time.Now()
	for time.Since(since) < 3*time.Second {
		state, err := a.ch.QueueDeclarePassive("orders", true, false, false, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		if state.Messages < least {
			least, since = state.Messages, time.Now()
		}
		testserver.Pause(t.Context(), 10*time.Millisecond)
	}
	if held := published - least; held < prefetch+backlog/2 || held > prefetch+backlog {
		t.Errorf("%d consumers hold %d, want at most %d", consumers(), held, prefetch+backlog)
	}
}

// troubled publishes messages of one key, the first of which is nacked once, and returns
// how many consumers there are.
func troubled(t *testing.T, a *admin, prefetch, messages int, delay time.Duration, opts rabbitmq.Config) (out <-chan *message.Message, consumers func() int) {
	t.Helper()
	a.declare("orders", nil)
	var all []amqp091.Publishing
	for i := range messages {
		all = append(all, publishing(fmt.Sprint("evil ", i), "evil"))
	}
	a.publish("orders", all...)
	out = subscribe(t, subscriber(t, queues(a.uri, prefetch), opts), "orders")
	msg := next(t, out)
	d, _ := inbox.DeliveryFromContext(msg.Context())
	d.DelayNack(delay)
	msg.Nack()
	return out, func() int {
		state, err := a.ch.QueueDeclarePassive("orders", true, false, false, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		return state.Consumers
	}
}

// Handlers that never return do not hold the prefetch for ever, whatever waits for them: a message
// in the queue, or one of another shard.
func TestSubscriber_HandlersThatDoNotReturnLeaveThePrefetch(t *testing.T) {
	t.Parallel()
	for name, count := range map[string]int{"one queue": 0, "shards": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			uri := testserver.RabbitMQ(t)
			cfg := shards(count, 0)
			cfg.AckTimeout = time.Second
			out := subscribe(t, subscriber(t, fanout(uri, 2), cfg), "orders")
			a := newAdmin(t, uri)
			for i := range 2 {
				a.send("orders", "", publishing(fmt.Sprint("hangs ", i), fmt.Sprint(i)))
				next(t, out)
			}
			const others = 10
			for i := range others {
				a.send("orders", "", publishing(fmt.Sprint("other ", i), fmt.Sprint("other ", i)))
			}
			for handled := map[string]bool{}; len(handled) < 2+others; {
				msg := next(t, out)
				msg.Ack()
				handled[msg.UUID] = true
			}
		})
	}
}

// What arrives while earlier messages of its key are on their way back, and here again, is behind
// them for the next consumer too. A quorum queue gives back in the order of its deliveries.
func TestShards_KeepTheOrderOfWhatWasGivenBack(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	proxy, proxied := testserver.ProxyAMQP(t, uri)
	cfg := shards(1, 0)
	cfg.AckTimeout, cfg.NackDelay, cfg.NackDelayMax = 4*time.Second, time.Hour, time.Hour
	cfg.Shards.Rebalance, cfg.CloseTimeout = time.Hour, 30*time.Second
	first := subscriber(t, fanout(proxied, 100), cfg)
	out := subscribe(t, first, "orders")
	a := newAdmin(t, uri)
	n := 0
	send := func() {
		a.send("orders", "", publishing(strconv.Itoa(n), "k"))
		n++
	}
	send()
	next(t, out).Nack()
	proxy.Delay.Store(int64(200 * time.Millisecond))
	var again *message.Message
	for again == nil { // it is given back after 3.2 s
		send()
		select {
		case again = <-out:
		case <-time.After(40 * time.Millisecond):
		}
	}
	again.Nack() // what was on its way meanwhile is behind it, and comes again
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	cfg.AckTimeout = 0
	out = subscribe(t, subscriber(t, fanout(uri, 100), cfg), "orders")
	for i := range n {
		msg := next(t, out)
		if msg.UUID != strconv.Itoa(i) {
			t.Fatalf("got %q, want %d", msg.UUID, i)
		}
		msg.Ack()
	}
}
