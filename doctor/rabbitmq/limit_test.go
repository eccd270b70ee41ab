package rabbitmq

import "testing"

// The limit that RabbitMQ 4 has by default counts; that of 3 does not exist.
func TestQueue_KnowsTheDefaultDeliveryLimit(t *testing.T) {
	t.Parallel()
	quorum := &queue{Type: "quorum", Policy: []any{}}
	if limit, ok := quorum.deliveryLimit("4.1.0"); !ok || limit != 20 {
		t.Errorf("%v, %v", limit, ok)
	}
	if _, ok := quorum.deliveryLimit("3.13.7"); ok {
		t.Error("RabbitMQ 3 has none")
	}
	if _, ok := (&queue{Type: "classic"}).deliveryLimit("4.1.0"); ok {
		t.Error("classic queues have none")
	}
	quorum.Policy = map[string]any{"delivery-limit": float64(-1)}
	if _, ok := quorum.deliveryLimit("4.1.0"); ok {
		t.Error("-1 is no limit")
	}
}
