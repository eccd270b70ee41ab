package relay

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// Large messages that go out leave less room for others to come; those that wait, none
// less.
func TestEngine_HasRoomForLargeMessages(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1, 2)
	if got := d.space().taken; got != 0 {
		t.Errorf("%d bytes are taken, with nothing in memory", got)
	}
	for lane, size := range []int{10 << 20, 20 << 20, 100} {
		d.add(lane, 1, "orders", "")
		for _, m := range d.lanes[lane].entries {
			d.lanes[lane].bytes += size - m.size()
			m.Payload = make([]byte, size)
		}
	}
	if got := d.space(); got.taken != 30<<20 || got.of["orders"] != 30<<20 {
		t.Errorf("%d bytes are taken, want 30 MiB", got.taken)
	}
	d.addRetrying([]relaystore.Row{{Row: outboxstore.Row{Ref: outboxstore.Ref{Lane: 2, ID: 99}, Topic: "orders", Payload: make([]byte, 5<<20)}, Attempts: 1}}, d.now)
	if got := d.space().taken; got != 35<<20 {
		t.Errorf("%d bytes are taken, want 5 MiB of parked more", got)
	}
	for _, m := range d.lanes[0].entries {
		m.state = stateWithheld
	}
	if got := d.space().taken; got != 25<<20 {
		t.Errorf("%d bytes are taken, want 25 MiB and none of the 10 that wait", got)
	}
}

// keyOfLane returns a key whose messages are of a lane.
func keyOfLane(number int) string {
	for n := 'a'; ; n++ {
		if key := string(n); outbox.Lane(key, "") == number {
			return key
		}
	}
}

// A key whose many rows make reads slow is swept, whether what was read of it has gone out
// or not, and whatever reads come in between that pass nothing over.
func TestEngine_SweepsAKeyThatMakesReadsSlow(t *testing.T) {
	t.Parallel()
	const number = 7
	key := keyOfLane(number)
	d := newDrive(limits{}, number)
	for n := range slowReads {
		d.read(&read{lanes: []*lane{d.lanes[number]}, trusted: []time.Time{d.now.Add(time.Hour)}, ReadRequest: outboxstore.ReadRequest{Lanes: []int{number}, Rows: 256, Bytes: 1 << 20, Busy: []string{key}}, began: d.now, took: 2 * slowRead}, nil, d.now, nil)
		d.read(&read{lanes: []*lane{d.lanes[number]}, trusted: []time.Time{d.now.Add(time.Hour)}, ReadRequest: outboxstore.ReadRequest{Lanes: []int{number}, Rows: 256, Bytes: 1 << 20}, began: d.now, took: time.Millisecond}, nil, d.now, nil)
		d.lanes[number].sweepStopped()
		if swept := d.lanes[number].swept[key]; swept != (n == slowReads-1) {
			t.Errorf("after %d slow reads: swept %v", n+1, swept)
		}
	}
}

// What excuses a slow read must be of now, and of as many bytes; and one that comes to no
// end in its time is the slowest.
func TestEngine_SweepsAKeyWhateverItsReadsHadForAnExcuse(t *testing.T) {
	t.Parallel()
	const number = 7
	key := keyOfLane(number)
	for name, c := range map[string]struct {
		slow read
		err  error
		age  time.Duration // of what a read took that passed nothing over
	}{
		"long ago":  {slow: read{took: 2 * time.Second}, age: 2 * readRarely},
		"in pieces": {slow: read{took: 4 * time.Second, brought: 1 << 10}},
		"no end":    {slow: read{took: time.Second}, err: &pq.Error{Code: "57014"}},
	} {
		d := newDrive(limits{}, number)
		answer := func(r read, err error) {
			r.lanes, r.trusted, r.began = []*lane{d.lanes[number]}, []time.Time{{}}, d.now
			r.Lanes, r.Rows, r.Bytes = []int{number}, 256, 1<<20
			large := newEntry(outboxstore.Row{Ref: outboxstore.Ref{Lane: number, ID: 1}, Payload: make([]byte, 1<<20)})
			d.read(&r, []*entry{large}, d.now, err)
		}
		answer(read{took: 3 * time.Second}, nil)
		d.now = d.now.Add(c.age)
		for range slowReads {
			c.slow.Busy = []string{key}
			answer(c.slow, c.err)
		}
		d.lanes[number].sweepStopped()
		if !d.lanes[number].swept[key] {
			t.Errorf("%s: it was not swept", name)
		}
	}
}

// A read that takes long since it brings much over a slow way, or since each one does, says
// nothing of the keys that it passes over.
func TestEngine_SweepsNoKeyForASlowWay(t *testing.T) {
	t.Parallel()
	const number = 7
	d := newDrive(limits{}, number)
	for name, c := range map[string]struct {
		took, unhindered time.Duration
		bytes            int
	}{
		"much":    {1300 * time.Millisecond, 10 * time.Millisecond, 1 << 20},
		"far off": {1300 * time.Millisecond, 900 * time.Millisecond, 0},
	} {
		for range 5 * slowReads {
			d.read(&read{lanes: []*lane{d.lanes[number]}, trusted: []time.Time{d.now.Add(time.Hour)}, ReadRequest: outboxstore.ReadRequest{Lanes: []int{number}, Rows: 256, Bytes: 1 << 20}, began: d.now, took: c.unhindered}, nil, d.now, nil)
			d.read(&read{lanes: []*lane{d.lanes[number]}, trusted: []time.Time{{}}, ReadRequest: outboxstore.ReadRequest{Lanes: []int{number}, Rows: 256, Bytes: 1 << 20, Busy: []string{"key"}}, began: d.now, took: c.took, brought: c.bytes}, nil, d.now, nil)
			d.lanes[number].sweepStopped()
		}
		if len(d.lanes[number].swept) > 0 || d.reads.slow > 0 {
			t.Errorf("%s: swept %v", name, d.lanes[number].swept)
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
		"very many dead rows":     {1900 * time.Millisecond, 0, 0, 32 * 256},
		"dead rows on a slow way": {1200 * time.Millisecond, time.Millisecond, 0, 1024},
		"a slow way":              {0, 4 * time.Millisecond, 0, 512},
	} {
		d := newDrive(limits{quickRead: 1250 * time.Millisecond}, 0)
		for range 30 {
			took := c.fixed + time.Duration(d.reads.rows.size)*c.row
			r := &read{lanes: d.lanes[:1], trusted: []time.Time{d.now.Add(time.Hour)}, ReadRequest: outboxstore.ReadRequest{Lanes: []int{0}, Bytes: 1 << 20}, began: d.now, took: took}
			d.now = d.now.Add(took + c.pieces)
			d.read(r, nil, d.now, nil)
		}
		if d.reads.rows.size != c.want {
			t.Errorf("%s: %d rows, want %d", name, d.reads.rows.size, c.want)
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
		d.due.lookFromStart(d.now)
		c := d.lookForDue(d.now)
		if c == nil {
			t.Fatal("no look")
		}
		if err != nil {
			c.undo(taskLost)
			return
		}
		clock := d.now
		store := stubLook{found: relaystore.Due{Rows: make([]relaystore.Row, rows), Next: -1}}
		found, err := c.do(taskContext{store: store, clock: func() time.Time { clock = clock.Add(took / 2); return clock }, bring: func([]*outboxstore.Row, *space) {}})
		if err != nil {
			t.Fatal(err)
		}
		found()
		c.done(d.now)
		d.now = d.now.Add(time.Minute)
	}
	const many = mostDueBytes / 256 // the size of a row without payload
	look(quickRead/2, many, nil)
	if d.due.bytes.size != 2*firstDueBytes {
		t.Errorf("%d bytes after a quick look that was full", d.due.bytes.size)
	}
	look(4*quickRead, many, nil)
	look(time.Millisecond, 1, nil)
	if d.due.bytes.size != 2*firstDueBytes {
		t.Errorf("%d bytes after one that was not quick, and one that was not full", d.due.bytes.size)
	}
	look(0, 0, errors.New("no answer"))
	if d.due.bytes.size != firstDueBytes/2 {
		t.Errorf("%d bytes after one that has failed", d.due.bytes.size)
	}
	for range 10 {
		look(0, 0, errors.New("no answer"))
	}
	if d.due.bytes.size != leastDueBytes {
		t.Errorf("%d bytes after many", d.due.bytes.size)
	}
}

// After a look that found large messages, which may have taken all its places, the next
// one is for the others, at the same topics.
func TestEngine_LooksForSmallMessagesBesideLargeOnes(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	store := &recordedLooks{answers: []relaystore.Due{
		{Rows: []relaystore.Row{{Row: outboxstore.Row{Ref: outboxstore.Ref{ID: 1}, Missing: 1 << 20}}}, Next: -1, More: "b"},
		{Next: -1, More: "b"},
		{Next: -1},
		{Next: -1},
	}}
	d.due.lookFromStart(d.now)
	for range store.answers {
		c := d.lookForDue(d.now)
		if c == nil {
			t.Fatal("no look")
		}
		found, err := c.do(taskContext{store: store, clock: func() time.Time { return d.now }, bring: func([]*outboxstore.Row, *space) {}})
		if err != nil {
			t.Fatal(err)
		}
		found()
		c.done(d.now)
		d.now = d.now.Add(time.Minute)
		if d.due.at.IsZero() || d.now.Before(d.due.at) {
			d.due.lookFromStart(d.now)
		}
	}
	if got, want := strings.Join(store.asked, " "), "all: small: all:b all:"; got != want {
		t.Errorf("looked for %q, want %q", got, want)
	}
}

// recordedLooks answers looks, and notes what they ask for.
type recordedLooks struct {
	taskStore
	answers []relaystore.Due
	asked   []string
}

func (s *recordedLooks) Due(_ context.Context, r relaystore.DueRequest) (relaystore.Due, error) {
	kind := "all:"
	if r.Inline {
		kind = "small:"
	}
	s.asked = append(s.asked, kind+r.AfterTopic)
	return s.answers[len(s.asked)-1], nil
}

type stubLook struct {
	taskStore
	found relaystore.Due
}

func (s stubLook) Due(context.Context, relaystore.DueRequest) (relaystore.Due, error) {
	return s.found, nil
}

func TestEngine_ReadsALaneAgainSoonWhoseLargeMessageWaitsForOthers(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0)
	for range 20 {
		r := &read{lanes: d.lanes[:1], trusted: []time.Time{d.now.Add(time.Hour)}, ReadRequest: outboxstore.ReadRequest{Lanes: []int{0}, Rows: 1, Bytes: 1 << 20}, began: d.now, short: map[int]error{0: errBehind}}
		d.read(r, nil, d.now, nil)
		if wait := d.lanes[0].readAt.Sub(d.now); wait != lookAgain {
			t.Fatalf("it is read again in %v", wait)
		}
		d.now = d.now.Add(time.Second)
	}
}

// Of a message whose payload has not come nothing goes out, and nothing that follows it
// in its key.
func TestDue_LeavesOutWhatHasNotCome(t *testing.T) {
	t.Parallel()
	row := func(id int64, key string, missing int) relaystore.Row {
		return relaystore.Row{Row: outboxstore.Row{Ref: outboxstore.Ref{Lane: 1, ID: id}, Key: key, Missing: missing}}
	}
	found := relaystore.Due{Rows: []relaystore.Row{
		row(1, "a", 0), row(2, "a", 9), row(3, "a", 0), row(4, "b", 0), row(5, "", 9), row(6, "", 0), row(7, "c", laneBytes), row(8, "d", 9),
	}}
	var lack []int64
	for _, r := range lackingPayload(found.Rows) {
		lack = append(lack, r.ID)
	}
	if !slices.Equal(lack, []int64{2, 5, 7, 8}) {
		t.Errorf("to come: %v", lack)
	}
	var kept []int64
	for _, r := range withPayloads(found.Rows) {
		kept = append(kept, r.ID)
	}
	if !slices.Equal(kept, []int64{1, 4, 6}) {
		t.Errorf("may go: %v", kept)
	}
}

// A way to the database may be slow: a read brings no more than it carries, whoever
// takes the lanes, and all that a fast one does.
func TestEngine_ReadsWhatTheWayCarries(t *testing.T) {
	t.Parallel()
	const limit = 5 * time.Second // of a read
	held := make([]int, outbox.Lanes)
	for i := range held {
		held[i] = i
	}
	for _, speed := range []int{20, 100, 1000, 1_000_000} { // rows a second
		d := newDrive(limits{}, held...)
		begin, failed, brought, most := d.now, 0, 0, 0
		for reads := 0; reads < testserver.Rounds(60, 150); {
			d.now = d.now.Add(time.Millisecond)
			d.wake()
			r := d.nextRead(d.now)
			if r == nil {
				continue
			}
			reads++
			var rows []*entry
			for _, lane := range r.Lanes {
				for range r.Rows {
					rows = append(rows, d.row(lane, "orders", ""))
				}
			}
			took := time.Duration(len(rows)) * time.Second / time.Duration(speed)
			d.now = d.now.Add(min(took, limit))
			if took > limit {
				failed++
				d.read(r, nil, d.now, bounded.ErrAbandoned)
			} else {
				brought, most = brought+len(rows), max(most, r.Rows)
				d.read(r, rows, d.now, nil)
			}
			for _, l := range d.lanes { // it is all sent
				l.forgetUnsent()
				l.loaded = true
			}
		}
		if failed > 1 {
			t.Errorf("%d rows a second: %d reads failed", speed, failed)
		}
		if could := int(d.now.Sub(begin).Seconds()) * speed; speed <= 1000 && brought < could*9/10 {
			t.Errorf("%d rows a second: %d were read, %d could have been", speed, brought, could)
		}
		if speed == 1_000_000 && most != d.limits.laneRows {
			t.Errorf("%d rows of a lane in a read at most, want %d", most, d.limits.laneRows)
		}
	}
}

// While a large message of a lane comes in pieces, each read is followed by another one of
// that lane: the others are read, too.
func TestEngine_PollsWhileALargeMessageComes(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1)
	others := 0
	const reads = 20
	for n := 0; n < reads; {
		d.now = d.now.Add(time.Millisecond)
		r := d.nextRead(d.now)
		if r == nil {
			continue
		}
		n++
		if slices.Contains(r.Lanes, 1) {
			others++
		}
		r.short = map[int]error{0: nil}
		d.now = d.now.Add(500 * time.Millisecond)
		d.read(r, nil, d.now, nil)
	}
	if others < reads/2 {
		t.Errorf("another lane was in %d of %d reads", others, reads)
	}
}

// A lane whose large message could not be read is left alone for a moment, and others are
// not.
func TestEngine_PutsALaneOffWhoseLargeMessageCannotBeRead(t *testing.T) {
	t.Parallel()
	d := newDrive(limits{}, 0, 1)
	d.wake()
	r := d.nextRead(d.now)
	r.short = map[int]error{0: errOtherRow}
	d.read(r, nil, d.now, nil)
	d.now = d.now.Add(readAgain / 2)
	d.wake()
	if r := d.nextRead(d.now); r == nil || !slices.Equal(r.Lanes, []int{1}) {
		t.Errorf("read %v, want the other lane alone", r)
	}
}
