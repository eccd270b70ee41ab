package relay

import (
	"fmt"
	"testing"
	"time"
)

// Keys with a backlog of messages that fill their lane's memory: while it moves, nothing is read
// twice. If confirms take long, payloads are freed for other keys' sake, and read again, but not
// over and over.
func TestEngine_ReadsNoBacklogOverAndOver(t *testing.T) {
	t.Parallel()
	for _, size := range []int{4 << 10, 16 << 10, 64 << 10, 200 << 10, 512 << 10, 1 << 20} {
		for _, keys := range []int{1, 4, 40} {
			for takes, most := range map[time.Duration]float64{10 * time.Millisecond: 1.1, 300 * time.Millisecond: 4} {
				b := backlog{size: size, keys: keys, each: max(5, min(60, 200/keys)), takes: takes}
				if read, sent := b.run(t); float64(read) > most*float64(sent) {
					t.Errorf("%+v: %d KiB are read, %d KiB sent", b, read>>10, sent>>10)
				}
			}
		}
	}
}

type backlog struct {
	size, keys, each int
	takes            time.Duration // a confirm
}

// run sends the backlog of a lane, and returns how many bytes were read and sent.
func (b backlog) run(t *testing.T) (read, sent int) {
	t.Helper()
	d := newDrive(limits{window: 64}, 0)
	o := &stack{d: d}
	for range b.each {
		for k := range b.keys {
			o.put(0, "A", fmt.Sprint("key", k), 1)
		}
	}
	payload := make([]byte, b.size)
	for _, m := range o.rows {
		m.Payload = payload
	}
	total := len(o.rows)
	last := d.now
	inFlight := map[*entry]time.Time{}
	for len(o.rows) > 0 {
		d.now = d.now.Add(5 * time.Millisecond)
		if d.now.Sub(last) > time.Minute {
			t.Fatalf("%+v: nothing was sent for a minute; %d rows are left of %d", b, len(o.rows), total)
		}
		for m, since := range inFlight {
			if d.now.Sub(since) >= b.takes {
				delete(inFlight, m)
				d.outcome(m, d.now, nil)
			}
		}
		if r := d.nextRead(d.now); r != nil {
			found := o.read(r)
			n, bytes := 0, 0
			for n < len(found) && bytes < r.Bytes {
				bytes += found[n].size()
				n++
			}
			read += bytes
			if n < len(found) {
				r.short = map[int]error{0: nil} // there is more
			}
			d.read(r, found[:n], d.now, nil)
		}
		for taken := d.nextPublish(d.now, d.now.Add(time.Second)); taken != nil; taken = d.nextPublish(d.now, d.now.Add(time.Second)) {
			for _, m := range taken {
				inFlight[m], last = d.now, d.now
				sent += m.size()
			}
		}
		if d.nextTask(d.now) != nil {
			d.taskDone(d.now, taskAnswer{})
		}
		d.lanes[0].loaded = true
		if refs := d.removals.next(d.now, d.publishing.inFlight == 0); refs != nil {
			o.remove(refs)
		}
	}
	return read, sent
}
