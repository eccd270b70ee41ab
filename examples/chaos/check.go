package main

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/oncemill/oncemill/examples/shop"
)

// delivery is one message on the wire.
type delivery struct {
	messageID string
	payload   []byte
}

// history is the input of check.
type history struct {
	// orders are all orders of the customers, each answered with success, in the order of
	// sending for each customer.
	orders   []shop.Order
	products []shop.Product // the stock at the start
	tables   tables
	wire     []delivery     // all messages of the broker, in order
	copies   map[string]int // by message id: how often the parent sent a copy

	// unconfirmed are the ids of published messages whose confirm a killed relay never saw.
	unconfirmed []string
}

// result is what a check found.
type result struct {
	orders           int // in the table of orders
	messages         int // different messages on the wire
	effects          int // lines in the ledger
	lost             int // orders without a message or without an effect
	duplicateEffects int // lines in the ledger beyond the first of an order
	reordered        int // first messages and first effects behind a later one of their customer
	wireDuplicates   int // messages on the wire beyond the first of their id

	problems []string // faults that none of the numbers shows
}

// ok reports whether every promise held and was tested: a run without repeated messages
// proves nothing.
func (v result) ok() bool {
	return v.lost == 0 && v.duplicateEffects == 0 && v.reordered == 0 && len(v.problems) == 0 &&
		v.orders == v.messages && v.orders == v.effects && v.wireDuplicates >= 1
}

// line is the last line of a run.
func (v result) line(took time.Duration) string {
	return fmt.Sprintf("demo: orders=%d messages=%d effects=%d lost=%d duplicate_effects=%d reordered=%d wire_duplicates=%d seconds=%.1f",
		v.orders, v.messages, v.effects, v.lost, v.duplicateEffects, v.reordered, v.wireDuplicates, took.Seconds())
}

// check compares a history with the promises.
func check(h history) result {
	c := checker{history: h, position: map[string]position{}, sent: map[string]shop.Order{}}
	customers := map[string]int64{}
	for _, order := range h.orders {
		customers[order.Customer]++
		c.position[order.ID] = position{customer: order.Customer, number: customers[order.Customer]}
		c.sent[order.ID] = order
	}
	c.checkOrders()
	c.checkStock()
	onWire, booked := c.checkWire(), c.checkLedger()
	for _, order := range h.orders {
		if !onWire[order.ID] || !booked[order.ID] {
			c.found.lost++
		}
	}
	if v := c.found; v.orders != v.messages || v.orders != v.effects {
		c.problem("counts disagree: %d orders, %d messages, %d effects", v.orders, v.messages, v.effects)
	}
	return c.found
}

type checker struct {
	history
	found    result
	position map[string]position   // by order id
	sent     map[string]shop.Order // by order id
}

// position is where an order is among the orders of its customer, from 1.
type position struct {
	customer string
	number   int64
}

// checkOrders checks the table of orders.
func (c *checker) checkOrders() {
	c.found.orders = len(c.tables.orders)
	if c.found.orders != len(c.orders) {
		c.problem("%d orders were sent, %d are in the table", len(c.orders), c.found.orders)
	}
	for _, id := range c.tables.orders {
		if _, known := c.position[id]; !known {
			c.problem("order %s is in the table and was never sent", id)
		}
	}
}

// checkWire checks the messages and returns the orders that have one.
func (c *checker) checkWire() map[string]bool {
	seen := map[string]int{} // by message id
	onWire := map[string]bool{}
	order := sequence{}
	for _, d := range c.wire {
		seen[d.messageID]++
		if seen[d.messageID] > 1 {
			c.found.wireDuplicates++
		} else {
			c.found.messages++
		}
		var placed shop.Placed
		if err := json.Unmarshal(d.payload, &placed); err != nil {
			c.problem("message %s cannot be read: %v", d.messageID, err)
			continue
		}
		at, known := c.position[placed.Order.ID]
		switch {
		case !known:
			c.problem("message %s is about order %s, which was never sent", d.messageID, placed.Order.ID)
			continue
		case !reflect.DeepEqual(placed.Order, c.sent[placed.Order.ID]):
			c.problem("message %s does not carry order %s as it was sent", d.messageID, placed.Order.ID)
		case placed.Number != at.number:
			c.problem("order %s is number %d of its customer, its message says %d", placed.Order.ID, at.number, placed.Number)
		}
		if !onWire[placed.Order.ID] {
			onWire[placed.Order.ID] = true
			c.found.reordered += order.add(at)
		}
	}
	for _, id := range c.unconfirmed {
		if seen[id] < 2+c.copies[id] {
			c.problem("message %s was unconfirmed when its relay was killed, and was not sent again", id)
		}
	}
	return onWire
}

// checkLedger checks the effects and returns the orders that have one.
func (c *checker) checkLedger() map[string]bool {
	booked := map[string]bool{}
	order := sequence{}
	c.found.effects = len(c.tables.ledger)
	for _, e := range c.tables.ledger {
		at, known := c.position[e.orderID]
		switch {
		case !known:
			c.problem("the ledger has order %s, which was never sent", e.orderID)
			continue
		case e.customer != at.customer || e.number != at.number:
			c.problem("the ledger books order %s as number %d of %s; it is number %d of %s",
				e.orderID, e.number, e.customer, at.number, at.customer)
		}
		if booked[e.orderID] {
			c.found.duplicateEffects++
			continue
		}
		booked[e.orderID] = true
		c.found.reordered += order.add(at)
	}
	return booked
}

// checkStock checks that each order was taken from stock once. It does not use the ledger, so
// it finds half an effect.
func (c *checker) checkStock() {
	want := map[string]int64{}
	for _, p := range c.products {
		want[p.SKU] = p.Stock
	}
	for _, order := range c.orders {
		for _, item := range order.Items {
			want[item.SKU] -= item.Quantity
		}
	}
	var wrong []string
	for sku, quantity := range want {
		if got := c.tables.stock[sku]; got != quantity {
			wrong = append(wrong, fmt.Sprintf("%s is %d instead of %d", sku, got, quantity))
		}
	}
	if len(wrong) > 0 {
		c.problem("the stock of %d products is wrong: %s", len(wrong), slices.Min(wrong))
	}
}

// sequence is the highest position seen of each customer.
type sequence map[string]int64

// add returns 1 if a later position of the customer was seen before.
func (s sequence) add(at position) int {
	if at.number < s[at.customer] {
		return 1
	}
	s[at.customer] = at.number
	return 0
}

func (c *checker) problem(format string, args ...any) {
	c.found.problems = append(c.found.problems, fmt.Sprintf(format, args...))
}
