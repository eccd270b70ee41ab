package relay

import (
	"fmt"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/testserver"
)

func pausedTopics(names ...string) pauses {
	p := pauses{topics: map[string]bool{}}
	for _, name := range names {
		p.topics[name] = true
	}
	return p
}

// outboxOf puts messages into the memory of a lane, as a read would.
func (r *rig) outboxOf(lane int, topic, key string, ids ...int64) {
	for _, id := range ids {
		r.lanes[lane].add([]*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: lane, ID: id, MessageID: fmt.Sprint("m", id)}, Topic: topic, Key: key, Payload: []byte("x")})})
	}
}

func always(err error) func(*entry) (error, bool) {
	return func(*entry) (error, bool) { return err, true }
}

func TestPauses_NothingIsPublishedBeforeThePausesAreKnown(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0)
	r.paused.unknown = true
	r.answer = always(nil)
	r.outboxOf(0, "A", "", 1, 2)
	r.run(time.Second, time.Millisecond)
	if len(r.sent) != 0 {
		t.Fatalf("sent %v", r.sent)
	}
	r.pause(pauses{}, r.now)
	r.run(time.Second, time.Millisecond)
	if r.sent["A"] != 2 {
		t.Errorf("sent %v", r.sent)
	}
}

func TestPauses_AKeyWaitsForItsPausedMessageAcrossTopicsAndOthersGoOn(t *testing.T) {
	t.Parallel()
	for _, order := range []Order{OrderPerKey, OrderPerKeyPipelined} {
		r := newRig(order, 0, 1)
		var wire []int64
		r.answer = func(m *entry) (error, bool) { wire = append(wire, m.ID); return nil, true }
		r.pause(pausedTopics("A"), r.now)
		r.outboxOf(0, "A", "k", 1)
		r.outboxOf(0, "B", "k", 2)
		r.outboxOf(1, "B", "other", 3)
		r.run(time.Second, time.Millisecond)
		if fmt.Sprint(wire) != "[3]" {
			t.Fatalf("%v: sent %v while paused", order, wire)
		}
		r.pause(pauses{}, r.now)
		r.run(time.Second, time.Millisecond)
		if fmt.Sprint(wire) != "[3 1 2]" {
			t.Errorf("%v: sent %v", order, wire)
		}
	}
}

func TestPauses_WhatIsPausedIsNoProbeAndUsesUpNoAttempt(t *testing.T) {
	t.Parallel()
	for name, outcome := range map[string]error{"unavailable": errNack, "unclear": fmt.Errorf("unknown")} {
		r := newRig(OrderPerKey, 0, 1)
		r.answer = always(outcome)
		r.outboxOf(0, "A", "", 1)
		r.put(1, 2, "A", "")
		r.engine.due.lookFromStart(r.now)
		r.run(time.Second, time.Millisecond)
		if r.sent["A"] < 2 {
			t.Fatalf("%s: sent %v", name, r.sent)
		}
		r.pause(pausedTopics("A"), r.now)
		before := r.sent["A"]
		minutes := testserver.Rounds(15, 60)
		r.run(time.Duration(minutes)*time.Minute, 20*time.Millisecond)
		if r.sent["A"] != before {
			t.Errorf("%s: %d sent while paused", name, r.sent["A"]-before)
		}
		if looks := r.looks; looks > 4000*minutes/60 {
			t.Errorf("%s: %d looks for what is due in %d minutes", name, looks, minutes)
		}
		r.answer = always(nil)
		r.pause(pauses{}, r.now)
		r.run(time.Minute, 10*time.Millisecond)
		if len(r.lanes[0].entries)+len(r.lanes[1].entries)+len(r.parked) != 0 {
			t.Errorf("%s: not all delivered: %d retrying", name, len(r.parked))
		}
		for _, x := range r.parked {
			if x.Attempts > 0 {
				t.Errorf("%s: %d attempts", name, x.Attempts)
			}
		}
	}
}

func TestPauses_InFlightGetsItsOutcome(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0)
	r.answer = func(*entry) (error, bool) { return nil, false }
	r.outboxOf(0, "A", "k", 1, 2)
	r.step(time.Millisecond)
	r.pause(pausedTopics("A"), r.now)
	r.outcome(r.hung[0], r.now, nil)
	r.run(time.Second, time.Millisecond)
	if r.sent["A"] != 1 || len(r.lanes[0].entries) != 1 {
		t.Errorf("sent %v, %d left", r.sent, len(r.lanes[0].entries))
	}
}

func TestPauses_ALaneReadsAndSendsNothingAndGoesOn(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0, 1)
	r.answer = always(nil)
	var p pauses
	p.lanes[0] = true
	r.pause(p, r.now)
	r.outboxOf(0, "A", "k", 1)
	r.put(0, 2, "A", "")
	r.outboxOf(1, "B", "", 3)
	r.engine.due.lookFromStart(r.now)
	r.run(time.Second, time.Millisecond)
	if r.sent["A"] != 0 || r.sent["B"] != 1 {
		t.Errorf("sent %v", r.sent)
	}
	r.wake()
	r.reads.pollAt = r.now
	if read := r.nextRead(r.now); read == nil || len(read.Lanes) != 1 || read.Lanes[0] != 1 {
		t.Errorf("read %+v", read)
	}
	r.reads.running = false
	r.lanes[1].reading = false
	r.pause(pauses{}, r.now)
	r.run(time.Second, time.Millisecond)
	if r.sent["A"] != 2 {
		t.Errorf("sent %v after it was resumed", r.sent)
	}
}

func TestPauses_ASinkIsItsTopicsAndAKeyIsItAlone(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0)
	r.answer = always(nil)
	r.paused.sinkOf = func(topic string) string { return topic[:1] }
	r.pause(pauses{sinks: map[string]bool{"A": true}, keys: map[string]bool{"k": true}}, r.now)
	r.outboxOf(0, "A1", "", 1)
	r.outboxOf(0, "B1", "k", 2)
	r.outboxOf(0, "B2", "k", 3)
	r.outboxOf(0, "B3", "", 4)
	r.put(0, 5, "A2", "")
	r.put(0, 6, "B4", "")
	r.engine.due.lookFromStart(r.now)
	r.run(time.Minute, 10*time.Millisecond)
	if fmt.Sprint(r.sent) != "map[B3:1 B4:1]" {
		t.Errorf("sent %v", r.sent)
	}
	if r.looks > 200 {
		t.Errorf("%d looks for what is due in a minute", r.looks)
	}
	r.pause(pauses{}, r.now)
	r.run(time.Minute, 10*time.Millisecond)
	if len(r.sent) != 6 {
		t.Errorf("sent %v after they were resumed", r.sent)
	}
}

// A key that is retrying and paused is looked for once, not ten times a second.
func TestPauses_ARetryingKeyWaitsWithoutBeingLookedFor(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0)
	r.answer = always(nil)
	r.lanes[0].startRetrying(r.lanes[0].chain("k"))
	r.put(0, 1, "A", "k")
	r.put(0, 2, "B", "k")
	r.pause(pauses{keys: map[string]bool{"k": true}}, r.now)
	r.run(time.Minute, 10*time.Millisecond)
	if len(r.sent) != 0 || r.rows > 10 {
		t.Errorf("sent %v, looks brought %d rows", r.sent, r.rows)
	}
	r.pause(pauses{}, r.now)
	r.run(time.Minute, 10*time.Millisecond)
	if len(r.sent) != 2 {
		t.Errorf("sent %v", r.sent)
	}
}

// Paused messages make room for others that are behind them, and do not move if there are none.
func TestPauses_ABacklogIsSetAsideForOthersOnly(t *testing.T) {
	t.Parallel()
	for _, others := range []bool{false, true} {
		r := newRig(OrderPerKey, 0)
		r.answer = always(nil)
		r.pause(pausedTopics("A"), r.now)
		for i := range 3000 {
			r.outboxOf(0, "A", "", int64(i+1))
		}
		if others {
			r.outboxOf(0, "B", "", 5000)
		}
		r.run(time.Minute, 10*time.Millisecond)
		if kept := len(r.lanes[0].entries); (kept < 1500) != others || r.sent["A"] > 0 {
			t.Errorf("others %v: %d of 3000 kept in memory, sent %v", others, kept, r.sent)
		}
	}
}

// A message whose announcement is recorded is taken back.
func TestPauses_AnAnnouncedMessageIsTakenBack(t *testing.T) {
	t.Parallel()
	r := newRig(OrderPerKey, 0)
	r.answer = always(nil)
	r.lanes[0].crashes = singleFrom
	r.outboxOf(0, "A", "k", 1)
	r.nextPublish(r.now, r.now.Add(time.Second))
	if r.lanes[0].announced == nil {
		t.Fatal("not announced")
	}
	r.pause(pausedTopics("A"), r.now)
	r.run(time.Second, time.Millisecond)
	if len(r.sent) != 0 || r.isolation.turn == r.lanes[0] && r.lanes[0].announced != nil {
		t.Fatalf("sent %v", r.sent)
	}
	r.pause(pauses{}, r.now)
	r.run(time.Second, time.Millisecond)
	if r.sent["A"] != 1 {
		t.Errorf("sent %v", r.sent)
	}
}

func TestDivide_AReleasedLaneGoesToAnother(t *testing.T) {
	t.Parallel()
	const term = 15 * time.Second
	peers := []relaystore.Worker{{Owner: "me", Ready: true}, {Owner: "you", Ready: true}}
	leases := []relaystore.Lease{{Lane: 3, Left: -time.Millisecond}}
	for n := range 16 {
		leases = append(leases, relaystore.Lease{Lane: 4 + n, Owner: "me", Left: term})
	}
	fromFour := func(to int) (numbers []int) {
		for n := 4; n < to; n++ {
			numbers = append(numbers, n)
		}
		return numbers
	}
	any := func(int) bool { return true }
	if s := divide("me", peers, leases, fromFour(19), any, map[int]string{3: "me"}, term); len(s.take) > 0 && s.most > 0 {
		t.Errorf("the worker that gave it back takes it: %+v", s)
	}
	if s := divide("me", peers, leases, fromFour(20), any, map[int]string{3: "you"}, term); len(s.take) != 1 || s.most != 1 || s.take[0] != 3 {
		t.Errorf("another worker does not take it: %+v", s)
	}
	if s := divide("me", peers[:1], leases, fromFour(19), any, map[int]string{3: "me"}, term); len(s.take) != 1 || s.most < 1 {
		t.Errorf("a worker that is alone does not take it again: %+v", s)
	}
	leases[0].Left = -2 * term
	if s := divide("me", peers, leases, fromFour(19), any, map[int]string{3: "me"}, term); len(s.take) != 1 || s.most < 1 {
		t.Errorf("nobody takes it: %+v", s)
	}
}
