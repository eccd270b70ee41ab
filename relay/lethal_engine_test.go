package relay

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// ward is a model of workers that die of certain messages, one worker after the other. Apart from
// that nothing fails, except what the test says.
type ward struct {
	*simulation
	w      *simWorker
	lanes  int
	answer func(r *simRow) error
	deaths int
	since  map[*simMessage]time.Time
	takes  time.Duration // a confirm
}

func newWard(order Order, lanes int) *ward {
	d := &ward{simulation: newSimulation(1), lanes: lanes, since: map[*simMessage]time.Time{}, takes: 5 * time.Millisecond, answer: func(*simRow) error { return nil }}
	d.faults, d.order = false, order
	d.retry = Retry{MaxAttempts: 2, Initial: 10 * time.Millisecond, Max: 20 * time.Millisecond}
	d.begin()
	return d
}

func (d *ward) put(lane int, topic, key string, lethal bool) *simRow {
	d.nextID++
	row := &simRow{lethal: lethal, Row: outboxstore.Row{
		Ref:   outboxstore.Ref{Lane: lane, ID: d.nextID, MessageID: fmt.Sprint("m", d.nextID), CreatedAt: d.now},
		Topic: topic, Key: key, Payload: []byte("x"),
	}}
	d.table[lane][row.ID], d.rows[row.ID] = row, row
	return row
}

// begin starts a worker that takes all lanes.
func (d *ward) begin() {
	d.w = &simWorker{number: 0, terms: map[int64]uint64{}}
	d.workers = []*simWorker{d.w}
	d.w.engine = newEngine(limits{
		window: 64, laneRows: 50, laneBytes: 1 << 20, removeRows: 1000, linger: time.Millisecond, pollMin: time.Millisecond, pollMax: 20 * time.Millisecond,
		order: d.order, attempts: d.retry, owner: "0", lease: 3 * time.Second,
		draw: func(below time.Duration) time.Duration { return time.Duration(d.rng.Int64N(int64(below))) },
	})
	for n := range d.lanes {
		d.hold(d.w, n)
		d.w.trust(n, d.leases[n].epoch, d.now.Add(1000*time.Hour))
	}
}

func (d *ward) step() {
	d.now = d.now.Add(time.Millisecond)
	w := d.w
	d.loop(w)
	if w.read != nil {
		d.snapshot(w)
		d.answerRead(w)
	}
	d.commitRemoval(w)
	d.answerRemoval(w)
	for range 3 {
		d.parking.work(w)
	}
	for number := range w.inFlight {
		for _, m := range slices.Clone(w.inFlight[number]) {
			if d.since[m].IsZero() {
				d.since[m] = d.now
			}
			row := d.rows[m.ID]
			err := d.answer(row)
			if row.lethal && err == nil {
				d.deaths++
				d.crash(w)
				d.begin()
				return
			}
			if d.now.Sub(d.since[m]) < d.takes {
				continue
			}
			w.inFlight[number] = slices.DeleteFunc(w.inFlight[number], func(o *simMessage) bool { return o == m })
			if err == nil {
				d.arrive(m)
			}
			w.outcome(m.entry, d.now, err)
		}
	}
}

// A message that kills the worker which sends it is found out after a few deaths, wherever it is, and
// nobody else is blamed.
func TestEngine_FindsWhatKillsItsWorkers(t *testing.T) {
	t.Parallel()
	for _, order := range []Order{OrderPerKey, OrderPerKeyPipelined, OrderNone} {
		for _, lanes := range []int{1, testserver.Rounds(6, 32)} {
			for _, c := range []struct {
				name  string
				build func(d *ward) (deaths int) // allowed
			}{
				{"alone", func(d *ward) int {
					d.put(0, "A", "K", true)
					return singleFrom + 2
				}},
				{"before others", func(d *ward) int {
					d.put(0, "A", "K", true)
					d.fill(100)
					return singleFrom + 2
				}},
				{"behind others of its key", func(d *ward) int {
					for range 5 {
						d.put(0, "A", "K", false)
					}
					d.put(0, "A", "K", true)
					d.fill(100)
					return singleFrom + 2
				}},
				{"amid others", func(d *ward) int {
					d.fill(20)
					d.put(0, "A", "K", true)
					d.fill(80)
					return singleFrom + 2
				}},
				{"behind a window", func(d *ward) int {
					d.fill(150)
					d.put(0, "A", "K", true)
					d.fill(50)
					return 20
				}},
				{"two of a lane", func(d *ward) int {
					d.fill(3)
					d.put(0, "A", "K", true)
					d.put(0, "A", "L", true)
					d.fill(100)
					return singleFrom + 2 + 5
				}},
				{"of two lanes", func(d *ward) int {
					d.fill(3)
					d.put(0, "A", "K", true)
					d.put(d.lanes-1, "A", "L", true)
					d.fill(100)
					return singleFrom + 2 + 5
				}},
				{"the topic is down at first", func(d *ward) int {
					d.put(0, "B", "K", true)
					d.fill(300)
					up := d.now.Add(300 * time.Millisecond)
					d.answer = func(r *simRow) error {
						if r.Topic == "B" && d.now.Before(up) {
							return errNack
						}
						return nil
					}
					return singleFrom + 2
				}},
				{"the topic is down on and off", func(d *ward) int {
					d.put(0, "B", "K", true)
					d.put(0, "B", "L", false)
					d.fill(300)
					d.answer = func(r *simRow) error {
						if r.Topic == "B" && d.now.UnixMilli()%1000 < 700 {
							return errNack
						}
						return nil
					}
					return singleFrom + 2 + 3
				}},
				{"refused before, alone", func(d *ward) int {
					row := d.put(0, "A", "K", true)
					refused := false
					d.answer = func(r *simRow) error {
						if r == row && !refused {
							refused = true
							return Refused(errBehind)
						}
						return nil
					}
					return singleFrom + 2
				}},
				{"refused before", func(d *ward) int {
					row := d.put(0, "A", "K", true)
					d.fill(5)
					refused := false
					d.answer = func(r *simRow) error {
						if r == row && !refused {
							refused = true
							return Refused(errBehind)
						}
						return nil
					}
					return singleFrom + 2
				}},
			} {
				d := newWard(order, lanes)
				most := c.build(d)
				lethal := 0
				for _, r := range d.rows {
					if r.lethal {
						lethal++
					}
				}
				name := fmt.Sprintf("order %d, %d lanes, %s", order, lanes, c.name)
				for i := 0; i < 60_000 && d.deaths <= 100 && (len(d.parking.letters) < lethal || d.left() > 0); i++ {
					d.step()
				}
				if n := len(d.parking.letters); n != lethal || d.deaths > most || d.left() > 0 {
					t.Errorf("%s: %d deaths, %d of %d found, %d rows are left", name, d.deaths, n, lethal, d.left())
				}
				for _, l := range d.parking.letters {
					if !l.row.lethal {
						t.Errorf("%s: message %d is dead, though it kills nobody", name, l.row.ID)
					}
				}
				for what, n := range d.stats {
					if slices.Contains([]string{"isolated lanes beside one another", "in flight without a record", "charged without a reason"}, what) && n > 0 {
						t.Errorf("%s: %s", name, what)
					}
				}
			}
		}
	}
}

func (d *ward) fill(n int) {
	for i := range n {
		for lane := range d.lanes {
			d.put(lane, "A", fmt.Sprintf("key%d.%d", lane, i%7), false)
		}
	}
}

func (d *ward) left() (n int) {
	for lane := range d.lanes {
		n += len(d.table[lane]) + len(d.parking.parked[lane])
	}
	return n
}
