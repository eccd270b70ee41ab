package rabbitmq_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// envShards makes the test binary a consumer with shards: URI, DSN, schema, count and previous
// count in lines.
const envShards = "ONCEMILL_TEST_SHARDS"

// consumeShardsAsAProcess records effects until it is told to stop, and whether the one before
// was missing.
func consumeShardsAsAProcess() error {
	settings := strings.Split(os.Getenv(envShards), "\n")
	count, _ := strconv.Atoi(settings[3])
	previous, _ := strconv.Atoi(settings[4])
	db, err := sql.Open("postgres", settings[1])
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(10)
	tables := oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: settings[2]}
	letters, err := dlq.New(db, dlq.Config{Database: tables})
	if err != nil {
		return err
	}
	in, err := inbox.New(db, inbox.Config{Consumer: "stock", Database: tables, DeadLetters: letters, Logger: quiet})
	if err != nil {
		return err
	}
	cfg := shards(count, previous)
	cfg.Malformed, cfg.Logger = in.Refuse, quiet
	s, err := rabbitmq.New(fanout(settings[0], 10), cfg)
	if err != nil {
		return err
	}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddConsumerHandler("reserve", "orders", s, func(msg *message.Message) error {
		tx, _ := inbox.TxFromContext(msg.Context())
		key := msg.Metadata.Get(rabbitmq.KeyHeader)
		_, err := tx.ExecContext(msg.Context(), `insert into disorder select $1, $2::int
			where coalesce((select max(n) from effects where key = $1), 0) <> $2::int - 1`, key, string(msg.Payload))
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(msg.Context(), `insert into effects (key, n) values ($1, $2)`, key, string(msg.Payload))
		testserver.Pause(msg.Context(), testserver.Rounds(50*time.Millisecond, 0)) // a process is killed while it handles messages
		return err
	}).AddMiddleware(in.Middleware)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return router.Run(ctx)
}

// crowd is the processes of a consumer.
type crowd struct {
	t       *testing.T
	uri     string
	pg      testserver.PG
	members []*exec.Cmd
}

func (c *crowd) start(count, previous int) {
	c.t.Helper()
	child := exec.CommandContext(context.WithoutCancel(c.t.Context()), os.Args[0])
	child.Env = append(os.Environ(), envShards+"="+strings.Join([]string{c.uri, c.pg.DSN, c.pg.Config.Schema, strconv.Itoa(count), strconv.Itoa(previous)}, "\n"))
	child.Stderr = os.Stderr
	if err := child.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.members = append(c.members, child)
}

// end ends the first n processes.
func (c *crowd) end(n int, by os.Signal) {
	c.t.Helper()
	for _, child := range c.members[:n] {
		if err := child.Process.Signal(by); err != nil {
			c.t.Error(err)
		}
		if err := child.Wait(); err != nil && by != os.Kill {
			c.t.Errorf("a clean stop: %v", err)
		}
	}
	c.members = c.members[n:]
}

// The number of shards changes while producers send, and while processes are started, stopped
// and killed. Every message has one effect, and each key its order.
func TestShards_MoveUnderLoad(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	pg, _ := withLetters(t)
	if _, err := pg.DB.ExecContext(t.Context(), `create table effects (id bigint generated always as identity, key text, n int);
		create index on effects (key, n); create table disorder (key text, n int)`); err != nil {
		t.Fatal(err)
	}
	count := func(query string) (n int) {
		t.Helper()
		if err := pg.DB.QueryRowContext(t.Context(), database.Of(pg.Config).Expand(query)).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	effects := func() int { return count(`select count(*) from effects`) }
	const lookEvery = 15 * time.Millisecond // or the counting is most of the work
	if err := subscriber(t, fanout(uri, 10), shards(3, 0)).SubscribeInitialize("orders"); err != nil {
		t.Fatal(err)
	}

	keys := testserver.Rounds(12, 30)
	sent := 0 // of each key
	producer := newAdmin(t, uri)
	returned := producer.ch.NotifyReturn(make(chan amqp091.Return, 1))
	produce := func(ctx context.Context) error {
		few := func() bool { // wait, so that shards can be drained
			testserver.Pause(ctx, lookEvery)
			return keys*sent-effects() < 20*keys
		}
		for testserver.Poll(ctx, few) {
			var round []amqp091.Publishing
			for i := range keys {
				p := publishing(fmt.Sprintf("%d of %d", sent+1, i), "key "+strconv.Itoa(i))
				p.Body = []byte(strconv.Itoa(sent + 1))
				round = append(round, p)
			}
			producer.send("orders", "", round...) // returns when they are confirmed
			sent++
		}
		return nil
	}
	stopProducing := testserver.Run(t, produce)
	await := func(what string, condition func() bool) {
		t.Helper()
		testserver.EventuallyMoving(t, what, func() bool {
			testserver.Pause(t.Context(), lookEvery)
			return condition()
		}, effects)
	}

	c := &crowd{t: t, uri: uri, pg: pg}
	defer func() { c.end(len(c.members), os.Kill) }()
	more := func() { // the load goes on
		t.Helper()
		before := effects()
		await("more effects", func() bool { return effects() > before+10*keys })
	}
	now := 3
	c.start(now, 0)
	c.start(now, 0)
	more()
	for _, next := range testserver.Rounds([]int{5}, []int{5, 2, 7, 3}) {
		c.end(1, os.Kill)
		c.start(now, 0)
		more()
		c.start(next, now) // 1. all processes know both counts
		c.end(1, syscall.SIGTERM)
		c.start(next, now)
		c.end(1, os.Kill)
		more()
		operator := subscriber(t, fanout(uri, 10), shards(next, now)) // 2. one of them moves the shards
		if err := operator.MoveShards(t.Context(), "orders"); err != nil {
			t.Fatal(err)
		}
		c.start(next, now)
		c.end(1, os.Kill)
		if err := operator.MoveShards(t.Context(), "orders"); err != nil {
			t.Errorf("again: %v", err)
		}
		await("the previous shards are removed", func() bool {
			for i := range now {
				if producer.exists(shardName(now, i)) {
					return false
				}
			}
			return true
		})
		more()
		c.start(next, 0) // 3. the previous count can be forgotten
		c.end(2, syscall.SIGTERM)
		c.start(next, 0)
		now = next
		more()
	}
	stopProducing()
	await("all effects", func() bool { return effects() >= keys*sent })
	c.end(len(c.members), syscall.SIGTERM)

	if n := effects(); n != keys*sent || count(`select count(distinct (key, n)) from effects`) != n {
		t.Errorf("%d effects of %d messages", n, keys*sent)
	}
	if n := count(`select count(*) from disorder`); n != 0 {
		t.Errorf("%d effects came before the one before them", n)
	}
	if n := count(`select count(*) from (select n - lag(n, 1, 0) over (partition by key order by id) as step from effects) steps where step <> 1`); n != 0 {
		t.Errorf("%d effects are out of order", n)
	}
	if n := count(`select count(*) from {{dead_letters}}`); n != 0 {
		t.Errorf("%d dead letters", n)
	}
	if len(returned) > 0 {
		t.Error("a message was unroutable")
	}
}

// Consumers remove a previous shard as soon as nothing is left in it, at worst while a second
// call of MoveShards puts a marker there: RabbitMQ then often ends the connection.
func TestShards_MoveWhileConsumersRemoveThem(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	const previous = 24
	if err := subscriber(t, fanout(uri, 10), shards(previous, 0)).SubscribeInitialize("orders"); err != nil {
		t.Fatal(err)
	}
	markers, remover := newAdmin(t, uri), newAdmin(t, uri)
	var removing sync.WaitGroup
	for i := range previous - 1 {
		marked, err := markers.ch.ConsumeWithContext(t.Context(), shardName(previous, i), "", true, false, false, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		removing.Go(func() {
			<-marked // the next one is marked just now
			testserver.Pause(t.Context(), time.Duration(rand.IntN(2000))*time.Microsecond)
			remover.mu.Lock()
			defer remover.mu.Unlock()
			if _, err := remover.ch.QueueDelete(shardName(previous, i+1), false, false, false); err != nil {
				t.Error(err)
			}
		})
	}
	if err := subscriber(t, fanout(uri, 10), shards(1, previous)).MoveShards(t.Context(), "orders"); err != nil {
		t.Error(err)
	}
	_ = markers.ch.Close() // for the shards that were removed before they were marked
	removing.Wait()
}

// A marker that did not come from MoveShards removes nothing, and one that came through the
// exchange of the topic is a message.
func TestShards_AForgedMarkerRemovesNothing(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	declareOneShard(t, fanout(uri, 10))
	out := subscribe(t, subscriber(t, fanout(uri, 10), shards(2, 1)), "orders")
	forged := publishing("forged", "")
	forged.Headers = amqp091.Table{"oncemill_shards_moved": true}
	a.send("orders", "", forged)
	if msg := next(t, out); msg.UUID != "forged" || !msg.Ack() {
		t.Errorf("got %q", msg.UUID)
	}
	a.publish(shardName(1, 0), forged)
	for range 30 { // after it, and the shard is there for longer than an attempt to remove it takes
		a.send("orders", "", publishing("after", "k"))
		next(t, out).Ack()
		none(t, out)
	}
	if !a.exists(shardName(1, 0)) {
		t.Error("the shard was removed")
	}
	operator := subscriber(t, fanout(uri, 10), shards(2, 1))
	if err := operator.MoveShards(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the shard is removed", func() bool { return !a.exists(shardName(1, 0)) })
	a.send("orders", "", publishing("moved", "k"))
	if msg := next(t, out); msg.UUID != "moved" || !msg.Ack() {
		t.Errorf("got %q", msg.UUID)
	}
}

// The new shards wait until everything in the previous ones is settled.
func TestShards_NewOnesWaitForThePreviousOnes(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	if err := subscriber(t, fanout(uri, 10), shards(2, 0)).SubscribeInitialize("orders"); err != nil {
		t.Fatal(err)
	}
	s := subscriber(t, fanout(uri, 10), shards(3, 2))
	out := subscribe(t, s, "orders")
	for i := range 5 {
		a.send("orders", "", publishing(fmt.Sprint("old ", i), fmt.Sprint(i)))
	}
	var old []*message.Message
	for range 5 {
		old = append(old, next(t, out))
	}
	if err := s.MoveShards(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		a.send("orders", "", publishing(fmt.Sprint("new ", i), fmt.Sprint(i)))
	}
	for _, msg := range old[1:] {
		msg.Ack()
	}
	none(t, out)
	old[0].Nack()
	again := next(t, out)
	if again.UUID != old[0].UUID {
		t.Errorf("got %q", again.UUID)
	}
	none(t, out)
	again.Ack()
	for range 5 {
		msg := next(t, out)
		if !strings.HasPrefix(msg.UUID, "new ") {
			t.Errorf("got %q", msg.UUID)
		}
		msg.Ack()
	}
	eventually(t, "only the new shards are waited for", s.Ready) // the previous ones go just now
}

// A delivery that has neither key nor id, or cannot be read, is given back before AckTimeout. On its
// way here again it is not lost with a shard that seems to be drained.
func TestShards_NotRemovedWhileDeliveriesComeAgain(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareOneShard(t, fanout(uri, 10))
	cfg := shards(2, 1)
	cfg.AckTimeout, cfg.NackDelay = time.Second, time.Hour // given back after 0.8 s
	s := subscriber(t, fanout(uri, 10), cfg)
	out := subscribe(t, s, "orders")
	a := newAdmin(t, uri)
	a.send("orders", "", publishing("", ""))
	next(t, out).Nack()
	if err := s.MoveShards(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	for range 6 {
		next(t, out).Nack()
	}
	next(t, out).Ack()
	eventually(t, "the shard is removed", func() bool { return !a.exists(shardName(1, 0)) })
}

// declareOneShard declares what is the previous shard later.
func declareOneShard(t *testing.T, cfg wamqp.Config) {
	t.Helper()
	if err := subscriber(t, cfg, shards(1, 0)).SubscribeInitialize("orders"); err != nil {
		t.Fatal(err)
	}
}

// RabbitMQ answers for a quorum queue without a leader as for an empty one.
func TestShards_NotRemovedWithoutItsLeader(t *testing.T) {
	t.Parallel()
	node := testserver.PrivateRabbitMQ(t)
	a := newAdmin(t, node.URI())
	quorum := fanout(node.URI(), 2)
	quorum.Queue.Arguments = amqp091.Table{"x-queue-type": "quorum"}
	declareOneShard(t, quorum)
	var warnings writes
	cfg := shards(2, 1)
	cfg.CallTimeout = time.Second
	cfg.Logger = slog.New(slog.NewTextHandler(&warnings, &slog.HandlerOptions{Level: slog.LevelWarn}))
	s := subscriber(t, quorum, cfg)
	out := subscribe(t, s, "orders")
	a.send("orders", "", publishing("before", "k"))
	before := next(t, out)
	if err := s.MoveShards(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	a.publish(shardName(1, 0), publishing("behind the marker", "k")) // beyond the prefetch
	act := func(what string) {
		node.Eval(`{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"` + shardName(1, 0) + `">>)), {Name, _} = amqqueue:get_pid(Q), ` + what)
	}
	act("ra:stop_server(quorum_queues, {Name, node()})")
	before.Ack()
	testserver.Pause(t.Context(), 3*cfg.CallTimeout)
	none(t, out)
	if n := warnings.Load(); n > 0 {
		t.Errorf("%d warnings: it waited for a queue without a leader", n)
	}
	act("ra:restart_server(quorum_queues, {Name, node()})")
	if msg := next(t, out); msg.UUID != "behind the marker" || !msg.Ack() {
		t.Errorf("got %q", msg.UUID)
	}
	eventually(t, "the shard is removed", func() bool { return !a.exists(shardName(1, 0)) })
}

// What the broker has sent, and has not arrived here, is neither in the shard nor in the subscription.
func TestShards_NotRemovedWhileADeliveryIsOnItsWay(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	declareOneShard(t, fanout(uri, 2))
	proxy, proxied := testserver.ProxyAMQP(t, uri)
	cfg := shards(2, 1)
	cfg.Shards.Rebalance = time.Hour // nothing else is asked of the broker
	out := subscribe(t, subscriber(t, fanout(proxied, 2), cfg), "orders")
	a.send("orders", "", publishing("before", "k"))
	before := next(t, out)
	if err := subscriber(t, fanout(uri, 2), shards(2, 1)).MoveShards(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	a.publish(shardName(1, 0), publishing("behind", "k")) // waits for a place in the prefetch
	proxy.Delay.Store(int64(400 * time.Millisecond))      // several calls take longer than the time between two attempts
	before.Ack()
	var behind *message.Message
	eventually(t, "a message, or the shard is removed", func() bool {
		select {
		case behind = <-out:
			return true
		default:
			return !a.exists(shardName(1, 0))
		}
	})
	if behind == nil || behind.UUID != "behind" || !behind.Ack() {
		t.Fatalf("got %v", behind)
	}
	eventually(t, "the shard is removed", func() bool { return !a.exists(shardName(1, 0)) })
}

// Markers that were sent before, such as by a move that was repeated, leave room for the next one.
func TestShards_RemovedWhenMovedTwice(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	declareOneShard(t, fanout(uri, 2))
	s := subscriber(t, fanout(uri, 2), shards(2, 1))
	out := subscribe(t, s, "orders")
	a.send("orders", "", publishing("before", "k"))
	before := next(t, out)
	for range 3 {
		if err := s.MoveShards(t.Context(), "orders"); err != nil {
			t.Fatal(err)
		}
	}
	before.Ack()
	eventually(t, "the shard is removed", func() bool { return !a.exists(shardName(1, 0)) })
}

// A marker that stays does not fill the log.
func TestShards_WhatCannotBeRemovedIsNotLoggedEachTime(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareOneShard(t, fanout(uri, 10))
	forged := publishing("forged", "")
	forged.Headers = amqp091.Table{"oncemill_shards_moved": true}
	newAdmin(t, uri).publish(shardName(1, 0), forged)
	for previous, line := range map[int]string{0: "Shards.Previous is not set here", 1: "drained shard not removed"} {
		count := 1 + previous
		var log bytes.Buffer
		cfg := shards(count, previous)
		cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		s := subscriber(t, fanout(uri, 10), cfg)
		subscribe(t, s, "orders")
		testserver.Pause(t.Context(), 3500*time.Millisecond) // for several attempts
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if n := strings.Count(log.String(), line); n != 1 {
			t.Errorf("%d lines %q", n, line)
		}
	}
}
