package rabbitmq

import (
	"slices"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
)

// What was behind its key goes before what came after it: rows of acknowledgements end
// where it is.
func TestSubscription_HandsOutTheOldestFirst(t *testing.T) {
	s := subscription{lanes: make(map[string]*lane), away: make(map[*parcel]struct{})}
	keys := []string{"a", "a", "b", "a", "b", "c", "d"}
	for i, key := range keys {
		s.lineUp(&parcel{key: key, delivery: amqp.Delivery{DeliveryTag: uint64(i + 1)}})
	}
	var order []uint64
	for len(s.ready) > 0 {
		p := s.ready[0]
		s.handOut()
		order = append(order, p.delivery.DeliveryTag)
		if len(order) == 1 || len(s.ready) == 0 {
			for p := range s.away { // all of them have finished
				delete(s.away, p)
				s.next(p)
			}
		}
	}
	if wanted := []uint64{1, 2, 3, 6, 7, 4, 5}; !slices.Equal(order, wanted) {
		t.Fatalf("handed out %v, wanted %v", order, wanted)
	}
}
