package check_test

import (
	"fmt"
	"slices"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
)

// overtaken has a message that a sink refuses come to the wire behind its successor. The server
// loses what it acknowledges from a time on, for half a second.
func overtaken(in *check.Input, lossy float64) {
	in.Lossy = []check.Window{{From: at(lossy), To: at(lossy + 0.5)}}
	for i := range in.Sent {
		if in.Sent[i].MessageID == "r92" {
			in.Sent[i].Mood = "refused"
		}
	}
	delay(in, func(id string, _ time.Time) bool { return id == "r92" }, at(9.5))
	slices.SortStableFunc(in.Wire, func(a, b check.Copy) int { return a.At.Compare(b.At) })
}

// forgotten has the receipts of five seconds be handled without an effect that is left, but for the
// first, which is handled again in the end.
func forgotten(in *check.Input) {
	in.Lossy, in.Settled = []check.Window{{From: at(3), To: at(8)}}, map[string][]time.Time{}
	for i := 30; i < 80; i++ {
		in.Settled[fmt.Sprint("r", i)] = []time.Time{at(float64(i)/10 + 0.04)}
	}
	in.Effects = without(in.Effects, func(e check.Effect) bool { return in.Settled[e.MessageID] != nil && e.MessageID != "r30" })
	for i := range in.Effects {
		if in.Effects[i].MessageID == "r30" {
			in.Effects[i].At = at(8.5)
		}
	}
}

// unfounded has the server lose a receipt and the attempt that produced it, within half a second
// that has ended some seconds before the receipt is sent.
func unfounded(in *check.Input, later float64) {
	in.Lossy, in.Settled = []check.Window{{From: at(1), To: at(1.5)}}, map[string][]time.Time{"m12": {at(1.22)}}
	lost := func(id string) bool { return id == "m12" || id == "r12" }
	in.Effects = without(in.Effects, func(e check.Effect) bool { return lost(e.MessageID) })
	in.Sent = without(in.Sent, func(s check.Sent) bool { return s.MessageID == "r12" })
	for i := range in.Wire {
		if in.Wire[i].MessageID == "r12" {
			in.Wire[i].At = at(1.5 + later)
		}
	}
	slices.SortStableFunc(in.Wire, func(a, b check.Copy) int { return a.At.Compare(b.At) })
}
