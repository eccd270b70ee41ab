package rabbitmq

import "testing"

// RabbitMQ applies the smaller one of argument and policy, and a limit before none. Version 3
// refuses a negative limit, so this needs no broker.
func TestQueue_DeliveryLimitIsTheEffectiveOne(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name             string
		argument, policy any
		version          string
		limit            float64
		limited          bool
	}{
		{"none on 3", nil, nil, "3.13.7", 0, false},
		{"the default of 4", nil, nil, "4.1.0", 20, true},
		{"unlimited by policy", nil, -1.0, "4.1.0", 0, false},
		{"unlimited by argument", -1.0, nil, "4.1.0", 0, false},
		{"the policy limits", -1.0, 5.0, "4.1.0", 5, true},
		{"the argument limits", 5.0, -1.0, "4.1.0", 5, true},
		{"the smaller policy", 7.0, 5.0, "4.1.0", 5, true},
		{"the smaller argument", 5.0, 7.0, "3.13.7", 5, true},
	} {
		if _, limited := (&queue{Type: "classic"}).deliveryLimit(c.version); limited {
			t.Error("classic queues have none")
		}
		q := queue{Type: "quorum", Arguments: map[string]any{}, Policy: map[string]any{}}
		if c.argument != nil {
			q.Arguments["x-delivery-limit"] = c.argument
		}
		if c.policy != nil {
			q.Policy.(map[string]any)["delivery-limit"] = c.policy
		}
		if limit, limited := q.deliveryLimit(c.version); limited != c.limited || limited && limit != c.limit {
			t.Errorf("%s: %v, %v", c.name, limit, limited)
		}
	}
}
