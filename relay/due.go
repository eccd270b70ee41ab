package relay

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

const (
	dueHeads    = 64  // keys in one look for what is due
	dueRows     = 32  // of each
	maxDueHeads = 256 // where keys have few rows, and small ones
	dueTopics   = 64  // of each lane in one look
	manyDueRows = 1024

	// The size of a look adapts to what the connection to the database carries in time,
	// like a read; see pace.
	leastDueBytes = 16 << 10
	firstDueBytes = 256 << 10
	mostDueBytes  = 4 << 20

	// lookAgain is the pause before looking for due rows again when some cannot be
	// taken now.
	lookAgain = 100 * time.Millisecond

	// lookSlow is how long a look may take before other tasks get a break of the same
	// length.
	lookSlow = 50 * time.Millisecond

	// lookAnyway is the longest pause while keys are retrying. A late confirm at a former
	// owner removes a row and makes its successor due, and this worker is not notified.
	lookAnyway = 10 * time.Second
)

// due decides when to look for retrying messages that are due.
type due struct {
	at         time.Time     // when to look; zero: nothing waits
	heads      int           // keys in the next look
	bytes      pace          // of payload and metadata in it
	inline     bool          // it skips large messages, which had their turn
	after      string        // the topic after which it begins; empty: with the first
	next       time.Duration // until something is due of the topics looked at since the first; negative: nothing is
	again      bool          // something changed of those looked at since the first
	found      bool          // something was due of them
	passedOver []string      // topics that the last one passed over
}

// lookFromStart schedules a look for due rows of all topics.
func (d *due) lookFromStart(at time.Time) {
	d.again = d.again || d.after != ""
	d.lookOn(at)
}

// lookOn schedules a look for due rows that continues where the last one ended.
func (d *due) lookOn(at time.Time) {
	if d.at.IsZero() || at.Before(d.at) {
		d.at = at
	}
}

// lookForDue reads due retrying messages, except those of stuck topics.
func (e *engine) lookForDue(now time.Time) *task {
	if slices.ContainsFunc(e.due.passedOver, func(topic string) bool { return !e.circuits.stuck(e.circuits.find(topic), now) }) {
		e.due.passedOver = nil
		e.due.lookFromStart(now)
	}
	if e.due.at.IsZero() || now.Before(e.due.at) {
		return nil
	}
	allowed := e.budget.left(now)
	if lacking := dueHeads - allowed; lacking > 0 { // a look costs as much for a few as for many
		e.due.at = now.Add(time.Duration(lacking) * time.Second / retriesPerSecond)
		return nil
	}
	e.due.at = time.Time{}
	e.circuits.leaveRetrying(now)
	req, lanes, full, skipped := e.dueRequest(now, allowed)
	if req.AfterTopic == "" {
		e.due.next, e.due.found, e.due.again = -1, false, false
	}
	found := relaystore.Due{Next: -1}
	var rest, took time.Duration
	var lacking []*outboxstore.Row
	brought, space := 0, e.space()
	return &task{
		again: &e.due.at,
		undo:  func(taskError) { e.due.bytes.failed() },
		do: func(ctx taskContext) (func(), error) {
			if len(req.Lanes) == 0 {
				return nil, nil
			}
			begin := ctx.clock()
			there, err := ctx.store.Due(ctx, req)
			spent := ctx.clock().Sub(begin)
			large := lackingPayload(there.Rows)
			if large != nil {
				ctx.bring(large, space)
			}
			bytes := there.Size()
			return func() { found, took, lacking, brought = there, spent, large, bytes }, err
		},
		done: func(now time.Time) {
			e.due.passedOver = slices.DeleteFunc(slices.Clone(req.ExceptTopics), e.paused.topic) // a resumption looks by itself
			if req.Heads >= dueHeads {
				e.due.heads = nextHeads(req.Heads, found.Rows)
			}
			if brought >= req.Bytes {
				e.due.bytes.took(took, e.limits.quickRead)
			}
			large := req.Inline || len(lacking) > 0
			missing := len(lacking) > 0 && !slices.ContainsFunc(lacking, func(r *outboxstore.Row) bool { return r.Missing == 0 })
			switch {
			case missing: // others go first
				rest = max(took, lookAgain)
			case took > lookSlow:
				rest = took
			}
			found.Rows = withPayloads(found.Rows)
			added := e.addRetrying(found.Rows, now)
			e.due.after = found.More
			// Large rows may take all the places of a look, and come one by one. So the
			// others have every second look, at the same topics.
			if e.due.inline = len(lacking) > 0 && !req.Inline; e.due.inline {
				e.due.after = req.AfterTopic
			}
			e.due.found = e.due.found || full || skipped || large || len(found.Rows) > 0
			if found.Next >= 0 && (e.due.next < 0 || found.Next < e.due.next) {
				e.due.next = found.Next
			}
			if e.due.after == "" && !e.due.found {
				e.circuits.nothingDue(req.ExceptTopics)
			}
			switch {
			case added > 0, e.due.after != "", e.due.again, large: // some are yet to be looked at or read
				e.due.lookOn(now.Add(rest))
			case full || len(found.Rows) > 0:
				e.due.lookOn(now.Add(lookAgain))
			case e.due.next >= 0:
				e.due.lookOn(now.Add(min(e.due.next, lookAnyway)))
			case slices.ContainsFunc(lanes, (*lane).hasRetryingKeys):
				e.due.lookOn(now.Add(lookAnyway))
			}
		},
	}
}

// dueRequest returns what to look for, and in which lanes. full and skipped report that
// there are others, without room or not to be looked at now.
func (e *engine) dueRequest(now time.Time, allowed int) (req relaystore.DueRequest, lanes []*lane, full, skipped bool) {
	req = relaystore.DueRequest{ExceptTopics: e.paused.passOver(e.circuits.passOver(now)), Heads: min(max(dueHeads, e.due.heads), allowed), AfterTopic: e.due.after, Topics: dueTopics, Bytes: e.due.bytes.size, Inline: e.due.inline}
	req.Rows = dueRows * dueHeads / req.Heads
	for _, l := range e.lanes {
		switch {
		case l == nil, l.halted():
			continue
		case now.After(l.trusted):
			l.overlooked, skipped = true, true
			continue
		case !l.loaded: // looked at once it is loaded
			skipped = true
			continue
		}
		room, known := e.retryingRoom(l)
		if room.none() {
			full = true
			continue
		}
		lanes, req.Lanes, req.Known = append(lanes, l), append(req.Lanes, l.number), append(req.Known, known...)
	}
	return req, lanes, full, skipped
}

// nothingDue releases the circuits of topics other than these: nothing more of them
// is due.
func (c *circuits) nothingDue(but []string) {
	for _, t := range slices.Clone(c.topics) {
		if t.moreDue && !slices.Contains(but, t.name) {
			t.moreDue = false
			c.forget(t)
		}
	}
}
