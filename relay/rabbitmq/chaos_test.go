package rabbitmq_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

func TestSink_GivesEveryMessageOneOutcomeInChaos(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	p, proxied := testserver.ProxyAMQP(t, uri)
	sink, stop := startStoppable(t, queues(proxied), rabbitmq.Config{
		Window: 16, WriteBuffer: 4096,
		DialTimeout: time.Second, CallTimeout: time.Second, ConfirmTimeout: 300 * time.Millisecond,
	})
	o := newOutcomes(t)
	o.await(chaos(t, sink, p, o, stop))
	if delivered, refused, unavailable := o.kinds(); refused == 0 || unavailable == 0 || delivered == 0 {
		t.Errorf("delivered %d, refused %d, unavailable %d", delivered, refused, unavailable)
	} else {
		t.Logf("delivered %d, refused %d, unavailable %d, connections %d", delivered, refused, unavailable, p.Dials.Load())
	}
	arrived := map[string]bool{}
	for _, d := range content(t, admin, "orders") {
		arrived[d.MessageId] = true
	}
	for m, err := range o.all {
		if err == nil && !arrived[m.MessageID] {
			t.Errorf("%s has outcome delivered and is not there", m.MessageID)
		}
	}
}

// chaos publishes over several lanes while the proxy and the contexts misbehave, each time
// once something was delivered, and stops the sink in the middle of it.
func chaos(t *testing.T, sink *rabbitmq.Sink, p *testserver.AMQPProxy, o *outcomes, stop func()) (handed int) {
	t.Helper()
	const lanes = 6
	var group sync.WaitGroup
	var total atomic.Int64
	var over atomic.Bool
	for lane := range lanes {
		group.Go(func() {
			random := rand.New(rand.NewPCG(uint64(lane), 1))
			id := 1
			for !over.Load() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(200))*time.Millisecond)
				msgs := batch(lane, id, 1+random.IntN(20), "orders")
				for _, m := range msgs {
					if random.IntN(20) == 0 {
						m.Topic = "nowhere"
					}
				}
				id += len(msgs)
				total.Add(int64(len(msgs)))
				sink.Publish(ctx, msgs, o.done)
				testserver.Pause(t.Context(), time.Duration(random.IntN(20))*time.Millisecond)
				if random.IntN(4) == 0 {
					cancel()
				}
				t.Cleanup(cancel)
			}
		})
	}
	random := rand.New(rand.NewPCG(7, 7))
	before, _, _ := o.kinds()
	for range 12 {
		eventually(t, "a message is delivered", func() bool {
			delivered, _, _ := o.kinds()
			moved := delivered > before
			before = delivered
			return moved
		})
		testserver.Pause(t.Context(), time.Duration(random.IntN(150))*time.Millisecond)
		switch random.IntN(3) {
		case 0:
			p.Cut()
		case 1:
			p.DropAcks.Store(true)
			testserver.Pause(t.Context(), 40*time.Millisecond)
			p.DropAcks.Store(false)
		case 2:
			p.Frozen.Store(true)
			testserver.Pause(t.Context(), 40*time.Millisecond)
			p.Frozen.Store(false)
			p.Cut() // frames may have been lost in the middle
		}
	}
	stop()
	over.Store(true)
	group.Wait()
	return int(total.Load())
}

// Even with a whole lane in one pipeline and restarts from the first message
// without a confirm, what arrives first arrives in order, and all of it.
func TestSink_KeepsTheOrderOfALaneOverOutages(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	p, proxied := testserver.ProxyAMQP(t, uri)
	cfg := queues(proxied)
	// Back at once, when there are messages that were not sent before the outage.
	cfg.Connection.Reconnect = &wamqp.ReconnectConfig{
		BackoffInitialInterval: time.Millisecond, BackoffMaxInterval: time.Millisecond, BackoffMultiplier: 1,
	}
	sink, _ := startStoppable(t, cfg, rabbitmq.Config{
		Window: 20, WriteBuffer: 4096, CallTimeout: 200 * time.Millisecond, ConfirmTimeout: 100 * time.Millisecond,
	})
	const lanes, faults = 4, 40
	var over atomic.Bool
	var sent [lanes]int
	var group sync.WaitGroup
	for lane := range lanes {
		group.Go(func() { sent[lane] = pipeline(t, sink, lane, &over) })
	}
	random := rand.New(rand.NewPCG(3, 3))
	for range faults {
		testserver.Pause(t.Context(), time.Duration(20+random.IntN(60))*time.Millisecond)
		if random.IntN(2) == 0 {
			p.Cut()
			continue
		}
		before := p.Dropped.Load()
		p.DropAcks.Store(true)
		eventually(t, "a confirm is dropped", func() bool { return p.Dropped.Load() > before })
		p.DropAcks.Store(false)
	}
	over.Store(true)
	group.Wait()

	var latest [lanes]int
	repeats := 0
	for _, d := range content(t, admin, "orders") {
		var lane, id int
		if _, err := fmt.Sscanf(d.MessageId, "%d-%d", &lane, &id); err != nil {
			t.Fatal(err)
		}
		switch {
		case id <= latest[lane]:
			repeats++
		case id == latest[lane]+1:
			latest[lane] = id
		default:
			t.Fatalf("lane %d: %d arrived before %d", lane, id, latest[lane]+1)
		}
	}
	if latest != sent {
		t.Errorf("arrived up to %v, sent up to %v", latest, sent)
	}
	if repeats == 0 {
		t.Error("no repeats: no outage came at a time that matters")
	}
	t.Logf("%v delivered, %d repeats, %d connections", latest, repeats, p.Dials.Load())
}

// pipeline delivers messages of a lane in small batches that do not wait for one
// another, until it is over, and returns the last id.
func pipeline(t *testing.T, sink *rabbitmq.Sink, lane int, over *atomic.Bool) (last int) {
	t.Helper()
	random := rand.New(rand.NewPCG(uint64(lane), 2))
	var open []*relay.Message
	for begin, term := time.Now(), uint64(1); len(open) > 0 || !over.Load(); term++ {
		if time.Since(begin) > 2*maxWait {
			t.Errorf("%d messages not delivered in time", len(open))
			return last
		}
		if missing := 100 - len(open); !over.Load() {
			open = append(open, batch(lane, last+1, missing, "orders")...)
			last += missing
		}
		for _, m := range open {
			m.Term = term
		}
		o := newOutcomes(t)
		sent := 0
		var cancels []context.CancelFunc
		for sent < len(open) && !o.failed() {
			n := min(1+random.IntN(10), len(open)-sent)
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(20+random.IntN(200))*time.Millisecond)
			cancels = append(cancels, cancel)
			// A relay has other lanes between its look at what has failed and this.
			testserver.Pause(ctx, time.Duration(random.IntN(2000))*time.Microsecond)
			sink.Publish(ctx, open[sent:sent+n], o.done)
			sent += n
		}
		o.await(sent)
		for _, cancel := range cancels {
			cancel()
		}
		confirmed := 0
		for confirmed < sent && o.of(open[confirmed]) == nil {
			confirmed++
		}
		open = open[confirmed:]
	}
	return last
}
