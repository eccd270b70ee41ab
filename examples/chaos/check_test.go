package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/examples/shop"
)

func TestCheck_PassesAFaultlessHistory(t *testing.T) {
	v := check(faultless(t))
	if !v.ok() {
		t.Fatalf("not OK: %+v", v)
	}
	const want = "demo: orders=12 messages=12 effects=12 lost=0 duplicate_effects=0 reordered=0 wire_duplicates=1 seconds=1.5"
	if line := v.line(1500 * time.Millisecond); line != want {
		t.Fatalf("last line\n%s\nwant\n%s", line, want)
	}
}

// A zero means something only if the check can count to one.
func TestCheck_SeesEveryPlantedFault(t *testing.T) {
	for name, fault := range map[string]struct {
		plant func(t *testing.T, h *history)
		seen  func(result) bool
	}{
		"message lost": {
			func(_ *testing.T, h *history) { h.wire = slices.Delete(h.wire, 4, 5) },
			func(v result) bool { return v.lost == 1 },
		},
		"effect lost": {
			func(_ *testing.T, h *history) { h.tables.ledger = slices.Delete(h.tables.ledger, 4, 5) },
			func(v result) bool { return v.lost == 1 },
		},
		"order lost": {
			func(_ *testing.T, h *history) { h.tables.orders = h.tables.orders[1:] },
			func(v result) bool { return has(v, "12 orders were sent, 11 are in the table") },
		},
		"effect twice": {
			func(_ *testing.T, h *history) { h.tables.ledger = append(h.tables.ledger, h.tables.ledger[4]) },
			func(v result) bool { return v.duplicateEffects == 1 },
		},
		"effect twice, by two messages": {
			func(_ *testing.T, h *history) {
				twin := h.wire[4]
				twin.messageID = "twin"
				h.wire = append(h.wire, twin)
				effect := h.tables.ledger[4]
				effect.messageID = "twin"
				h.tables.ledger = append(h.tables.ledger, effect)
			},
			func(v result) bool { return v.duplicateEffects == 1 && v.messages == 13 },
		},
		"wire reordered": {
			func(_ *testing.T, h *history) { h.wire[3], h.wire[6] = h.wire[6], h.wire[3] },
			func(v result) bool { return v.reordered == 1 },
		},
		"effects reordered": {
			func(_ *testing.T, h *history) {
				l := h.tables.ledger
				l[3], l[6] = l[6], l[3]
			},
			func(v result) bool { return v.reordered == 1 },
		},
		"ghost on the wire": {
			func(t *testing.T, h *history) {
				h.wire = append(h.wire, newDelivery(t, "ghost", shop.Placed{Order: order("ghost", "customer-0"), Number: 5}))
			},
			func(v result) bool { return has(v, "never sent") },
		},
		"ghost in the ledger": {
			func(_ *testing.T, h *history) {
				h.tables.ledger = append(h.tables.ledger, entry{messageID: "ghost", orderID: "ghost"})
			},
			func(v result) bool { return has(v, "never sent") },
		},
		"ghost in the orders": {
			func(_ *testing.T, h *history) { h.tables.orders[0] = "ghost" },
			func(v result) bool { return has(v, "never sent") },
		},
		"payload changed": {
			func(_ *testing.T, h *history) {
				h.wire[2].payload = []byte(strings.Replace(string(h.wire[2].payload), "ö", "o", 1))
			},
			func(v result) bool { return has(v, "as it was sent") },
		},
		"payload unreadable": {
			func(_ *testing.T, h *history) { h.wire[2].payload = []byte("{") },
			func(v result) bool { return has(v, "cannot be read") },
		},
		"number given twice": {
			func(t *testing.T, h *history) {
				h.wire[5] = newDelivery(t, h.wire[5].messageID, shop.Placed{Order: h.orders[5], Number: 1})
			},
			func(v result) bool { return has(v, "its message says 1") },
		},
		"ledger of another number": {
			func(_ *testing.T, h *history) { h.tables.ledger[5].number = 9 },
			func(v result) bool { return has(v, "as number 9") },
		},
		"half an effect": {
			func(_ *testing.T, h *history) { h.tables.stock["tea"]++ },
			func(v result) bool { return has(v, "tea is 77 instead of 76") },
		},
		"unconfirmed and not sent again": {
			func(_ *testing.T, h *history) { h.unconfirmed = append(h.unconfirmed, h.wire[1].messageID) },
			func(v result) bool { return has(v, "not sent again") },
		},
		"copy taken for a repeat": {
			func(_ *testing.T, h *history) { h.copies = map[string]int{h.unconfirmed[0]: 1} },
			func(v result) bool { return has(v, "not sent again") },
		},
		"nothing was put to the test": {
			func(_ *testing.T, h *history) { h.wire, h.unconfirmed = h.wire[:len(h.wire)-1], nil },
			func(v result) bool { return v.wireDuplicates == 0 },
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := faultless(t)
			fault.plant(t, &h)
			v := check(h)
			if v.ok() || !fault.seen(v) {
				t.Fatalf("not seen: %+v", v)
			}
		})
	}
}

// faultless is a history of 12 orders of 3 customers in which the last message
// was sent twice, because a relay was killed before its confirmation.
func faultless(t *testing.T) history {
	t.Helper()
	h := history{
		products: []shop.Product{{SKU: "tea", Stock: 100}},
		tables:   tables{stock: map[string]int64{"tea": 100 - 12*2}},
	}
	for n := range 12 {
		o := order(fmt.Sprintf("order-%02d", n), fmt.Sprintf("customer-%d", n%3))
		number, id := int64(n/3+1), fmt.Sprintf("message-%02d", n)
		h.orders = append(h.orders, o)
		h.tables.orders = append(h.tables.orders, o.ID)
		h.wire = append(h.wire, newDelivery(t, id, shop.Placed{Order: o, Number: number}))
		h.tables.ledger = append(h.tables.ledger, entry{messageID: id, orderID: o.ID, customer: o.Customer, number: number})
	}
	last := h.wire[len(h.wire)-1]
	h.wire = append(h.wire, last)
	h.unconfirmed = []string{last.messageID}
	return h
}

func order(id, customer string) shop.Order {
	return shop.Order{
		ID:       id,
		Customer: customer,
		PlacedAt: time.Date(2026, time.November, 21, 12, 0, 0, 0, time.UTC),
		Items:    []shop.Item{{SKU: "tea", Quantity: 2, PriceCents: 890}},
		Note:     "schön heiß 🍵",
	}
}

func newDelivery(t *testing.T, id string, placed shop.Placed) delivery {
	t.Helper()
	payload, err := json.Marshal(placed)
	if err != nil {
		t.Fatal(err)
	}
	return delivery{messageID: id, payload: payload}
}

func has(v result, text string) bool {
	return slices.ContainsFunc(v.problems, func(p string) bool { return strings.Contains(p, text) })
}
