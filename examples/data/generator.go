package data

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/oncemill/oncemill/examples/shop"
)

const (
	orderCount    = 10_000
	customerCount = 420
	largeEvery    = 100 // one order in largeEvery has a note of tens of KiB
)

// Generate writes the orders as JSON Lines. Each call writes the same bytes.
func Generate(w io.Writer) error {
	g := &generator{
		rand:     rand.New(rand.NewPCG(20261121, 10_000)),
		products: Catalogue(),
		clock:    time.Date(2026, time.September, 1, 6, 0, 0, 0, time.UTC),
	}
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	for n := range orderCount {
		if err := encoder.Encode(g.order(n)); err != nil {
			return fmt.Errorf("order %d: %w", n+1, err)
		}
	}
	return nil
}

type generator struct {
	rand     *rand.Rand
	products []shop.Product
	clock    time.Time
}

func (g *generator) order(n int) shop.Order {
	g.clock = g.clock.Add(time.Duration(g.rand.ExpFloat64() * 700 * float64(time.Second))).Truncate(time.Second)
	return shop.Order{
		ID:       g.id(),
		Customer: g.customer(),
		PlacedAt: g.clock,
		Items:    g.items(),
		Note:     g.note(n),
	}
}

// id has the form of a random UUID.
func (g *generator) id() string {
	high, low := g.rand.Uint64(), g.rand.Uint64()
	high = high&^0xf000 | 0x4000
	low = low&^(0b11<<62) | 0b10<<62
	return fmt.Sprintf("%08x-%04x-%04x-%04x-%012x", high>>32, high>>16&0xffff, high&0xffff, low>>48, low&0xffffffffffff)
}

// customer prefers low numbers: a few customers order all the time, most of them
// a handful of times.
func (g *generator) customer() string {
	x := g.rand.Float64()
	return fmt.Sprintf("customer-%03d", 1+int(x*x*customerCount))
}

func (g *generator) items() []shop.Item {
	count := 1 + min(int(g.rand.ExpFloat64()*1.8), 11)
	items := make([]shop.Item, 0, count)
	for _, p := range g.rand.Perm(len(g.products))[:count] {
		quantity := 1 + min(int(g.rand.ExpFloat64()*1.2), 23)
		items = append(items, shop.Item{
			SKU:        g.products[p].SKU,
			Quantity:   int64(quantity),
			PriceCents: g.products[p].PriceCents,
		})
	}
	return items
}

func (g *generator) note(n int) string {
	switch {
	case n%largeEvery == largeEvery/2:
		return g.text(8<<10 + g.rand.IntN(40<<10))
	case g.rand.IntN(6) == 0:
		return sentences[g.rand.IntN(len(sentences))]
	}
	return ""
}

// text strings sentences together, at least size bytes of them.
func (g *generator) text(size int) string {
	var text strings.Builder
	for line := 1; text.Len() < size; line++ {
		fmt.Fprintf(&text, "%d. %s\n", line, sentences[g.rand.IntN(len(sentences))])
	}
	return text.String()
}
