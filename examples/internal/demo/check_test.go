package demo_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/examples/internal/demo"
	"github.com/oncemill/oncemill/examples/shop"
)

func TestCheck_PassesAFaultlessHistory(t *testing.T) {
	verdict := demo.Check(faultless(t))
	if !verdict.OK() {
		t.Fatalf("not OK: %+v", verdict)
	}
	const want = "demo: orders=12 messages=12 effects=12 lost=0 duplicate_effects=0 reordered=0 wire_duplicates=1 seconds=1.5"
	if line := verdict.Line(1500 * time.Millisecond); line != want {
		t.Fatalf("last line\n%s\nwant\n%s", line, want)
	}
}

// A zero means something only if the check can count to one.
func TestCheck_SeesEveryPlantedFault(t *testing.T) {
	for name, fault := range map[string]struct {
		plant func(t *testing.T, h *demo.History)
		seen  func(demo.Verdict) bool
	}{
		"message lost": {
			func(_ *testing.T, h *demo.History) { h.Wire = slices.Delete(h.Wire, 4, 5) },
			func(v demo.Verdict) bool { return v.Lost == 1 },
		},
		"effect lost": {
			func(_ *testing.T, h *demo.History) { h.Tables.Ledger = slices.Delete(h.Tables.Ledger, 4, 5) },
			func(v demo.Verdict) bool { return v.Lost == 1 },
		},
		"order lost": {
			func(_ *testing.T, h *demo.History) { h.Tables.Orders = h.Tables.Orders[1:] },
			func(v demo.Verdict) bool { return has(v, "12 orders were sent, 11 are in the table") },
		},
		"effect twice": {
			func(_ *testing.T, h *demo.History) { h.Tables.Ledger = append(h.Tables.Ledger, h.Tables.Ledger[4]) },
			func(v demo.Verdict) bool { return v.DuplicateEffects == 1 },
		},
		"effect twice, by two messages": {
			func(_ *testing.T, h *demo.History) {
				twin := h.Wire[4]
				twin.MessageID = "twin"
				h.Wire = append(h.Wire, twin)
				effect := h.Tables.Ledger[4]
				effect.MessageID = "twin"
				h.Tables.Ledger = append(h.Tables.Ledger, effect)
			},
			func(v demo.Verdict) bool { return v.DuplicateEffects == 1 && v.Messages == 13 },
		},
		"wire reordered": {
			func(_ *testing.T, h *demo.History) { h.Wire[3], h.Wire[6] = h.Wire[6], h.Wire[3] },
			func(v demo.Verdict) bool { return v.Reordered == 1 },
		},
		"effects reordered": {
			func(_ *testing.T, h *demo.History) {
				l := h.Tables.Ledger
				l[3], l[6] = l[6], l[3]
			},
			func(v demo.Verdict) bool { return v.Reordered == 1 },
		},
		"ghost on the wire": {
			func(t *testing.T, h *demo.History) {
				h.Wire = append(h.Wire, delivery(t, "ghost", shop.Placed{Order: order("ghost", "customer-0"), Number: 5}))
			},
			func(v demo.Verdict) bool { return has(v, "never sent") },
		},
		"ghost in the ledger": {
			func(_ *testing.T, h *demo.History) {
				h.Tables.Ledger = append(h.Tables.Ledger, demo.Entry{MessageID: "ghost", OrderID: "ghost"})
			},
			func(v demo.Verdict) bool { return has(v, "never sent") },
		},
		"ghost in the orders": {
			func(_ *testing.T, h *demo.History) { h.Tables.Orders[0] = "ghost" },
			func(v demo.Verdict) bool { return has(v, "never sent") },
		},
		"payload changed": {
			func(_ *testing.T, h *demo.History) {
				h.Wire[2].Payload = []byte(strings.Replace(string(h.Wire[2].Payload), "ö", "o", 1))
			},
			func(v demo.Verdict) bool { return has(v, "as it was sent") },
		},
		"payload unreadable": {
			func(_ *testing.T, h *demo.History) { h.Wire[2].Payload = []byte("{") },
			func(v demo.Verdict) bool { return has(v, "cannot be read") },
		},
		"number given twice": {
			func(t *testing.T, h *demo.History) {
				h.Wire[5] = delivery(t, h.Wire[5].MessageID, shop.Placed{Order: h.Orders[5], Number: 1})
			},
			func(v demo.Verdict) bool { return has(v, "its message says 1") },
		},
		"ledger of another number": {
			func(_ *testing.T, h *demo.History) { h.Tables.Ledger[5].Number = 9 },
			func(v demo.Verdict) bool { return has(v, "as number 9") },
		},
		"half an effect": {
			func(_ *testing.T, h *demo.History) { h.Tables.Stock["tea"]++ },
			func(v demo.Verdict) bool { return has(v, "tea is 77 instead of 76") },
		},
		"unconfirmed and not sent again": {
			func(_ *testing.T, h *demo.History) { h.Unconfirmed = append(h.Unconfirmed, h.Wire[1].MessageID) },
			func(v demo.Verdict) bool { return has(v, "not sent again") },
		},
		"copy taken for a repeat": {
			func(_ *testing.T, h *demo.History) { h.Copies = map[string]int{h.Unconfirmed[0]: 1} },
			func(v demo.Verdict) bool { return has(v, "not sent again") },
		},
		"nothing was put to the test": {
			func(_ *testing.T, h *demo.History) { h.Wire, h.Unconfirmed = h.Wire[:len(h.Wire)-1], nil },
			func(v demo.Verdict) bool { return v.WireDuplicates == 0 },
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := faultless(t)
			fault.plant(t, &h)
			verdict := demo.Check(h)
			if verdict.OK() || !fault.seen(verdict) {
				t.Fatalf("not seen: %+v", verdict)
			}
		})
	}
}

// faultless is a history of 12 orders of 3 customers in which the last message
// was sent twice, because a relay was killed before its confirmation.
func faultless(t *testing.T) demo.History {
	t.Helper()
	h := demo.History{
		Products: []shop.Product{{SKU: "tea", Stock: 100}},
		Tables:   demo.Tables{Stock: map[string]int64{"tea": 100 - 12*2}},
	}
	for n := range 12 {
		o := order(fmt.Sprintf("order-%02d", n), fmt.Sprintf("customer-%d", n%3))
		number, id := int64(n/3+1), fmt.Sprintf("message-%02d", n)
		h.Orders = append(h.Orders, o)
		h.Tables.Orders = append(h.Tables.Orders, o.ID)
		h.Wire = append(h.Wire, delivery(t, id, shop.Placed{Order: o, Number: number}))
		h.Tables.Ledger = append(h.Tables.Ledger, demo.Entry{MessageID: id, OrderID: o.ID, Customer: o.Customer, Number: number})
	}
	last := h.Wire[len(h.Wire)-1]
	h.Wire = append(h.Wire, last)
	h.Unconfirmed = []string{last.MessageID}
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

func delivery(t *testing.T, id string, placed shop.Placed) demo.Delivery {
	t.Helper()
	payload, err := json.Marshal(placed)
	if err != nil {
		t.Fatal(err)
	}
	return demo.Delivery{MessageID: id, Payload: payload}
}

func has(v demo.Verdict, text string) bool {
	return slices.ContainsFunc(v.Problems, func(p string) bool { return strings.Contains(p, text) })
}
