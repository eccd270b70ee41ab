package check

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"time"
)

// liveness is C10: at every moment of the run, whatever has something to do and was free of
// faults for two leases has moved meanwhile. A time is excused while a fault lies on all ways
// that it could take, or the servers themselves were slow.
func (c *index) liveness() Result {
	r := Result{Checker: "C10", Promise: "liveness"}
	bound := 2 * c.Lease
	j := newJudge(c.Input)
	if len(c.Sent) == 0 {
		r.found("nothing was sent: nothing can be judged")
		return r
	}
	groups := map[string][]span{}
	for _, s := range c.spans() {
		for _, group := range s.groups {
			groups[group] = append(groups[group], s)
		}
	}
	slowest := ""
	for group, spans := range groups {
		excuses := j.excuses(group)
		for _, gap := range gaps(spans) {
			stall := longestFree(gap, excuses)
			if stall > c.counts.LongestStall {
				c.counts.LongestStall, slowest = stall, group
			}
			if stall > bound {
				c.counts.Stalls++
				r.found("%s did not move for %s without an excuse, between %s and %s",
					group, stall.Round(time.Millisecond), gap.From.Format(clock), gap.To.Format(clock))
			}
		}
	}
	c.leftBehind(&r, j)
	run := Window{c.Sent[0].At, c.End}
	c.counts.Judged = 1 - covered(run, j.excuses("lane 0")).Seconds()/max(1, run.To.Sub(run.From).Seconds())
	r.Note = fmt.Sprintf("%d lanes, topics and consumers; %.0f%% of the time had no excuse; the longest wait was %s of %s",
		len(groups), 100*c.counts.Judged, c.counts.LongestStall.Round(time.Millisecond), slowest)
	return r
}

// span is the time in which a message has something to wait for.
type span struct {
	Window

	id, key string
	groups  []string // what moves when it ends
	queue   string   // what it must not be left behind in
}

// spans returns what each message waited for: the wire, then its consumer.
func (c *index) spans() (all []span) {
	ended := map[string]time.Time{}
	for _, tx := range c.Txs {
		if tx.Outcome == "committed" {
			ended[tx.ID] = tx.Ended
		}
	}
	retried := map[string]bool{} // keys with messages that the sink refuses: the others wait for them
	for i := range c.Sent {
		if c.Sent[i].Mood == refused {
			retried[c.Sent[i].Key] = true
		}
	}
	for i := range c.Sent {
		s := &c.Sent[i]
		if s.Key != "" && retried[s.Key] {
			continue
		}
		from, known := ended[s.Tx]
		if s.Topic == secondHop {
			from, known = s.At, true // a handler commits at once
		}
		first := c.first[s.MessageID]
		if first == nil || s.Scheduled {
			continue
		}
		if known && !c.hasLetter(s.MessageID) {
			lane := LaneOf(s.Key, s.MessageID)
			groups := []string{"topic " + s.Topic}
			if s.Topic == firstTopic { // the others' queues and handlers are faults' victims
				groups = append(groups, fmt.Sprintf("lane %d", lane))
			}
			all = append(all, span{
				Window: Window{from, first.At}, id: s.MessageID, key: s.Key, groups: groups,
				queue: fmt.Sprintf("lane %d %s", lane, s.Topic),
			})
		}
		if consumer := c.Consumers[s.Topic]; consumer != "" && len(c.effects[s.MessageID]) > 0 && !c.hasLetter(s.MessageID) {
			all = append(all, span{
				Window: Window{first.At, c.effects[s.MessageID][0].At}, id: s.MessageID, key: s.Key,
				groups: []string{"consumer " + consumer},
			})
		}
	}
	return all
}

const (
	firstTopic = "transfers" // whose messages move every lane
	refused    = "refused"   // the mood of messages that the sink refuses
	clock      = "15:04:05.000"
)

// LaneOf returns the lane of a message, as docs/outbox.md defines it.
func LaneOf(key, messageID string) int {
	hash := fnv.New64a()
	if key == "" {
		key = messageID
	}
	_, _ = hash.Write([]byte(key)) // hashes take everything
	return int(hash.Sum64() % 32)
}

// gaps returns the times in which something was waiting and nothing moved.
func gaps(spans []span) (found []Window) {
	type event struct {
		at    time.Time
		begin bool
	}
	var events []event
	for _, s := range spans {
		if s.To.After(s.From) {
			events = append(events, event{s.From, true}, event{s.To, false})
		}
	}
	slices.SortFunc(events, func(a, b event) int { return a.at.Compare(b.at) })
	waiting := 0
	var since time.Time
	for _, e := range events {
		switch {
		case e.begin:
			if waiting == 0 {
				since = e.at
			}
			waiting++
		default:
			found = append(found, Window{since, e.at})
			waiting--
			since = e.at
		}
	}
	return found
}

// leftBehind finds keys that stood while their lane moved: nothing of the key was delivered for
// long, although others of its lane and topic were that had been committed later.
func (c *index) leftBehind(r *Result, j *judge) {
	queues := map[string][]span{}
	for _, s := range c.spans() {
		if s.queue != "" {
			queues[s.queue] = append(queues[s.queue], s)
		}
	}
	for queue, spans := range queues {
		before := predecessors(spans)
		slices.SortFunc(spans, func(a, b span) int { return cmp.Or(b.From.Compare(a.From), strings.Compare(a.id, b.id)) })
		excuses := j.excuses("topic " + queue[strings.LastIndexByte(queue, ' ')+1:])
		var earliest time.Time // arrival of what was committed later
		for _, s := range spans {
			if !earliest.IsZero() && s.To.After(earliest) {
				w := Window{latest(earliest, s.From, before[s.id]), s.To}
				if stall := longestFree(w, excuses); stall > 2*c.Lease {
					c.counts.Stalls++
					r.found("key %q: message %s was left behind for %s while its lane moved", s.key, s.id, stall.Round(time.Millisecond))
				}
			}
			if earliest.IsZero() || s.To.Before(earliest) {
				earliest = s.To
			}
		}
	}
}

// predecessors returns, for each message with a key, when the last one of the key arrived before.
func predecessors(spans []span) map[string]time.Time {
	byArrival := slices.Clone(spans)
	slices.SortFunc(byArrival, func(a, b span) int { return a.To.Compare(b.To) })
	before, last := map[string]time.Time{}, map[string]time.Time{}
	for _, s := range byArrival {
		if s.key != "" {
			before[s.id], last[s.key] = last[s.key], s.To
		}
	}
	return before
}

func latest(times ...time.Time) time.Time { return slices.MaxFunc(times, time.Time.Compare) }
