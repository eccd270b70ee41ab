package relay

import (
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
