package rabbitmq_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

func TestSink_GivesEveryMessageOneOutcomeInChaos(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	p, proxied := newProxy(t, uri, listen(t))
	sink, stop := startStoppable(t, queues(proxied), rabbitmq.Config{
		Window: 16, WriteBuffer: 4096,
		DialTimeout: time.Second, CallTimeout: 200 * time.Millisecond, ConfirmTimeout: 100 * time.Millisecond,
	})
	o := newOutcomes(t)
	o.await(chaos(t, sink, p, o, stop))
	if delivered, refused, unavailable := o.kinds(); refused == 0 || unavailable == 0 || delivered == 0 {
		t.Errorf("delivered %d, refused %d, unavailable %d", delivered, refused, unavailable)
	} else {
		t.Logf("delivered %d, refused %d, unavailable %d, connections %d", delivered, refused, unavailable, p.dials.Load())
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

// chaos publishes over several lanes while the proxy and the contexts misbehave,
// and stops the sink in the middle of it.
func chaos(t *testing.T, sink *rabbitmq.Sink, p *proxy, o *outcomes, stop func()) (handed int) {
	t.Helper()
	const lanes, rounds = 6, 200
	var group sync.WaitGroup
	var total atomic.Int64
	for lane := range lanes {
		group.Go(func() {
			random := rand.New(rand.NewPCG(uint64(lane), 1))
			id := 1
			for range rounds {
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
				time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
				if random.IntN(4) == 0 {
					cancel()
				}
				t.Cleanup(cancel)
			}
		})
	}
	random := rand.New(rand.NewPCG(7, 7))
	for range 12 {
		time.Sleep(time.Duration(50+random.IntN(150)) * time.Millisecond)
		switch random.IntN(3) {
		case 0:
			p.cut()
		case 1:
			p.dropAcks.Store(true)
			time.Sleep(40 * time.Millisecond)
			p.dropAcks.Store(false)
		case 2:
			p.frozen.Store(true)
			time.Sleep(40 * time.Millisecond)
			p.frozen.Store(false)
			p.cut() // frames may have been lost in the middle
		}
	}
	stop()
	group.Wait()
	return int(total.Load())
}
