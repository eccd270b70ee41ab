package relay

import (
	"errors"
	"maps"
	"runtime"
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
		l.crashes = singleFrom // messages go out alone
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

// What a lane with crashes sends is recorded before, or nobody could tell what its worker has
// died of: after two or three crashes that several messages of this lane are in flight, after four
// which one is.
func TestEngine_SendsNothingAloneThatIsNotRecorded(t *testing.T) {
	t.Parallel()
	for crashes, sent := range map[int]int{2: 3, 3: 3, 4: 1} {
		b := newBench(3)
		l := b.lanes[3]
		l.crashes = crashes
		for id := range int64(3) {
			l.add([]*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: id + 1}, Topic: "a"})})
		}
		publish := func() (n int) {
			for range 3 {
				n += len(b.nextPublish(b.now, b.now.Add(time.Second)))
			}
			return n
		}
		if publish() > 0 {
			t.Errorf("%d crashes: it is sent before it is recorded", crashes)
		}
		if c := b.nextTask(b.now); c == nil || c.lane != l {
			t.Fatalf("%d crashes: it is not recorded", crashes)
		}
		if publish() > 0 {
			t.Errorf("%d crashes: it is sent while it is recorded", crashes)
		}
		b.taskDone(b.now, taskAnswer{})
		if n := publish(); n != sent {
			t.Errorf("%d crashes: recorded, and %d messages are sent", crashes, n)
		}
	}
}

// While messages of lanes that share a turn are in flight together, nothing is sent of another
// such lane, and the records stay: if the worker dies, these lanes alone are suspected. After
// three crashes it is one lane.
func TestEngine_KeepsTheRecordWhileMessagesAreInFlight(t *testing.T) {
	t.Parallel()
	for crashes, most := range map[int]int{2: turnLanes, 3: 1} {
		lanes := []int{3, 4, 5, 6, 7}
		b := newBench(lanes...)
		for _, n := range lanes {
			b.lanes[n].crashes = crashes
			for id := range int64(2) {
				b.lanes[n].add([]*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: n, ID: id + 1}, Topic: "a"})})
			}
		}
		var inFlight []*entry
		senders := map[*lane]int{}
		step := func() {
			for range 10 {
				for _, m := range b.nextPublish(b.now, b.now.Add(time.Second)) {
					inFlight = append(inFlight, m)
					senders[m.lane]++
				}
			}
		}
		write := func() *lane { // that of the next write of a lane, nil if there is none
			for range 10 {
				if c := b.nextTask(b.now); c != nil {
					b.taskDone(b.now, taskAnswer{})
					if c.lane != nil {
						return c.lane
					}
				}
			}
			return nil
		}
		step()
		write()
		step()
		if len(inFlight) != 2*most || len(senders) != most {
			t.Fatalf("%d crashes: %d messages of %d lanes are in flight, not two of each of %d", crashes, len(inFlight), len(senders), most)
		}
		last := inFlight[0]
		for _, m := range inFlight {
			if m.lane != b.isolation.turn { // one that shares the turn
				last = m
			}
		}
		for _, m := range inFlight {
			if m != last {
				b.outcome(m, b.now, nil)
			}
		}
		step()
		if l := write(); l != nil {
			t.Errorf("%d crashes: lane %d writes before the last outcome", crashes, l.number)
		}
		b.outcome(last, b.now, nil)
		first := maps.Clone(senders)
		inFlight = nil
		step()
		if l := write(); l == nil || first[l] == 0 || len(inFlight) > 0 {
			t.Fatalf("%d crashes: the records are not cleared before %d messages of another lane", crashes, len(inFlight))
		}
		for range most {
			write()
			step()
		}
		if len(senders) == most {
			t.Errorf("%d crashes: no other lane has a turn", crashes)
		}
	}
}

// A lane whose last worker died while several of its messages were in flight: that must not count
// again, if the next worker dies of something else.
func TestEngine_ClearsTheRecordThatItInherits(t *testing.T) {
	t.Parallel()
	b := newBench()
	b.hold(3, relaystore.Taken{Epoch: 2, Crashes: 3, Alone: relaystore.WholeLane}, b.now.Add(time.Hour))
	l := b.lanes[3]
	l.loaded = true
	l.add([]*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: 1}, Topic: "a"})})
	if len(b.nextPublish(b.now, b.now.Add(time.Second))) > 0 || l.announced != nil {
		t.Error("something is sent before the record is cleared")
	}
	if c := b.nextTask(b.now); c == nil || c.lane != l {
		t.Fatal("it is not cleared")
	}
	b.taskDone(b.now, taskAnswer{})
	b.nextPublish(b.now, b.now.Add(time.Second))
	if l.announced == nil {
		t.Error("the lane has no turn afterwards")
	}
}

// A message that had no answer is forgotten, to make room or since it has to be read again. If it is
// refused after that, its copy may still have arrived.
func TestEngine_ARefusedMessageMayHaveArrivedBeforeItWasForgotten(t *testing.T) {
	t.Parallel()
	for _, retrying := range []bool{false, true} {
		for _, many := range []int{0, maxUnsure} {
			b := newBench(3)
			read := func(id int64) {
				row := outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: id, CreatedAt: time.UnixMicro(id)}, Topic: "a"}
				if retrying {
					b.addRetrying([]relaystore.Row{{Row: row}}, b.now)
				} else {
					b.lanes[3].add([]*entry{newEntry(row)})
				}
			}
			read(1)
			b.outcome(b.next(t), b.now, Unavailable(errors.New("connection lost")))
			for id := range many {
				m := newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: int64(100 + id), CreatedAt: time.UnixMicro(int64(100 + id))}})
				m.unanswered = true
				b.lanes[3].rememberUnsure(m)
			}
			b.circuits.leaveRetrying(b.now)
			b.forgetUnsent()
			b.lanes[3].loaded = true
			b.circuits = circuits{} // the topic is available again
			if len(b.lanes[3].entries) > 0 {
				t.Fatal("it was not forgotten: the test shows nothing")
			}
			read(1)
			m := b.next(t)
			b.outcome(m, b.now, Refused(errors.New("no")))
			if m.failure == nil || !m.failure.Unanswered {
				t.Errorf("retrying: %v, %d others: recorded as %+v", retrying, many, m.failure)
			}
			if n := len(b.lanes[3].unsure); n > maxUnsure {
				t.Errorf("%d rows are remembered", n)
			}
		}
	}
}

// A worker gives a lane back after an attempt that had no answer: the next owner knows that its
// messages may have arrived, except those that were written later.
func TestEngine_HandsOverThatAMessageMayHaveArrived(t *testing.T) {
	t.Parallel()
	row := outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: 1, CreatedAt: time.Unix(1_000_000, 0)}, Topic: "a"}
	former := newBench(3)
	if former.lanes[3].isUnsure() {
		t.Error("unsure from the start")
	}
	former.lanes[3].add([]*entry{newEntry(row)})
	m := former.next(t)
	if !former.lanes[3].isUnsure() {
		t.Error("sure although a message is in flight")
	}
	former.outcome(m, former.now, Unavailable(errors.New("connection lost")))
	if !former.lanes[3].isUnsure() {
		t.Error("sure although a message had no answer")
	}
	for _, next := range []relaystore.Taken{{Epoch: 2}, {Epoch: 2, UnsureUntil: row.CreatedAt.Add(time.Hour)}} {
		for age, want := range map[time.Duration]bool{0: !next.UnsureUntil.IsZero(), 2 * time.Hour: false} {
			b := newBench()
			b.hold(3, next, b.now.Add(time.Hour))
			l := b.lanes[3]
			l.loaded = true
			r := row
			r.CreatedAt = r.CreatedAt.Add(age)
			l.add([]*entry{newEntry(r)})
			m := b.next(t)
			b.outcome(m, b.now, Refused(errors.New("no")))
			if m.failure == nil || m.failure.Unanswered != want {
				t.Errorf("taken %+v, written %s later: recorded as %+v", next, age, m.failure)
			}
		}
	}
}

// Only a refusal, or a return, says that the broker does not have the message.
func TestEngine_KnowsWhichOutcomesAreNoAnswer(t *testing.T) {
	t.Parallel()
	no := errors.New("no")
	for err, want := range map[error]bool{Refused(no): false, Unroutable(no): false, Unavailable(no): true, Interrupted(no): true, no: true} {
		b := newBench(3)
		b.lanes[3].add([]*entry{newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: 1}, Topic: "a"})})
		m := b.next(t)
		b.outcome(m, b.now, err)
		if m.unanswered != want {
			t.Errorf("%v: without an answer: %t", err, m.unanswered)
		}
	}
}

// Whether a message without a receiver is dropped is asked of a function of the user's.
// One that panics, or ends its goroutine, has not said so, and takes nobody along.
func TestEngine_KeepsWhatItsFunctionPanicsAt(t *testing.T) {
	t.Parallel()
	for says, kept := range map[string]bool{"drop": false, "panic": true, "goexit": true} {
		b := newBench(0)
		b.limits.dropUnroutable = func(string) bool {
			switch says {
			case "panic":
				panic("no such topic")
			case "goexit":
				runtime.Goexit()
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
