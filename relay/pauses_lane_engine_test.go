package relay

import (
	"errors"
	"testing"
	"time"
)

func pausedLane(number int) (p pauses) {
	p.lanes[number] = true
	return p
}

// What a paused lane has in memory when its topic is unavailable is nothing to do.
func TestPauses_WhatCannotProbeDoesNotWakeTheLoop(t *testing.T) {
	t.Parallel()
	for name, outcome := range map[string]error{"unavailable": errNack, "unclear": errors.New("unknown")} {
		for _, order := range []Order{OrderPerKey, OrderPerKeyPipelined} {
			for what, to := range map[string]pauses{"lane": pausedLane(0), "topics": pausedTopics("A", "B")} {
				for _, topics := range [][]string{{"A"}, {"A", "B"}} { // two: the sink is down
					r := newRig(order, 0)
					r.answer = always(outcome)
					for i, topic := range topics {
						r.outboxOf(0, topic, "", int64(2*i+1), int64(2*i+2))
					}
					r.run(time.Second, time.Millisecond)
					r.pause(to, r.now)
					r.run(time.Minute, 10*time.Millisecond)
					wakes := 0
					for end := r.now.Add(10 * time.Second); r.now.Before(end); wakes++ {
						r.reads.pollAt = end
						r.step(max(0, r.wakeAt(r.now).Sub(r.now)))
					}
					if wakes > 200 {
						t.Errorf("%s, %v, paused %s of %v: the loop wakes %d times in 10 s", name, order, what, topics, wakes)
					}
				}
			}
		}
	}
}

// The first messages of a topic that recovers are in a paused lane.
func TestPauses_APausedLaneDoesNotKeepATopicFromRecovering(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0, 1)
	r.answer = always(errNack)
	for id := range int64(500) {
		r.outboxOf(0, "A", "", id+1)
	}
	r.run(time.Second, time.Millisecond)
	for id := range int64(200) {
		r.outboxOf(1, "A", "", id+1001)
	}
	r.run(time.Second, time.Millisecond)
	r.pause(pausedLane(0), r.now)
	r.answer = always(nil)
	before := r.sent["A"]
	r.run(time.Minute, 10*time.Millisecond)
	if n := r.sent["A"] - before; n != 200 {
		t.Errorf("%d of the 200 of another lane were sent", n)
	}
	r.pause(pauses{}, r.now)
	r.run(time.Minute, 10*time.Millisecond)
	if n := r.sent["A"] - before; n != 700 {
		t.Errorf("%d of 700 were sent", n)
	}
}
