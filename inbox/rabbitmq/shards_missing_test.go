package rabbitmq_test

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// expectMissing checks that messages of shard 1 of 2 are handled by a process that started while shard 0
// could not be opened, and which is not ready.
func expectMissing(t *testing.T, a *admin, uri string, cfg rabbitmq.Config) (*rabbitmq.Subscriber, <-chan string) {
	t.Helper()
	queue := fanout(uri, 10)
	queue.Queue.Arguments = amqp091.Table{"x-queue-type": "classic"}
	s := subscriber(t, queue, cfg)
	handled := make(chan string, 100)
	out := subscribe(t, s, "orders")
	go func() { // ends with s
		for msg := range out {
			handled <- msg.UUID
			msg.Ack()
		}
	}()
	a.publish(shardName(2, 1), publishing("of the other shard", "k"))
	expectHandled(t, handled, "of the other shard")
	if s.Ready() {
		t.Error("ready without one of its shards")
	}
	return s, handled
}

// safeLines keeps a log that is read while it is written.
type safeLines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *safeLines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *safeLines) contain(what string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), what)
}

func expectHandled(t *testing.T, handled <-chan string, want string) {
	t.Helper()
	eventually(t, want+" is handled", func() bool { return len(handled) > 0 })
	if got := <-handled; got != want {
		t.Errorf("got %q", got)
	}
}

// One previous shard that cannot be opened keeps no process from the others. The new ones wait for it.
func TestShards_OneThatCannotBeOpenedKeepsNoOther(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a, other := newAdmin(t, uri), newAdmin(t, uri)
	queue := fanout(uri, 10)
	queue.Queue.Arguments = amqp091.Table{"x-queue-type": "classic"}
	if err := subscriber(t, queue, shards(2, 0)).SubscribeInitialize("orders"); err != nil {
		t.Fatal(err)
	}
	if _, err := a.ch.QueueDelete(shardName(2, 0), false, false, false); err != nil {
		t.Fatal(err)
	}
	if _, err := other.ch.QueueDeclare(shardName(2, 0), true, false, true, false, nil); err != nil {
		t.Fatal(err)
	}
	s, handled := expectMissing(t, a, uri, shards(3, 2))
	if err := s.MoveShards(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the shard that was opened is removed", func() bool { return !a.exists(shardName(2, 1)) })
	a.send("orders", "", publishing("of a new shard", "k"))
	testserver.Pause(t.Context(), 50*time.Millisecond)
	if n := len(handled); n > 0 {
		t.Errorf("%d messages of new shards are handled beside a previous one", n)
	}
	if err := other.conn.Close(); err != nil { // and the queue goes with it
		t.Fatal(err)
	}
	expectHandled(t, handled, "of a new shard")
	eventually(t, "all are there", s.Ready)
}

// A shard that was handed over and cannot be opened again keeps the process from being ready, and no
// message of another shard.
func TestShards_NotReadyWhileOneCannotBeOpenedAfterAHandOver(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a, other := newAdmin(t, uri), newAdmin(t, uri)
	queue := fanout(uri, 10)
	queue.Queue.Arguments = amqp091.Table{"x-queue-type": "classic"}
	var log safeLines
	cfg := shards(2, 0)
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	s := subscriber(t, queue, cfg)
	out := subscribe(t, s, "orders")
	// The shard whose messages came last goes to the next process, once its message is handled.
	a.publish(shardName(2, 1), publishing("first", "k"))
	next(t, out).Ack()
	a.publish(shardName(2, 0), publishing("held", "l"))
	held := next(t, out)
	second := subscriber(t, queue, shards(2, 0))
	subscribe(t, second, "orders")
	eventually(t, "the shard is handed over", func() bool { return !s.Ready() })
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.ch.QueueDelete(shardName(2, 0), false, false, false); err != nil {
		t.Fatal(err)
	}
	if _, err := other.ch.QueueDeclare(shardName(2, 0), true, false, true, false, nil); err != nil {
		t.Fatal(err)
	}
	held.Ack()
	eventually(t, "it cannot be opened", func() bool { return log.contain("consume failed, retrying") })
	if s.Ready() {
		t.Fatal("ready without one of its shards")
	}
	a.publish(shardName(2, 1), publishing("of the other shard", "k"))
	next(t, out).Ack()
	if err := other.conn.Close(); err != nil { // and the queue goes with it
		t.Fatal(err)
	}
	eventually(t, "its consumer is there", s.Ready)
	a.publish(shardName(2, 0), publishing("of the shard that was missing", "l"))
	next(t, out).Ack()
}

// withoutShard returns a broker with two shards, one of which is not there, as RabbitMQ does when the
// node of a queue goes down; comesBack is the other way round.
func withoutShard(t *testing.T) (a *admin, uri string, comesBack func()) {
	t.Helper()
	node := testserver.PrivateRabbitMQ(t)
	a = newAdmin(t, node.URI())
	queue := fanout(node.URI(), 10)
	queue.Queue.Arguments = amqp091.Table{"x-queue-type": "classic"}
	if err := subscriber(t, queue, shards(2, 0)).SubscribeInitialize("orders"); err != nil {
		t.Fatal(err)
	}
	act := func(what string) {
		node.Eval(`N = rabbit_misc:r(<<"/">>, queue, <<"` + shardName(2, 0) + `">>), ` + what)
	}
	act(`mnesia:dirty_delete(rabbit_queue, N)`)
	return a, node.URI(), func() {
		act(`[Q] = mnesia:dirty_read(rabbit_durable_queue, N), mnesia:dirty_write(rabbit_queue, Q)`)
	}
}

// The shard of a node that is down is not there, but a process that starts has the others.
func TestShards_OneWhoseNodeIsDownKeepsNoOther(t *testing.T) {
	t.Parallel()
	a, uri, comesBack := withoutShard(t)
	s, handled := expectMissing(t, a, uri, shards(2, 0))
	comesBack()
	eventually(t, "its consumer is there", s.Ready)
	a.publish(shardName(2, 0), publishing("of the shard that was missing", "k"))
	expectHandled(t, handled, "of the shard that was missing")
}

// A previous shard whose node is down cannot be marked: the move has failed, and succeeds when it is back.
func TestShards_AreNotMovedWithoutOneWhoseNodeIsDown(t *testing.T) {
	t.Parallel()
	a, uri, comesBack := withoutShard(t)
	s, handled := expectMissing(t, a, uri, shards(3, 2))
	if err := s.MoveShards(t.Context(), "orders"); err == nil {
		t.Error("moved without the mark of a shard")
	}
	comesBack()
	if err := s.MoveShards(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	a.send("orders", "", publishing("of a new shard", "k"))
	expectHandled(t, handled, "of a new shard")
}
