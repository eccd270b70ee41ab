package relay

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// bench drives an engine by hand. What it is told takes effect at once.
type bench struct {
	*engine
	now time.Time
}

func newBench(lanes ...int) *bench {
	b := &bench{now: time.Unix(1_000_000, 0), engine: newEngine(limits{
		window: 64, laneRows: 8, laneBytes: 1 << 10, removeRows: 100, linger: time.Millisecond, pollMin: time.Millisecond, pollMax: time.Second,
		attempts: Retry{MaxAttempts: 3, Initial: time.Millisecond, Max: time.Second}, owner: "owner",
	})}
	for _, lane := range lanes {
		b.hold(lane, relaystore.Taken{Epoch: 1}, b.now.Add(time.Hour))
		b.lanes[lane].loaded = true
	}
	return b
}

// bring lets a read find a message without a key, and publishes it.
func (b *bench) bring(t *testing.T, lane int, id int64, topic string) *entry {
	t.Helper()
	b.found(t, lane, id, topic)
	return b.next(t)
}

// found lets a read find a message without a key.
func (b *bench) found(t *testing.T, lane int, id int64, topic string) {
	t.Helper()
	b.wake()
	b.reads.pollAt = b.now
	r := b.nextRead(b.now)
	if r == nil {
		t.Fatal("no read is due")
	}
	b.read(r, []*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: lane, ID: id}, Topic: topic})}, b.now, nil)
}

// next returns what is published next, within a minute.
func (b *bench) next(t *testing.T) *entry {
	t.Helper()
	for range 600 {
		if sent := b.nextPublish(b.now, b.now.Add(time.Second)); len(sent) == 1 {
			return sent[0]
		}
		b.now = b.now.Add(100 * time.Millisecond)
	}
	t.Fatal("nothing is published any more")
	return nil
}

// The sink seems to be down, but the lanes with what would show that it is up
// again have gone to another worker. What is left is one message that failed for
// a reason nobody knows.
func TestEngine_ALoneUnclearMessageFindsOutThatTheSinkIsUpAgain(t *testing.T) {
	t.Parallel()
	down, unknown := Unavailable(errors.New("no connection")), errors.New("who knows")
	b := newBench(0, 1)
	var told []error
	b.circuits.becameUnclear = func(_ *entry, cause error) { told = append(told, cause) }
	unclear := b.bring(t, 0, 1, "strange")
	b.outcome(unclear, b.now, unknown)
	lost := []*entry{b.bring(t, 1, 2, "a"), b.bring(t, 1, 3, "b")}
	for _, m := range lost {
		b.outcome(m, b.now, down)
	}
	if !b.circuits.sinkDown {
		t.Fatal("two topics are unavailable and the sink is not: the test says nothing")
	}
	b.drop(1)
	m := b.next(t)
	if m != unclear {
		t.Fatalf("%d is published, want the unclear message", m.ID)
	}
	b.outcome(m, b.now, nil)
	if b.circuits.sinkDown {
		t.Error("the sink is down still")
	}
	if !slices.Equal(told, []error{unknown, nil}) {
		t.Errorf("told of the unclear message: %v", told)
	}
}

// One lane's channel failed. Its topic goes on in the other lanes, and so does the lane.
func TestEngine_AnInterruptionOpensNoCircuit(t *testing.T) {
	t.Parallel()
	b := newBench(3, 4)
	interrupted := b.bring(t, 3, 1, "a")
	b.outcome(interrupted, b.now, Interrupted(errors.New("channel replaced")))
	if n := len(b.circuits.topics); n != 0 {
		t.Errorf("%d circuits are open", n)
	}
	b.found(t, 4, 2, "a")
	if one, other := b.next(t), b.next(t); one.ID+other.ID != 3 {
		t.Errorf("messages %d and %d are published", one.ID, other.ID)
	}
}

// A message that failed while its topic recovers is tried again though nothing else
// of the topic is left to tell whose fault it was.
func TestEngine_TriesALoneUnclearMessageOfARecoveringTopic(t *testing.T) {
	t.Parallel()
	b := newBench(3, 4)
	b.outcome(b.bring(t, 3, 1, "a"), b.now, Unavailable(errors.New("queue full")))
	probe := b.next(t)
	for _, m := range []outboxstore.Ref{{Lane: 3, ID: 2}, {Lane: 4, ID: 3}, {Lane: 4, ID: 4}, {Lane: 4, ID: 5}} {
		b.found(t, m.Lane, m.ID, "a")
		if sent := b.nextPublish(b.now, b.now.Add(time.Second)); len(sent) > 0 {
			t.Fatalf("%d go out beside the probe", len(sent))
		}
	}
	b.outcome(probe, b.now, nil)
	odd := b.next(t)
	if odd.ID != 2 {
		odd = b.next(t)
	}
	b.outcome(odd, b.now, errors.New("odd"))
	b.drop(4)
	b.circuits.topics[0].credit = 1 // nobody is there to use it
	if b.circuits.wakeAt().IsZero() {
		t.Error("nothing is due")
	}
	if again := b.next(t); again != odd || odd.ID != 2 {
		t.Fatalf("message %d failed, and %d is tried", odd.ID, again.ID)
	}
	b.outcome(odd, b.now, nil)
	if len(b.circuits.topics) != 0 {
		t.Errorf("%d circuits are left", len(b.circuits.topics))
	}
}

// What was announced is not sent once its key has turned out to be parked, or its row to
// be gone, and its topic finds another probe.
func TestEngine_AnAnnouncementEndsWithItsKeysState(t *testing.T) {
	t.Parallel()
	for _, parked := range []bool{false, true} {
		b := newBench(3)
		l := b.lanes[3]
		l.crashes = 2 // messages go out alone
		row := outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: 1}, Topic: "a", Key: "K"}
		if parked {
			l.chain("K").retrying = true
			b.addRetrying([]relaystore.Row{{Row: row}}, b.now)
		} else {
			l.add([]*entry{newEntry(row)})
		}
		b.nextPublish(b.now, b.now.Add(time.Second))
		m := l.announced
		if m == nil {
			t.Fatal("nothing is announced: the test shows nothing")
		}
		circuit := b.circuits.findOrAdd("a")
		circuit.state, circuit.probe = circuitOpen, m
		b.circuits.abandon(b.now)
		if circuit.probe != m {
			t.Error("a probe that is announced was given up")
		}
		l.resync(map[string]bool{"K": !parked})
		b.circuits.abandon(b.now)
		if l.announced != nil || circuit.probe != nil {
			t.Errorf("parked before: %v: %v is announced, %v probes", parked, l.announced, circuit.probe)
		}
	}
}

// What is sent alone is recorded before, or nobody could tell what its worker has died of.
func TestEngine_SendsNothingAloneThatIsNotRecorded(t *testing.T) {
	t.Parallel()
	b := newBench(3)
	l := b.lanes[3]
	l.crashes = 2 // messages go out alone
	l.add([]*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: 1}, Topic: "a"})})
	publish := func() int { return len(b.nextPublish(b.now, b.now.Add(time.Second))) }
	if publish()+publish() > 0 {
		t.Error("it is sent before it is recorded")
	}
	if c := b.nextTask(b.now); c == nil || c.lane != l {
		t.Fatal("it is not recorded")
	}
	if publish() > 0 {
		t.Error("it is sent while it is recorded")
	}
	b.taskDone(b.now, taskAnswer{})
	if publish() != 1 {
		t.Error("it is recorded and not sent")
	}
}

// The worker that died may have published a message that is refused now. What is read
// once a window got through was not in flight then.
func TestEngine_ARefusedMessageMayHaveBeenPublishedByAWorkerThatDied(t *testing.T) {
	t.Parallel()
	for _, retrying := range []bool{false, true} {
		b := newBench(3)
		l := b.lanes[3]
		for id, crashes := range []int{1, 0} {
			l.crashes = crashes
			row := outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: int64(id + 1)}, Topic: "a"}
			if retrying {
				b.addRetrying([]relaystore.Row{{Row: row}}, b.now)
			} else {
				l.add([]*entry{newEntry(row)})
			}
			m := b.next(t)
			b.outcome(m, b.now, Refused(errors.New("no")))
			if m.failure == nil || m.failure.Unanswered != (crashes > 0) {
				t.Errorf("%d crashes, retrying: %v: recorded as %+v", crashes, retrying, m.failure)
			}
		}
	}
}

// Whether a message without a receiver is dropped is asked of a function of the user's.
// One that panics has not said so, and takes nobody along.
func TestEngine_KeepsWhatItsFunctionPanicsAt(t *testing.T) {
	t.Parallel()
	for says, kept := range map[string]bool{"drop": false, "panic": true} {
		b := newBench(0)
		b.limits.dropUnroutable = func(string) bool {
			if says == "panic" {
				panic("no such topic")
			}
			return true
		}
		m := b.bring(t, 0, 1, "a")
		b.outcome(m, b.now, Unroutable(errors.New("nobody")))
		if got := len(b.removals.confirmed) == 0; got != kept {
			t.Errorf("%s: kept %v", says, got)
		}
	}
}
