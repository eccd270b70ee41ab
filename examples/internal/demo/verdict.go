package demo

import (
	"errors"
	"fmt"
	"time"
)

// ErrBroken is the end of a run that found a promise broken, or untested. The
// last line has said so.
var ErrBroken = errors.New("demo: a promise was broken")

// Verdict is what a check found.
type Verdict struct {
	Orders           int // in the table of orders
	Messages         int // different messages on the wire
	Effects          int // lines in the ledger
	Lost             int // orders without a message or without an effect
	DuplicateEffects int // lines in the ledger beyond the first of an order
	Reordered        int // first messages and first effects behind a later one of their customer
	WireDuplicates   int // messages on the wire beyond the first of their id

	// Problems are contradictions that none of the numbers shows.
	Problems []string
}

// OK reports whether every promise held, and was put to the test: a run in which
// nothing was ever sent twice shows nothing.
func (v Verdict) OK() bool {
	return v.Lost == 0 && v.DuplicateEffects == 0 && v.Reordered == 0 && len(v.Problems) == 0 &&
		v.Orders == v.Messages && v.Orders == v.Effects && v.WireDuplicates >= 1
}

// Line is the one line that a demo ends with.
func (v Verdict) Line(took time.Duration) string {
	return fmt.Sprintf("demo: orders=%d messages=%d effects=%d lost=%d duplicate_effects=%d reordered=%d wire_duplicates=%d seconds=%.1f",
		v.Orders, v.Messages, v.Effects, v.Lost, v.DuplicateEffects, v.Reordered, v.WireDuplicates, took.Seconds())
}
