package rabbitmq

import (
	"testing"
	"testing/synctest"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
)

// nacks counts deliveries that were given back.
type nacks int

func (*nacks) Ack(uint64, bool) error          { return nil }
func (n *nacks) Nack(uint64, bool, bool) error { *n++; return nil }
func (*nacks) Reject(uint64, bool) error       { return nil }

// One that another consumer has taken is not awaited for longer than what came behind it
// may stay, whatever the time-outs.
func TestSubscription_AwaitsNobodyForEver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		settings, err := resolve(wamqp.NewDurableQueueConfig("amqp://guest:guest@localhost/"), Config{AckTimeout: 5 * time.Second, CallTimeout: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		settings.Key = func(*message.Message) string { return "k" }
		s := newSubscription(&Subscriber{settings: settings}, "orders", "orders", "")
		o := &session{next: 1, early: map[uint64]amqp.Delivery{}}
		var given, seen nacks
		tag := uint64(0)
		deliver := func(id string, redelivered bool) {
			tag++
			s.accept(o, amqp.Delivery{Acknowledger: &given, DeliveryTag: tag, MessageId: id, Redelivered: redelivered})
		}
		deliver("a", false)
		deliver("b", false)
		s.delay(s.lanes["key k"].head, time.Now().Add(time.Hour)) // nacked
		s.ready = nil
		for now, looks := time.Now(), 0; s.lanes["key k"].head == nil || s.lanes["key k"].head.id != "b"; looks++ { // as consume does
			if time.Since(now) > 10*time.Minute {
				t.Fatalf("b was given back %d times and never went on", given)
			}
			time.Sleep(checkInterval)
			s.awaitNoLonger(time.Now())
			if looks%10 == 0 {
				s.giveBack(time.Now())
			}
			if given > seen {
				seen = given
				deliver("b", true) // at once; another consumer has a
			}
		}
	})
}
