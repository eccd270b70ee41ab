package demo

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

	"github.com/oncemill/oncemill/examples/shop"
)

// Delivery is one message as it stands on the wire.
type Delivery struct {
	MessageID string
	Payload   []byte
}

// Entry is one line of the ledger.
type Entry struct {
	MessageID string
	OrderID   string
	Customer  string
	Number    int64
}

// Tables is what the databases hold in the end.
type Tables struct {
	Orders []string         // ids of the orders taken, in any order
	Ledger []Entry          // in the order of booking
	Stock  map[string]int64 // what is left, by SKU
}

// History is everything that Check judges by.
type History struct {
	// Orders are all that the client sent, each answered with success. The
	// orders of one customer stand in the order in which they were sent.
	Orders []shop.Order

	// Products are the stock at the start.
	Products []shop.Product

	Tables Tables

	// Wire is the broker's whole record, in its order.
	Wire []Delivery

	// Copies counts, by message id, what the parent sent a second time.
	Copies map[string]int

	// Unconfirmed are the ids of messages that the broker had and whose
	// confirmation a killed relay never saw.
	Unconfirmed []string
}

// Check compares what was promised with what is there.
func Check(h History) Verdict {
	c := checker{place: map[string]place{}, orders: map[string]shop.Order{}}
	customers := map[string]int64{}
	for _, order := range h.Orders {
		customers[order.Customer]++
		c.place[order.ID] = place{customer: order.Customer, number: customers[order.Customer]}
		c.orders[order.ID] = order
	}
	c.taken(h)
	sent := c.wire(h)
	booked := c.ledger(h)
	c.stock(h)
	for _, order := range h.Orders {
		if !sent[order.ID] || !booked[order.ID] {
			c.Lost++
		}
	}
	if c.Orders != c.Messages || c.Orders != c.Effects {
		c.problem("counts disagree: %d orders, %d messages, %d effects", c.Orders, c.Messages, c.Effects)
	}
	return c.Verdict
}

type checker struct {
	Verdict
	place  map[string]place // by order id: where the client put it
	orders map[string]shop.Order
}

// place is an order's place among the orders of its customer, from 1.
type place struct {
	customer string
	number   int64
}

// taken checks the table of orders.
func (c *checker) taken(h History) {
	c.Orders = len(h.Tables.Orders)
	if c.Orders != len(h.Orders) {
		c.problem("%d orders were sent, %d are in the table", len(h.Orders), c.Orders)
	}
	for _, id := range h.Tables.Orders {
		if _, known := c.place[id]; !known {
			c.problem("order %s is in the table and was never sent", id)
		}
	}
}

// wire checks the broker's record and returns which orders are on it.
func (c *checker) wire(h History) map[string]bool {
	seen := map[string]int{} // by message id
	sent := map[string]bool{}
	var order sequence
	for _, d := range h.Wire {
		seen[d.MessageID]++
		if seen[d.MessageID] > 1 {
			c.WireDuplicates++
		} else {
			c.Messages++
		}
		var placed shop.Placed
		if err := json.Unmarshal(d.Payload, &placed); err != nil {
			c.problem("message %s cannot be read: %v", d.MessageID, err)
			continue
		}
		at, known := c.place[placed.Order.ID]
		switch {
		case !known:
			c.problem("message %s is about order %s, which was never sent", d.MessageID, placed.Order.ID)
			continue
		case !reflect.DeepEqual(placed.Order, c.orders[placed.Order.ID]):
			c.problem("message %s does not carry order %s as it was sent", d.MessageID, placed.Order.ID)
		case placed.Number != at.number:
			c.problem("order %s is number %d of its customer, its message says %d", placed.Order.ID, at.number, placed.Number)
		}
		if !sent[placed.Order.ID] {
			sent[placed.Order.ID] = true
			c.Reordered += order.add(at)
		}
	}
	for _, id := range h.Unconfirmed {
		if seen[id] < 2+h.Copies[id] {
			c.problem("message %s was unconfirmed when its relay was killed, and was not sent again", id)
		}
	}
	return sent
}

// ledger checks the effects and returns which orders had theirs.
func (c *checker) ledger(h History) map[string]bool {
	booked := map[string]bool{}
	var order sequence
	c.Effects = len(h.Tables.Ledger)
	for _, e := range h.Tables.Ledger {
		at, known := c.place[e.OrderID]
		switch {
		case !known:
			c.problem("the ledger has order %s, which was never sent", e.OrderID)
			continue
		case e.Customer != at.customer || e.Number != at.number:
			c.problem("the ledger books order %s as number %d of %s; it is number %d of %s",
				e.OrderID, e.Number, e.Customer, at.number, at.customer)
		}
		if booked[e.OrderID] {
			c.DuplicateEffects++
			continue
		}
		booked[e.OrderID] = true
		c.Reordered += order.add(at)
	}
	return booked
}

// stock checks that each order was taken from stock once. It needs no ledger, so
// it sees an effect that happened half.
func (c *checker) stock(h History) {
	want := map[string]int64{}
	for _, p := range h.Products {
		want[p.SKU] = p.Stock
	}
	for _, order := range h.Orders {
		for _, item := range order.Items {
			want[item.SKU] -= item.Quantity
		}
	}
	var wrong []string
	for sku, quantity := range want {
		if got := h.Tables.Stock[sku]; got != quantity {
			wrong = append(wrong, fmt.Sprintf("%s is %d instead of %d", sku, got, quantity))
		}
	}
	if len(wrong) > 0 {
		c.problem("the stock of %d products is wrong: %s", len(wrong), slices.Min(wrong))
	}
}

// sequence remembers how far each customer has come.
type sequence struct{ last map[string]int64 }

// add returns 1 if something that comes later with the same customer came first.
func (s *sequence) add(at place) int {
	if s.last == nil {
		s.last = map[string]int64{}
	}
	if at.number < s.last[at.customer] {
		return 1
	}
	s.last[at.customer] = at.number
	return 0
}

func (c *checker) problem(format string, args ...any) {
	c.Problems = append(c.Problems, fmt.Sprintf(format, args...))
}
