package shop

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"
)

// MaxNote is the longest note of an order in bytes.
const MaxNote = 64 << 10

// Order is what a customer sends. The customer chooses the id, so that a
// repeated request is recognized as the same order.
type Order struct {
	ID       string    `json:"id"`
	Customer string    `json:"customer"`
	PlacedAt time.Time `json:"placed_at"`
	Items    []Item    `json:"items"`
	Note     string    `json:"note,omitempty"`
}

// Item is one line of an order.
type Item struct {
	SKU        string `json:"sku"`
	Quantity   int64  `json:"quantity"`
	PriceCents int64  `json:"price_cents"`
}

// Placed is the payload of the message that Place publishes.
type Placed struct {
	Order Order `json:"order"`

	// Number counts the orders of one customer from 1, in commit order.
	Number int64 `json:"number"`
}

// Product is something the shop sells.
type Product struct {
	SKU        string
	Name       string
	PriceCents int64
	Stock      int64
}

// ErrOrder matches every error about the content of an order. Repeating the request
// does not help.
var ErrOrder = errors.New("order refused")

var identifier = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// TotalCents is the sum of the order's lines.
func (o Order) TotalCents() int64 {
	var sum int64
	for _, item := range o.Items {
		sum += item.Quantity * item.PriceCents
	}
	return sum
}

// Validate returns everything that is wrong with o, each error naming its field
// and matching [ErrOrder].
func (o Order) Validate() error {
	var errs []error
	refuse := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrOrder, fmt.Sprintf(format, args...)))
	}
	if !identifier.MatchString(o.ID) {
		refuse("id must be 1 to 64 letters, digits or ._-")
	}
	if !identifier.MatchString(o.Customer) {
		refuse("customer must be 1 to 64 letters, digits or ._-")
	}
	if len(o.Items) == 0 || len(o.Items) > 100 {
		refuse("items must hold 1 to 100 lines, not %d", len(o.Items))
	}
	for i, item := range o.Items {
		if !identifier.MatchString(item.SKU) {
			refuse("items[%d].sku must be 1 to 64 letters, digits or ._-", i)
		}
		if item.Quantity < 1 || item.Quantity > 1000 {
			refuse("items[%d].quantity must be 1 to 1000, not %d", i, item.Quantity)
		}
		if item.PriceCents < 0 || item.PriceCents > 10_000_000 {
			refuse("items[%d].price_cents must be 0 to 10000000, not %d", i, item.PriceCents)
		}
	}
	if len(o.Note) > MaxNote || !utf8.ValidString(o.Note) || strings.ContainsRune(o.Note, 0) {
		refuse("note must be valid UTF-8 without NUL, at most %d bytes", MaxNote)
	}
	return errors.Join(errs...)
}
