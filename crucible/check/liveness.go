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
	spans := c.spans()
	for _, s := range spans {
		for _, group := range s.groups {
			groups[group] = append(groups[group], s)
		}
	}
	again := c.again(j, spans)
	slowest := ""
	for group, spans := range groups {
		lane := laneOf(group)
		for _, gap := range gaps(spans, again[group]) {
			stall := j.stall(group, lane, gap)
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
	c.leftBehind(&r, j, spans)
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
	queue   queue    // what it must not be left behind in; the zero queue: nothing
}

// queue is the messages of a topic in a lane.
type queue struct {
	lane  int
	topic string
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
				queue: queue{lane, s.Topic},
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

// laneOf returns the lane that a group is; -1: it is none.
func laneOf(group string) int {
	var lane int
	if _, err := fmt.Sscanf(group, "lane %d", &lane); err != nil {
		return -1
	}
	return lane
}

// again returns when groups have moved without getting further: with a message that had been
// delivered before, or whose effect the server lost.
func (c *index) again(j *judge, spans []span) map[string][]time.Time {
	all := map[string][]time.Time{}
	for _, s := range spans {
		if s.queue.topic == "" {
			continue
		}
		for _, at := range c.arrivals(j, s)[1:] {
			for _, group := range s.groups {
				all[group] = append(all[group], at)
			}
		}
	}
	for id, times := range c.Settled {
		lost := slices.IndexFunc(times, c.lossy)
		if first := c.first[id]; first != nil && len(c.effects[id]) == 0 && lost >= 0 {
			consumer := "consumer " + c.Consumers[first.Topic]
			all[consumer] = append(all[consumer], times[lost])
		}
	}
	return all
}

// arrivals returns when a message arrived, as far as that shows that its lane works: for the first
// time, and once after each takeover of the lane, since a relay sends again what the one before has
// not deleted. What comes again and again does not move.
func (c *index) arrivals(j *judge, s span) (times []time.Time) {
	for _, copied := range c.copies[s.id] {
		if len(times) == 0 || j.takenBetween(s.queue.lane, times[len(times)-1], copied.At) {
			times = append(times, copied.At)
		}
	}
	return times
}

// gaps returns the times in which something was waiting and nothing moved.
func gaps(spans []span, again []time.Time) (found []Window) {
	type event struct {
		at      time.Time
		waiting int // more or fewer than before
	}
	var events []event
	for _, s := range spans {
		if s.To.After(s.From) {
			events = append(events, event{s.From, 1}, event{s.To, -1})
		}
	}
	for _, at := range again {
		events = append(events, event{at, 0})
	}
	slices.SortFunc(events, func(a, b event) int { return a.at.Compare(b.at) })
	waiting := 0
	var since time.Time
	for _, e := range events {
		if waiting > 0 && e.waiting <= 0 {
			found = append(found, Window{since, e.at})
		}
		if waiting == 0 || e.waiting <= 0 {
			since = e.at
		}
		waiting += e.waiting
	}
	return found
}

// leftBehind finds keys that stood while their lane moved: nothing of the key was sent for long,
// although others of its lane and topic were delivered that had been committed later.
func (c *index) leftBehind(r *Result, j *judge, all []span) {
	queues := map[queue][]span{}
	for _, s := range all {
		if s.queue.topic != "" {
			queues[s.queue] = append(queues[s.queue], s)
		}
	}
	for queue, spans := range queues {
		moves, told := c.moves(j, spans), map[string]time.Time{}
		slices.SortFunc(spans, func(a, b span) int { return cmp.Or(b.From.Compare(a.From), strings.Compare(a.id, b.id)) })
		topic := "topic " + queue.topic
		var earliest time.Time // arrival of what was committed later
		for _, s := range spans {
			if !earliest.IsZero() && s.To.After(earliest) {
				for w := (Window{latest(earliest, s.From), s.To}); w.From.Before(s.To); w.From = w.To {
					w.To = nextMove(moves[s.key], w.From, s.To)
					stall := j.stall(topic, queue.lane, w)
					if stall > 2*c.Lease && (s.key == "" || !told[s.key].Equal(w.To)) { // others of the key waited for the same
						told[s.key] = w.To
						c.counts.Stalls++
						r.found("key %q: message %s was left behind for %s while its lane moved", s.key, s.id, stall.Round(time.Millisecond))
					}
				}
			}
			if earliest.IsZero() || s.To.Before(earliest) {
				earliest = s.To
			}
		}
	}
}

// moves returns, for each key, when something of it was sent, in this order.
func (c *index) moves(j *judge, spans []span) map[string][]time.Time {
	all := map[string][]time.Time{}
	for _, s := range spans {
		if s.key == "" {
			continue
		}
		all[s.key] = append(all[s.key], c.arrivals(j, s)...)
	}
	for _, times := range all {
		slices.SortFunc(times, time.Time.Compare)
	}
	return all
}

// nextMove returns the first move after a time, at most a later one.
func nextMove(moves []time.Time, after, most time.Time) time.Time {
	n, _ := slices.BinarySearchFunc(moves, after.Add(1), time.Time.Compare)
	if n == len(moves) || moves[n].After(most) {
		return most
	}
	return moves[n]
}
