package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// proxied starts a sink behind a proxy. The lanes have their channels, in order: lane
// 0 publishes on AMQP channel 1.
func proxied(t *testing.T, lanes int, opts rabbitmq.Config) (*rabbitmq.Sink, *testserver.AMQPProxy, *amqp.Channel) {
	t.Helper()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	p, through := testserver.ProxyAMQP(t, uri)
	sink := start(t, queues(through), opts)
	for lane := range lanes {
		deliver(t, sink, batch(lane, 1, 1, "orders"))
	}
	if n := len(content(t, admin, "orders")); n != lanes {
		t.Fatalf("%d messages before the test", n)
	}
	return sink, p, admin
}

// busy keeps other lanes delivering to a topic until stop.
func busy(t *testing.T, sink *rabbitmq.Sink, first, lanes int, topic string) (stop func()) {
	t.Helper()
	var over atomic.Bool
	var group sync.WaitGroup
	for lane := first; lane < first+lanes; lane++ {
		group.Go(func() {
			for id := 1000; !over.Load(); id++ {
				o := publish(t, sink, maxWait, batch(lane, id, 1, topic))
				if delivered, _, _ := o.kinds(); delivered != 1 {
					t.Errorf("lane %d, message %d: not delivered: %v", lane, id, o.errs())
					return
				}
				testserver.Pause(t.Context(), 5*time.Millisecond)
			}
		})
	}
	stop = sync.OnceFunc(func() { over.Store(true); group.Wait() })
	t.Cleanup(stop)
	return stop
}

// expireHeld hands messages over and ends their time when the proxy keeps back
// confirms.
func expireHeld(t *testing.T, sink *rabbitmq.Sink, p *testserver.AMQPProxy, msgs []*relay.Message) *outcomes {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o := newOutcomes(t)
	before := p.Held()
	sink.Publish(ctx, msgs, o.done)
	eventually(t, "the broker confirms", func() bool { return p.Held() > before })
	cancel()
	o.await(len(msgs))
	if _, _, unavailable := o.kinds(); unavailable != len(msgs) {
		t.Fatalf("%d of %d unavailable when their time ended", unavailable, len(msgs))
	}
	return o
}

// Lanes need a channel at the same time after a takeover, and after a lost connection.
func TestSink_OpensTheChannelsOfItsLanesAtOnce(t *testing.T) {
	t.Parallel()
	const lanes = 8
	sink, p, _ := proxied(t, 1, rabbitmq.Config{CallTimeout: maxWait})
	p.HoldOpen.Store(2) // whichever lane gets it
	all := make([]*outcomes, lanes)
	for i := range all {
		all[i] = newOutcomes(t)
		sink.Publish(t.Context(), batch(1+i, 1, 1, "orders"), all[i].done)
	}
	answered := func() (n int) {
		for _, o := range all {
			n += o.count()
		}
		return n
	}
	testserver.EventuallyMoving(t, "the lanes whose channel is open", func() bool { return answered() == lanes-1 }, answered)
	if p.Held() != 1 {
		t.Errorf("%d openings are held", p.Held())
	}
	p.ReleaseAcks()
	testserver.EventuallyMoving(t, "all lanes", func() bool { return answered() == lanes }, answered)
	for _, o := range all {
		if o.failed() {
			t.Errorf("not delivered: %v", o.errs())
		}
	}
}

// heldDeclaration holds the declarations of an exchange until it is released.
type heldDeclaration struct {
	wamqp.DefaultTopologyBuilder

	exchange string
	count    *atomic.Int32
	release  chan struct{}
}

func (h *heldDeclaration) ExchangeDeclare(ch *amqp.Channel, exchange string, cfg wamqp.Config) error {
	if exchange == h.exchange {
		h.count.Add(1)
		<-h.release
	}
	return h.DefaultTopologyBuilder.ExchangeDeclare(ch, exchange, cfg)
}

// So do exchanges that are to be declared: one does not wait for another, and all lanes that need it
// wait for one answer.
func TestSink_DeclaresExchangesAtOnce(t *testing.T) {
	t.Parallel()
	const lanes = 8
	held := &heldDeclaration{exchange: "slow", count: new(atomic.Int32), release: make(chan struct{})}
	cfg := fanout(testserver.RabbitMQ(t))
	cfg.TopologyBuilder = held
	sink := start(t, cfg, rabbitmq.Config{CallTimeout: maxWait})
	slow := newOutcomes(t)
	for lane := range lanes {
		sink.Publish(t.Context(), batch(lane, 1, 1, "slow"), slow.done)
	}
	eventually(t, "the first declaration", func() bool { return held.count.Load() > 0 })
	quick := publish(t, sink, 30*time.Second, batch(lanes, 1, 1, "quick"))
	if _, unroutable, _ := quick.kinds(); unroutable != 1 || slow.count() != 0 { // which takes an exchange
		t.Errorf("beside a declaration without an answer: %v; %d others", quick.errs(), slow.count())
	}
	close(held.release)
	slow.await(lanes)
	if n := held.count.Load(); n != 1 {
		t.Errorf("declared %d times", n)
	}
}

// A confirm counts though the message's time has ended.
func TestSink_ReportsALateConfirm(t *testing.T) {
	t.Parallel()
	sink, p, admin := proxied(t, 1, rabbitmq.Config{})
	p.HoldAcks.Store(1)
	o := expireHeld(t, sink, p, batch(0, 10, 20, "orders"))
	for m := range o.all {
		if err := o.of(m); !errors.Is(err, rabbitmq.ErrUnanswered) || errors.Is(err, relay.ErrInterrupted) {
			t.Errorf("outcome %v", err)
		}
	}
	p.ReleaseAcks()
	eventually(t, "20 late confirms", func() bool { return o.lateConfirms() == 20 })
	if n := len(content(t, admin, "orders")); n != 20 {
		t.Errorf("%d messages in the queue", n)
	}
}

// The confirm of a copy that was returned is no confirm, also when it comes late.
func TestSink_ReportsNoLateConfirmOfAReturnedMessage(t *testing.T) {
	t.Parallel()
	sink, p, _ := proxied(t, 1, rabbitmq.Config{})
	p.HoldAcks.Store(1)
	o := expireHeld(t, sink, p, batch(0, 10, 5, "nowhere"))
	p.ReleaseAcks()
	deliver(t, sink, batch(0, 100, 5, "orders")) // confirmed later, on the same channel
	if n := o.lateConfirms(); n != 0 {
		t.Errorf("%d unroutable messages counted as delivered", n)
	}
}

// A broker that is slow gets every message once: one that is handed over again while
// a copy of it is in flight waits for the confirm of that copy.
func TestSink_SendsNothingTwiceToASlowBroker(t *testing.T) {
	t.Parallel()
	sink, p, admin := proxied(t, 1, rabbitmq.Config{})
	p.HoldAcks.Store(1)
	msgs := batch(0, 10, 20, "orders")
	expireHeld(t, sink, p, msgs)
	reread := *msgs[3] // the relay may have read the row again
	msgs[3] = &reread
	o := newOutcomes(t)
	sink.Publish(t.Context(), msgs, o.done)
	more := batch(0, 100, 5, "orders")
	sink.Publish(t.Context(), more, o.done)
	eventually(t, "25 messages are in the queue", func() bool {
		q, err := admin.QueueDeclarePassive("orders", true, false, false, false, nil)
		return err == nil && q.Messages >= 25
	})
	p.ReleaseAcks()
	o.await(25)
	if delivered, _, _ := o.kinds(); delivered != 25 {
		t.Errorf("%d of 25 delivered", delivered)
	}
	for i, d := range content(t, admin, "orders") {
		want := append(msgs, more...)
		if i >= len(want) || d.MessageId != want[i].MessageID {
			t.Fatalf("place %d has %s", i, d.MessageId)
		}
	}
}

// A row of another time with the same id is another message.
func TestSink_SendsAnotherRowWithTheIDOfOneInFlight(t *testing.T) {
	t.Parallel()
	sink, p, admin := proxied(t, 1, rabbitmq.Config{})
	p.HoldAcks.Store(1)
	msgs := batch(0, 10, 1, "orders")
	before := expireHeld(t, sink, p, msgs)
	other := batch(0, 10, 1, "orders")
	other[0].MessageID, other[0].CreatedAt = "another", msgs[0].CreatedAt
	o := newOutcomes(t)
	sink.Publish(t.Context(), other, o.done)
	eventually(t, "both are in the queue", func() bool {
		q, err := admin.QueueDeclarePassive("orders", true, false, false, false, nil)
		return err == nil && q.Messages == 2
	})
	p.ReleaseAcks()
	o.await(1)
	eventually(t, "both are confirmed", func() bool {
		delivered, _, _ := o.kinds()
		return delivered == 1 && before.lateConfirms() == 1
	})
}

// A channel that gets no confirms while others of its connection do is replaced, at
// once and alone. It is still listened to.
func TestSink_ReplacesTheOneChannelThatStalls(t *testing.T) {
	t.Parallel()
	for name, topic := range map[string]string{"same topic": "orders", "other topic": "others"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sink, p, admin := proxied(t, 4, rabbitmq.Config{ConfirmTimeout: 6 * time.Second})
			declareQueue(t, admin, "others", nil)
			p.HoldAcks.Store(1)
			stop := busy(t, sink, 1, 3, topic)
			msgs := batch(0, 10, 20, "orders")
			o := newOutcomes(t)
			sink.Publish(t.Context(), msgs, o.done)
			o.await(20)
			for _, m := range msgs {
				if err := o.of(m); !errors.Is(err, relay.ErrInterrupted) || !errors.Is(err, rabbitmq.ErrStalled) {
					t.Fatalf("outcome %v", err)
				}
			}
			if n := deliver(t, sink, msgs[:15]); n > 0 {
				t.Errorf("unavailable %d times on the new channel", n)
			}
			stop()
			p.ReleaseAcks()
			// Of what was delivered by now nothing more is said.
			eventually(t, "the last late confirm", func() bool { return o.of(msgs[19]) == nil })
			if n := o.lateConfirms(); n != 5 {
				t.Errorf("%d late confirms, want 5", n)
			}
			if n := p.Dials.Load(); n != 1 {
				t.Errorf("%d connections", n)
			}
		})
	}
}

// A late confirm on the old channel is the outcome of the copy on the new one as well.
func TestSink_TakesALateConfirmForTheCopyInFlight(t *testing.T) {
	t.Parallel()
	sink, p, _ := proxied(t, 2, rabbitmq.Config{ConfirmTimeout: 3 * time.Second})
	p.HoldAcks.Store(1)
	stop := busy(t, sink, 1, 1, "orders")
	msgs := batch(0, 10, 5, "orders")
	first := newOutcomes(t)
	sink.Publish(t.Context(), msgs, first.done)
	first.await(5)
	stop()
	p.DropAcks.Store(true) // of the copies
	second := newOutcomes(t)
	again := make([]*relay.Message, len(msgs))
	for i, m := range msgs {
		copied := *m // as the relay hands it over
		again[i] = &copied
	}
	sink.Publish(t.Context(), again, second.done)
	p.ReleaseAcks()
	second.await(5)
	if delivered, _, _ := second.kinds(); delivered != 5 || first.lateConfirms() > 0 {
		t.Errorf("%d of 5 delivered, %d of them twice", delivered, first.lateConfirms())
	}
}

// In a pipeline nothing overtakes what was on the channel that stalled: what was not
// sent fails with it, and what is yet to come of its term.
func TestSink_KeepsAPipelinesOrderOverAStall(t *testing.T) {
	t.Parallel()
	const window, all = 4, 12
	for name, first := range map[string]int{"in flight": window, "in flight and pending": 2 * window} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sink, p, admin := proxied(t, 2, rabbitmq.Config{Window: window, ConfirmTimeout: 3 * time.Second})
			p.HoldAcks.Store(1)
			stop := busy(t, sink, 1, 1, "orders")
			msgs := batch(0, 10, all, "orders")
			for _, m := range msgs {
				m.Term = 1
			}
			o := newOutcomes(t)
			sink.Publish(t.Context(), msgs[:first], o.done)
			o.await(first)
			sink.Publish(t.Context(), msgs[first:], o.done)
			o.await(all)
			for _, m := range msgs {
				if err := o.of(m); !errors.Is(err, relay.ErrInterrupted) {
					t.Errorf("message %d: %v", m.ID, err)
				}
			}
			for _, m := range msgs {
				m.Term = 2
			}
			deliver(t, sink, msgs)
			stop()
			mustArriveInOrder(t, content(t, admin, "orders"), 0, 10, all, window)
		})
	}
}

// mustArriveInOrder checks one lane: its messages arrive in order, the first copy of
// each, with so many repeats.
func mustArriveInOrder(t *testing.T, arrived []amqp.Delivery, lane, first, n, repeats int) {
	t.Helper()
	next := first
	for _, d := range arrived {
		var of, id int
		if _, err := fmt.Sscanf(d.MessageId, "%d-%d", &of, &id); err != nil {
			t.Fatal(err)
		}
		switch {
		case of != lane:
		case id == next:
			next++
		case id < next:
			repeats--
		default:
			t.Fatalf("%d arrives before %d", id, next)
		}
	}
	if next != first+n || repeats != 0 {
		t.Errorf("%d of %d arrived, %d repeats fewer than expected", next-first, n, repeats)
	}
}

// When the connection is lost, what a pipeline has not sent fails with what it had in
// flight. Sent on the next connection it would overtake that.
func TestSink_FailsTheWholePipelineWithItsChannel(t *testing.T) {
	t.Parallel()
	sink, p, admin := proxied(t, 1, rabbitmq.Config{Window: 4})
	p.HoldAcks.Store(1)
	msgs := batch(0, 10, 12, "orders")
	for _, m := range msgs {
		m.Term = 1
	}
	o := newOutcomes(t)
	sink.Publish(t.Context(), msgs, o.done)
	eventually(t, "4 are in the queue", func() bool {
		q, err := admin.QueueDeclarePassive("orders", true, false, false, false, nil)
		return err == nil && q.Messages == 4
	})
	p.HoldAcks.Store(0)
	p.Cut()
	o.await(12)
	if _, _, unavailable := o.kinds(); unavailable != 12 {
		t.Errorf("%d of 12 unavailable", unavailable)
	}
	for _, m := range msgs {
		m.Term = 2
	}
	deliver(t, sink, msgs)
	mustArriveInOrder(t, content(t, admin, "orders"), 0, 10, 12, 4)
}

// What takes long to send is not unanswered.
func TestSink_SendsALargeMessageOverASlowLink(t *testing.T) {
	t.Parallel()
	// Sending takes longer than ConfirmTimeout, what sockets buffer (5 MiB) does not.
	sink, p, admin := proxied(t, 2, rabbitmq.Config{ConfirmTimeout: 20 * time.Second})
	p.Rate.Store(3 << 19)
	large := batch(0, 10, 1, "orders")
	large[0].Payload = make([]byte, 40<<20)
	o := newOutcomes(t)
	sink.Publish(t.Context(), large, o.done)
	small := batch(1, 10, 20, "orders")
	sink.Publish(t.Context(), small, o.done)
	testserver.EventuallyMoving(t, "21 outcomes", func() bool { return o.count() == 21 }, o.count)
	if delivered, _, _ := o.kinds(); delivered != 21 {
		t.Errorf("%d of 21 delivered: %v", delivered, o.errs())
	}
	if n := len(content(t, admin, "orders")); n != 21 {
		t.Errorf("%d messages in the queue", n)
	}
}
