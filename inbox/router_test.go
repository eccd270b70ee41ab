package inbox_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/oncemill/oncemill/inbox"
)

// The stock router with a subscriber that delivers everything twice, and again
// whatever was not acknowledged.
func TestInbox_InAWatermillRouter(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		pubsub := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
		router := message.NewDefaultRouter(watermill.NopLogger{})
		var mu sync.Mutex
		attempts := map[string]int{}
		router.AddHandler("reserve", "orders", pubsub, "reservations", refusingPublisher{t}, func(msg *message.Message) ([]*message.Message, error) {
			mu.Lock()
			attempts[msg.UUID]++
			attempt := attempts[msg.UUID]
			mu.Unlock()
			if err := addEffect(msg); err != nil {
				return nil, err
			}
			if attempt == 1 {
				panic("the first attempt of each fails")
			}
			if attempt == 2 {
				return nil, errors.New("and the second")
			}
			return []*message.Message{message.NewMessage("reserved-"+msg.UUID, nil)}, nil
		}).AddMiddleware(in.Middleware)
		router.AddConsumerHandler("count", "orders", pubsub, func(msg *message.Message) error {
			_, err := handlerTx(msg.Context())
			return err
		}).AddMiddleware(p.inbox(t, func(cfg *inbox.Config) { cfg.Consumer = "count" }).Middleware)
		ended := make(chan error)
		go func() { ended <- router.Run(t.Context()) }()
		<-router.Running()
		const orders = 10
		for i := range orders {
			for range 2 {
				if err := pubsub.Publish("orders", message.NewMessage(fmt.Sprintf("order-%d", i), nil)); err != nil {
					t.Error(err)
				}
			}
		}
		if err := errors.Join(router.Close(), <-ended, pubsub.Close()); err != nil {
			t.Error(err)
		}
		p.expect(t, orders, 2*orders, orders)
		for id, n := range attempts {
			if n != 3 {
				t.Errorf("%s was tried %d times", id, n)
			}
		}
		if n := p.count(t, `select count(*) from {{outbox}} where topic = 'reservations'`); n != orders {
			t.Errorf("%d messages are for the topic of the handler", n)
		}
	})
}
