package relay

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// drive drives an engine alone: nothing is a database or a broker here, tasks
// succeed without being done, and time is what the test says it is.
type drive struct {
	*engine
	now    time.Time
	nextID int64

	answer   func(m *entry) error // the broker's
	taskTime time.Duration        // what one takes; 0: none is done
	busy     time.Time
	did      func(c *task)
	sent     map[string]int // by topic
	passed   map[string]int // by topic
}

func newDrive(l limits, lanes ...int) *drive {
	if l.window == 0 {
		l.window = 1024
	}
	l.laneRows, l.laneBytes, l.removeRows = 256, 1<<20, 4000
	l.linger, l.pollMin, l.pollMax = 20*time.Millisecond, 2*time.Millisecond, 250*time.Millisecond
	l.attempts, l.owner = Retry{MaxAttempts: 10, Initial: time.Second, Max: 5 * time.Minute}, "me"
	d := &drive{
		engine: newEngine(l), now: time.Unix(1_000_000, 0), taskTime: time.Millisecond,
		sent: map[string]int{}, passed: map[string]int{},
	}
	for _, n := range lanes {
		d.hold(n, relaystore.Taken{Epoch: 1}, d.now.Add(240*time.Hour))
		d.lanes[n].loaded = true
	}
	return d
}

// upTo returns the first lanes.
func upTo(lanes int) (numbers []int) {
	for n := range lanes {
		numbers = append(numbers, n)
	}
	return numbers
}

// add gives a lane n messages.
func (d *drive) add(lane, n int, topic, key string) {
	for range n {
		d.lanes[lane].add([]*entry{d.row(lane, topic, key)})
	}
}

func (d *drive) row(lane int, topic, key string) *entry {
	d.nextID++
	return newEntry(outboxstore.Row{
		Ref:   outboxstore.Ref{Lane: lane, ID: d.nextID, MessageID: fmt.Sprint("m", d.nextID), CreatedAt: d.now},
		Topic: topic, Key: key, Payload: []byte("x"),
	})
}

// step lets so much time pass and does what the worker's loop does.
func (d *drive) step(passes time.Duration) {
	d.now = d.now.Add(passes)
	for {
		taken := d.nextPublish(d.now, d.now.Add(time.Second))
		if taken == nil {
			break
		}
		for _, m := range taken {
			d.sent[m.Topic]++
			err := d.answer(m)
			if errors.Is(err, errSilence) {
				continue
			}
			if err == nil {
				d.passed[m.Topic]++
			}
			d.outcome(m, d.now, err)
		}
	}
	if d.removals.next(d.now, d.publishing.inFlight == 0) != nil {
		d.removed(d.now, removeAnswer{})
	}
	if d.tasks.running != nil && !d.tasks.failed {
		if d.now.Before(d.busy) {
			return
		}
		c := d.tasks.running
		d.taskDone(d.now, taskAnswer{})
		if d.did != nil {
			d.did(c)
		}
	}
	if d.taskTime > 0 && d.nextTask(d.now) != nil {
		d.busy = d.now.Add(d.taskTime)
	}
}

func (d *drive) run(total, each time.Duration, also func()) {
	for end := d.now.Add(total); d.now.Before(end); {
		if also != nil {
			also()
		}
		d.step(each)
	}
}

// confirmAfter makes every message be confirmed so long after it was sent, and also told then. What it
// returns is to be called at every step.
func (d *drive) confirmAfter(delay time.Duration, also func(m *entry)) func() {
	sent := map[*entry]time.Time{}
	d.answer = func(m *entry) error {
		sent[m] = d.now
		return errSilence
	}
	return func() {
		for m, at := range sent {
			if d.now.Sub(at) >= delay {
				delete(sent, m)
				d.outcome(m, d.now, nil)
				also(m)
			}
		}
	}
}

var errNack = Unavailable(errors.New("nack"))

// errSilence is no answer at all.
var errSilence = errors.New("silence")

// After an outage of the whole broker one queue stays full: the other topics go
// on.
func TestEngine_LeavesADeadTopicBehindAfterAnOutage(t *testing.T) {
	t.Parallel()
	for _, order := range []Order{OrderPerKey, OrderPerKeyPipelined, OrderNone} {
		d := newDrive(limits{order: order}, 0, 1, 2)
		for lane, topic := range []string{"A", "B", "C"} {
			d.add(lane, 10, topic, "")
		}
		up := false
		d.answer = func(m *entry) error {
			if !up || m.Topic == "A" {
				return errNack
			}
			return nil
		}
		d.run(3*time.Second, 10*time.Millisecond, nil)
		up = true
		d.run(30*time.Second, 10*time.Millisecond, nil)
		if d.passed["B"] != 10 || d.passed["C"] != 10 {
			t.Errorf("order %d: passed %v", order, d.passed)
		}
		if tries := d.sent["A"]; tries < 10 || tries > 1000 {
			t.Errorf("order %d: the dead topic was tried %d times", order, tries)
		}
	}
}

// Messages that fail in an unclear way, several at a time, are found out while the
// others of their topic flow.
func TestEngine_BlamesSeveralUnclearMessages(t *testing.T) {
	t.Parallel()
	for _, poisons := range []int{1, 2, 3, 10} {
		d := newDrive(limits{}, 0, 1)
		d.add(0, poisons, "A", "")
		made := 0
		d.answer = func(m *entry) error {
			if m.Lane == 0 {
				return errors.New("odd")
			}
			return nil
		}
		charged := map[int64]bool{}
		d.did = func(c *task) {
			for _, f := range c.failures {
				if f.Attempt > 0 {
					charged[f.ID] = true
				}
			}
		}
		d.run(time.Minute, 10*time.Millisecond, func() { made++; d.add(1, 1, "A", "") })
		if len(charged) != poisons {
			t.Errorf("%d of %d poisons were charged", len(charged), poisons)
		}
		if d.passed["A"] < made-10 {
			t.Errorf("%d poisons: %d of %d healthy messages passed", poisons, d.passed["A"], made)
		}
	}
}

// A lone unclear message whose topic has no other messages is charged once others have
// passed for long.
func TestEngine_ChargesALoneUnclearMessageInTheEnd(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1)
	d.add(0, 1, "A", "k")
	charged := false
	d.did = func(c *task) { charged = charged || len(c.failures) > 0 }
	d.answer = func(m *entry) error {
		if m.Topic == "A" {
			return Unroutable(errors.New("nobody"))
		}
		return nil
	}
	healthy := func() { d.add(1, 1, "B", "") }
	d.run(4*time.Minute, 20*time.Millisecond, healthy)
	if charged {
		t.Error("charged too soon")
	}
	d.run(2*time.Minute, 20*time.Millisecond, healthy)
	if !charged {
		t.Error("never charged")
	}
}

// Lanes that their workers died of calm down although there is always more to
// send.
func TestEngine_EndsTheCautionInABacklog(t *testing.T) {
	t.Parallel()
	for _, lanes := range []int{1, 8} {
		numbers := upTo(lanes)
		d := newDrive(limits{window: 64}, numbers...)
		for _, n := range numbers {
			d.lanes[n].crashes = 2
		}
		d.answer = func(*entry) error { return nil }
		d.run(time.Minute, time.Millisecond, func() {
			for _, n := range numbers {
				if d.lanes[n].crashes > 0 && d.lanes[n].ready.len() < 128 {
					d.add(n, 128, "A", "")
				}
			}
		})
		for _, n := range numbers {
			if l := d.lanes[n]; l.crashes != 0 {
				t.Errorf("%d lanes: lane %d is isolated after %d messages", lanes, n, l.through)
			}
		}
	}
}

// At rest the engine expects to read nothing, and looks for commands less often. A message
// changes both.
func TestEngine_LooksLessOftenAtRest(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1)
	d.answer = func(*entry) error { return nil }
	commands := 0
	d.did = func(c *task) {
		if c.again == &d.tasks.commandsAt {
			commands++
		}
	}
	looks := func(found func() []*entry) (peeks int) {
		commands = 0
		d.run(20*time.Second, time.Millisecond, func() {
			if r := d.nextRead(d.now); r != nil {
				if r.Peek {
					peeks++
				}
				d.read(r, found(), d.now, nil)
			}
		})
		return peeks
	}
	nothing := func() []*entry { return nil }
	looks(nothing)
	if peeks := looks(nothing); commands < 9 || commands > 11 || peeks < 79 || peeks > 81 {
		t.Errorf("in 20 s at rest %d looks for commands, and %d for rows", commands, peeks)
	}
	if peeks := looks(func() []*entry { return []*entry{d.row(0, "A", "")} }); commands < 16 || peeks > 1 {
		t.Errorf("in 20 s with messages %d looks for commands, and %d for rows", commands, peeks)
	}
}

// Steady traffic of parked keys keeps nobody from looking for what is due, nor for
// commands.
func TestEngine_LooksForDueRowsUnderLoad(t *testing.T) {
	t.Parallel()
	for _, perSecond := range testserver.Rounds([]int{100, 4000}, []int{100, 1000, 4000}) {
		var numbers []int
		for n := range outbox.Lanes {
			numbers = append(numbers, n)
		}
		d := newDrive(limits{}, numbers...)
		for _, n := range numbers {
			for k := range 300 {
				d.lanes[n].chain(fmt.Sprint("k", n, "-", k)).retrying = true
			}
		}
		d.due.lookFromStart(d.now)
		d.taskTime = 3 * time.Millisecond
		looks, commands, made, owed := 0, 0, 0, 0.0
		d.did = func(c *task) {
			switch {
			case c.again == &d.due.at:
				looks++
				d.due.lookFromStart(d.now) // there is always more
			case c.again == &d.tasks.commandsAt:
				commands++
			}
		}
		d.run(10*time.Second, time.Millisecond, func() {
			for owed += float64(perSecond) / 1000; owed >= 1; owed-- {
				n := made % outbox.Lanes
				d.add(n, 1, "A", fmt.Sprint("k", n, "-", made%300))
				made++
			}
		})
		if looks < 500 || commands < 9 {
			t.Errorf("%d messages a second: %d looks for due rows, %d for commands in 10 s", perSecond, looks, commands)
		}
	}
}

// A write that the database refuses holds up its key, and nothing else.
func TestEngine_LivesWithAWriteThatIsImpossible(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1)
	d.answer = func(m *entry) error {
		if m.Topic == "bad" {
			return Refused(errors.New("bad"))
		}
		return nil
	}
	d.taskTime = 0
	d.add(0, 1, "bad", "poison")
	d.add(0, 3, "bad", "other")
	written := 0
	for range 3000 {
		d.add(1, 1, "good", "")
		d.add(0, 1, "good", "")
		d.step(10 * time.Millisecond)
		c := d.nextTask(d.now)
		if c == nil {
			continue
		}
		poisoned := false
		for _, f := range c.failures {
			poisoned = poisoned || f.MessageID == "m1"
		}
		if poisoned {
			d.taskDone(d.now, taskAnswer{err: errors.New("index row size exceeds the maximum"), kind: taskImpossible, retryIn: 50 * time.Millisecond})
			continue
		}
		written += len(c.failures)
		d.taskDone(d.now, taskAnswer{})
	}
	if d.passed["good"] < 5990 {
		t.Errorf("%d of 6000 good messages passed", d.passed["good"])
	}
	if written == 0 {
		t.Error("the failure of another key was never written")
	}
}

// While nothing can be done the loop sleeps.
func TestEngine_IsNotDueInThePast(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{window: 4}, 0)
	d.answer = func(*entry) error { return errNack }
	d.add(0, 4, "A", "")
	d.step(time.Millisecond)
	d.lanes[0].trusted = d.now // the database is away too
	d.reads.running = true
	d.step(3 * time.Second)
	if due := d.wakeAt(d.now); !due.After(d.now) {
		t.Errorf("due %v ago", d.now.Sub(due))
	}
}

// Circuits of topics whose messages went away with their lane are forgotten.
func TestEngine_ForgetsCircuitsWithoutMessages(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1)
	d.answer = func(m *entry) error {
		if m.Lane == 0 {
			return errNack
		}
		return nil
	}
	for i := range 1000 {
		d.add(0, 1, fmt.Sprint("t", i), "")
	}
	d.run(time.Second, 10*time.Millisecond, nil)
	d.drop(0)
	d.run(3*time.Minute, 50*time.Millisecond, func() { d.add(1, 1, "B", "") })
	if len(d.circuits.topics) > 0 || len(d.circuits.byName) > 0 || d.circuits.sinkDown {
		t.Errorf("%d circuits are left", len(d.circuits.topics))
	}
}

// A message that waited for others, or for its topic, has all its time from its own
// first failure. How long it was due and could not be tried does not count.
func TestEngine_CountsTheTimeLimitFromTheFirstFailure(t *testing.T) {
	t.Parallel()
	for _, of := range []struct {
		attempts int
		late     time.Duration // since it was due
		want     relaystore.Fate
	}{{0, 0, relaystore.FateRetry}, {1, 0, relaystore.FateDeadLetter}, {1, 59 * time.Minute, relaystore.FateDeadLetter}, {1, 61 * time.Minute, relaystore.FateRetry}} {
		b := newBench(3)
		b.limits.attempts = Retry{MaxAttempts: 10, Initial: time.Second, Max: time.Minute, TimeLimit: time.Hour}
		b.addRetrying([]relaystore.Row{{Row: outboxstore.Row{Ref: outboxstore.Ref{Lane: 3, ID: 7}, Topic: "a"}, Attempts: of.attempts, Age: 2 * time.Hour, Late: of.late}}, b.now)
		m := b.next(t)
		b.outcome(m, b.now, Refused(errors.New("no")))
		if m.failure.Fate != of.want {
			t.Errorf("after %d attempts, %v late: fate %d, want %d", of.attempts, of.late, m.failure.Fate, of.want)
		}
	}
}

// A confirm that comes after the lease may be of a message that the new owner has made
// a dead letter: its letter is closed with it.
func TestEngine_SettlesWhatAFormerOwnerConfirmed(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*bench){
		"dropped": func(b *bench) { b.drop(3) },
		"expired": func(b *bench) { b.now = b.lanes[3].trusted.Add(1) },
		"held":    func(*bench) {},
	} {
		b := newBench(3)
		m := b.bring(t, 3, 1, "a")
		lose(b)
		b.outcome(m, b.now, nil)
		b.now = b.now.Add(time.Second)
		if refs := b.removals.next(b.now, b.publishing.inFlight == 0); len(refs) != 1 {
			t.Fatalf("%s: %d deletions", name, len(refs))
		}
		b.removed(b.now, removeAnswer{})
		if got := slices.Contains(b.tasks.retried, m); got != (name != "held") {
			t.Errorf("%s: settled: %v", name, got)
		}
	}
}

// A probe whose call never returns keeps its lane, not its topic.
func TestEngine_AnotherProbeFollowsOneWhoseLaneIsLost(t *testing.T) {
	t.Parallel()
	b := newBench(3, 4)
	full := Unavailable(errors.New("queue full"))
	b.outcome(b.bring(t, 3, 1, "a"), b.now, full)
	hung := b.next(t)
	if hung.Lane != 3 {
		t.Fatal("the test shows nothing")
	}
	b.found(t, 4, 2, "a")
	b.drop(3)
	m := b.next(t)
	b.outcome(m, b.now, nil)
	b.outcome(hung, b.now, full) // at last
	if m.Lane != 4 {
		t.Errorf("lane %d probes", m.Lane)
	}
}
