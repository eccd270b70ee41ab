package relay

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/oncemill/oncemill/outbox"
)

// Large messages that go out leave less room for others to come; those that wait, none
// less.
func TestEngine_HasRoomForLargeMessages(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1, 2)
	if got := d.largeRoom(); got != mostLarge {
		t.Errorf("room for %d bytes, with nothing in memory", got)
	}
	for lane, size := range []int{10 << 20, 20 << 20, 100} {
		d.add(lane, 1, "orders", "")
		for _, m := range d.lanes[lane].entries {
			d.lanes[lane].bytes += size - m.size()
			m.Payload = make([]byte, size)
		}
	}
	if got := d.largeRoom(); got != mostLarge-30<<20 {
		t.Errorf("room for %d bytes beside 30 MiB", got)
	}
	for _, m := range d.lanes[0].entries {
		m.state = withheld
	}
	if got := d.largeRoom(); got != mostLarge-20<<20 {
		t.Errorf("room for %d bytes beside 20 MiB and 10 that wait", got)
	}
}

// A key whose many rows make reads slow is swept, whether what was read of it has gone out
// or not, and whatever reads come in between that pass nothing over.
func TestEngine_SweepsAKeyThatMakesReadsSlow(t *testing.T) {
	t.Parallel()
	const number = 7
	key := ""
	for n := 0; key == ""; n++ {
		if k := string(rune('a' + n)); outbox.Lane(k, "") == number {
			key = k
		}
	}
	d := newDrive(limits{}, number)
	for n := range slowReads {
		d.read(&read{lanes: []*lane{d.lanes[number]}, trusted: []time.Time{d.now.Add(time.Hour)}, ReadRequest: outbox.ReadRequest{Lanes: []int{number}, Rows: 256, Bytes: 1 << 20, Busy: []string{key}}, began: d.now, took: 2 * slowRead}, nil, d.now, nil)
		d.read(&read{lanes: []*lane{d.lanes[number]}, trusted: []time.Time{d.now.Add(time.Hour)}, ReadRequest: outbox.ReadRequest{Lanes: []int{number}, Rows: 256, Bytes: 1 << 20}, began: d.now, took: time.Millisecond}, nil, d.now, nil)
		d.lanes[number].sweepStopped()
		if swept := d.lanes[number].swept[key]; swept != (n == slowReads-1) {
			t.Errorf("after %d slow reads: swept %v", n+1, swept)
		}
	}
}

// What a read carries is learnt from the read alone, not from the large messages that came
// in pieces after it; and one that takes long whatever it brings is not left at its
// smallest.
func TestEngine_LearnsWhatTheWayCarriesFromReadsAlone(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fixed, row time.Duration // what a read takes, and each of its rows
		pieces     time.Duration // what comes after it
		want       int
	}{
		"pieces":                  {time.Millisecond, 0, time.Minute, 32 * 256},
		"dead rows":               {1400 * time.Millisecond, 0, 0, 32 * 256},
		"dead rows on a slow way": {1200 * time.Millisecond, time.Millisecond, 0, 1024},
		"a slow way":              {0, 4 * time.Millisecond, 0, 512},
	} {
		d := newDrive(limits{quickRead: 1250 * time.Millisecond}, 0)
		for range 30 {
			took := c.fixed + time.Duration(d.carries)*c.row
			r := &read{lanes: d.lanes[:1], trusted: []time.Time{d.now.Add(time.Hour)}, ReadRequest: outbox.ReadRequest{Lanes: []int{0}, Bytes: 1 << 20}, began: d.now, took: took}
			d.now = d.now.Add(took + c.pieces)
			d.read(r, nil, d.now, nil)
		}
		if d.carries != c.want {
			t.Errorf("%s: %d rows, want %d", name, d.carries, c.want)
		}
	}
}

// A look brings a quarter where one has failed, more where one was full and
// quick; a lane whose large message has to wait for others is read again soon, however
// often that comes.
func TestEngine_LooksForWhatTheWayCarries(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	look := func(took time.Duration, rows int, err error) {
		t.Helper()
		d.parkedDue(d.now)
		c := d.lookForDue(d.now)
		if c == nil {
			t.Fatal("no look")
		}
		if err != nil {
			c.undo(choreLost)
			return
		}
		clock := d.now
		store := stubLook{found: looked{rows: make([]parkedRow, rows), next: -1}}
		found, err := c.do(choreContext{store: store, clock: func() time.Time { clock = clock.Add(took / 2); return clock }, bring: func([]*outbox.Row, int) {}})
		if err != nil {
			t.Fatal(err)
		}
		found()
		c.done(d.now)
		d.now = d.now.Add(time.Minute)
	}
	const many = mostDueBytes / rowBytes
	look(time.Millisecond, many, nil)
	if d.dueBytes != 2*firstDueBytes {
		t.Errorf("%d bytes after a quick look that was full", d.dueBytes)
	}
	look(2*quickRead+time.Second, many, nil)
	look(time.Millisecond, 1, nil)
	if d.dueBytes != 2*firstDueBytes {
		t.Errorf("%d bytes after one that was not quick, and one that was not full", d.dueBytes)
	}
	look(0, 0, errors.New("no answer"))
	if d.dueBytes != firstDueBytes/2 {
		t.Errorf("%d bytes after one that has failed", d.dueBytes)
	}
	for range 10 {
		look(0, 0, errors.New("no answer"))
	}
	if d.dueBytes != leastDueBytes {
		t.Errorf("%d bytes after many", d.dueBytes)
	}
}

type stubLook struct {
	parkingStore
	found looked
}

func (s stubLook) look(context.Context, dueRequest) (looked, error) { return s.found, nil }

func TestEngine_ReadsALaneAgainSoonWhoseLargeMessageWaitsForOthers(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	for range 20 {
		r := &read{lanes: d.lanes[:1], trusted: []time.Time{d.now.Add(time.Hour)}, ReadRequest: outbox.ReadRequest{Lanes: []int{0}, Rows: 1, Bytes: 1 << 20}, began: d.now, short: map[int]error{0: errBehind}}
		d.read(r, nil, d.now, nil)
		if wait := d.lanes[0].readAt.Sub(d.now); wait != lookAgain {
			t.Fatalf("it is read again in %v", wait)
		}
		d.now = d.now.Add(time.Second)
	}
}
