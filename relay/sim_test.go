package relay

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

var (
	schedules = flag.Int("schedules", testserver.Rounds(75, 150), "random schedules that TestEngine_KeepsItsPromisesUnderAnySchedule runs")
	firstSeed = flag.Uint64("seed", 0, "seed of the first schedule")
)

// simulation drives engines through one random schedule against a model of the
// table, the broker and the leases. Everything that takes time in life, a
// statement's snapshot, its commit, its answer, a message's arrival at the
// broker, its confirm, is a step of its own here, and the schedule decides which
// comes next.
type simulation struct {
	rng *rand.Rand
	now time.Time

	nextID int64
	open   []transaction             // ids taken, not committed
	table  map[int]map[int64]*simRow // lane to committed rows that are not deleted
	rows   map[int64]*simRow         // all that ever committed
	free   map[string]bool           // keys that no open transaction has locked
	wire   []*simRow                 // what the broker got, in order
	leases [outbox.Lanes]simLease

	workers []*simWorker
	parking *simRetries
	order   Order
	retry   Retry
	down    map[string]error // topics that are unavailable, and what they say
	pauses  pauses           // by operators
	steered bool             // there are such
	faults  bool
	late    int // rows that committed behind rows that were gone
	highest [outbox.Lanes]int64
	stats   map[string]int
}

type simRow struct {
	outboxstore.Row
	copies  int // on the wire
	excused int // copies that a fault explains

	poison    int   // so often the broker refuses it
	says      error // when it refuses
	lethal    bool  // kills the worker that sends it
	blamed    bool  // was refused for what it is
	doubted   bool  // had no answer, or was sent while its topic was down
	before    int   // messages on the wire when that was first
	replayed  bool
	discarded bool
}

type transaction struct {
	keys []string
	rows []*simRow
}

type simLease struct {
	worker  int // -1: free
	epoch   int64
	died    bool // its last owner
	expired bool // nobody has given it back
	crashes int
	alone   int64
	until   time.Time // when it expires
	unsure  time.Time // see relaystore.Taken
}

type simWorker struct {
	*engine
	number   int
	frozen   time.Time // does nothing until then
	read     *simRead
	removal  *simRemoval
	task     *simTask
	inFlight [outbox.Lanes][]*simMessage // to the broker, in order
	late     []*entry                    // whose confirms are still to come
	terms    map[int64]uint64            // in which a row was sent last, if not refused
	told     *pauses                     // what it knows to be paused; nil: nothing yet
}

type simRead struct {
	*read
	seen    []*entry
	snapped bool
}

type simRemoval struct {
	refs      []outboxstore.Ref
	locked    []outboxstore.Ref
	committed bool
}

type simMessage struct {
	*entry
	arrived bool
}

const (
	simTerm      = 120 * time.Millisecond // of trust after a renewal
	simPublish   = 30 * time.Millisecond
	simLeaseTime = 100 * time.Millisecond // of which each isolated lane has its share
)

func newSimulation(seed uint64) *simulation {
	s := &simulation{
		rng: rand.New(rand.NewPCG(seed, 4)), now: time.Unix(1_000_000, 0),
		table: map[int]map[int64]*simRow{}, rows: map[int64]*simRow{}, free: map[string]bool{},
		faults: true, stats: map[string]int{}, down: map[string]error{},
	}
	s.parking = newSimRetries(s)
	s.order = Order(s.rng.IntN(3)) //nolint:gosec // small
	s.retry = Retry{
		MaxAttempts: 1 + s.rng.IntN(3), Initial: time.Millisecond, Max: 8 * time.Millisecond,
		Exhausted: Exhausted(s.rng.IntN(2)), //nolint:gosec // small
	}
	for i := range s.leases {
		s.leases[i].worker = -1
		s.table[i] = map[int64]*simRow{}
	}
	for i := range 1 + s.rng.IntN(6) {
		s.free[fmt.Sprint("k", i)] = true
	}
	for i := range 1 + s.rng.IntN(3) {
		s.workers = append(s.workers, &simWorker{number: i, engine: s.newEngine(i), terms: map[int64]uint64{}})
	}
	s.steered = s.rng.IntN(3) == 0
	for _, w := range s.workers {
		s.learnAtOnce(w)
	}
	return s
}

func (s *simulation) newEngine(worker int) *engine {
	return newEngine(limits{
		window: 1 + s.rng.IntN(12), laneRows: 1 + s.rng.IntN(5), laneBytes: 1 + s.rng.IntN(60),
		removeRows: 1 + s.rng.IntN(5), linger: time.Millisecond, pollMin: time.Millisecond, pollMax: 4 * time.Millisecond,
		order: s.order, attempts: s.retry, owner: fmt.Sprint(worker),
		awaitPauses: true, sinkOf: func(topic string) string { return "sink of " + topic },
		lease: simLeaseTime, reserve: simPublish, mostUnclear: 1 + s.rng.IntN(4), mostTopics: 1 + s.rng.IntN(3), postponed: time.Millisecond, mostWaiting: 2 + s.rng.IntN(4), sweepFrom: 1 + s.rng.IntN(4), aheadEvery: time.Duration(1+s.rng.IntN(8)) * time.Millisecond, aheadScan: 1 + s.rng.IntN(30), aheadLook: 1 + s.rng.IntN(10), slowRead: time.Duration(1+s.rng.IntN(20)) * time.Millisecond,
		draw: func(below time.Duration) time.Duration { return time.Duration(s.rng.Int64N(int64(below))) },
	})
}

// step does one random thing.
func (s *simulation) step() {
	s.now = s.now.Add(time.Duration(s.rng.IntN(2000)) * time.Microsecond)
	w := s.workers[s.rng.IntN(len(s.workers))]
	if s.faults && s.now.Before(w.frozen) {
		s.end()
		return
	}
	switch s.rng.IntN(20) {
	case 0, 1:
		if s.faults {
			s.begin()
		}
	case 2:
		s.end()
	case 3:
		s.renew(w)
	case 4:
		s.takeOver(w)
	case 5:
		s.snapshot(w)
	case 6:
		s.answerRead(w)
	case 7:
		s.commitRemoval(w)
	case 8:
		s.answerRemoval(w)
	case 9, 10:
		s.broker(w)
	case 11:
		s.expire(w)
	case 12:
		if s.faults && s.rng.IntN(20) == 0 {
			s.crash(w)
		}
	case 13, 14:
		s.parking.work(w)
	case 15:
		s.weather()
	case 16:
		if !s.faults || s.rng.IntN(4) == 0 {
			s.parking.operate()
		}
	case 19:
		s.operate(w)
	case 17, 18:
		// In the middle of a write is the worst moment.
		if writes := w.task != nil && w.task.lane != nil; s.faults && (writes || s.rng.IntN(20) == 0) {
			w.frozen = s.now.Add(simTerm + time.Duration(s.rng.Int64N(int64(4*simTerm))))
			s.stats["frozen"]++
		}
	}
	s.loop(w)
}

// loop is what the worker's loop does in step.
func (s *simulation) loop(w *simWorker) {
	read := func() {
		if r := w.nextRead(s.now); r != nil {
			w.read = &simRead{read: r}
		}
	}
	read()
	for {
		taken := w.nextPublish(s.now, s.now.Add(simPublish))
		if taken == nil {
			break
		}
		for _, m := range taken {
			if m.hollow || len(m.Payload) != len(s.rows[m.ID].Payload) {
				s.stats["sent without its payload"]++
			}
			if s.leases[m.Lane].worker != w.number {
				s.stats["stale"]++
			}
			s.checkTerm(w, m)
			s.checkPaused(w, m)
			w.inFlight[m.Lane] = append(w.inFlight[m.Lane], &simMessage{entry: m})
		}
	}
	if refs := w.removals.next(s.now, w.publishing.inFlight == 0); refs != nil {
		w.removal = &simRemoval{refs: refs}
	}
	if c := w.nextTask(s.now); c != nil {
		w.task = &simTask{task: c}
	}
	read()
	s.checkState(w)
}

// checkTerm looks at the term of a message that is handed over. One that is sent again
// because it was unavailable is of a later term, so that a sink can tell it from what it
// was then.
func (s *simulation) checkTerm(w *simWorker, m *entry) {
	pipelined := s.order == OrderPerKeyPipelined
	before, again := w.terms[m.ID]
	// A copy whose message was confirmed by another one is none of the engine's any more.
	open := slices.DeleteFunc(slices.Clone(w.inFlight[m.Lane]), func(o *simMessage) bool { return o.state != stateInFlight })
	switch {
	case pipelined != (m.Term != 0), pipelined && again && m.Term <= before, len(open) > 0 && open[0].Term != m.Term:
		s.stats["wrong term"]++
	case pipelined && again:
		s.stats["later term"]++
	}
	w.terms[m.ID] = m.Term
}

// checkState looks for what an engine must never come to.
func (s *simulation) checkState(w *simWorker) {
	for _, t := range w.circuits.topics {
		if t.state == circuitOpen && t.passed > t.openedAt {
			s.stats["circuits open although a message has passed"]++
		}
	}
	s.checkTurns(w)
}

// weather makes a topic unavailable, in one way or another, or mends it.
func (s *simulation) weather() {
	topic := fmt.Sprint("t", s.rng.IntN(3))
	switch {
	case s.down[topic] != nil || !s.faults:
		delete(s.down, topic)
	case s.rng.IntN(12) == 0:
		cause := errors.New("down")
		s.down[topic] = []error{Unavailable(cause), Unroutable(cause), cause}[s.rng.IntN(3)]
		s.stats["outages"]++
	}
}

// begin takes ids under the locks of their keys; a row without a key needs none.
func (s *simulation) begin() {
	var tx transaction
	for range 1 + s.rng.IntN(4) {
		key := ""
		if s.rng.IntN(4) > 0 {
			var candidates []string
			for _, k := range slices.Sorted(maps.Keys(s.free)) {
				if s.free[k] || slices.Contains(tx.keys, k) {
					candidates = append(candidates, k)
				}
			}
			if len(candidates) == 0 {
				continue
			}
			key = candidates[s.rng.IntN(len(candidates))]
			if s.free[key] {
				s.free[key] = false
				tx.keys = append(tx.keys, key)
			}
		}
		s.nextID++
		id := fmt.Sprint("m", s.nextID)
		row := &simRow{Row: outboxstore.Row{
			Ref:   outboxstore.Ref{Lane: outbox.Lane(key, id) % 4, ID: s.nextID, MessageID: id, CreatedAt: s.now},
			Topic: fmt.Sprint("t", s.rng.IntN(3)), Key: key, Payload: make([]byte, s.rng.IntN(20)),
		}}
		switch s.rng.IntN(40) {
		case 0, 1, 2:
			row.poison = 1 + s.rng.IntN(5)
			row.says = []error{Refused(errors.New("bad")), Unroutable(errors.New("bad")), errors.New("bad")}[s.rng.IntN(3)]
		case 3:
			row.lethal = s.rng.IntN(4) == 0
		}
		tx.rows = append(tx.rows, row)
	}
	if len(tx.rows) > 0 {
		s.open = append(s.open, tx)
	}
}

// end commits or rolls back an open transaction, rather a late one than an early one: rows come late.
func (s *simulation) end() {
	if len(s.open) == 0 {
		return
	}
	i := max(s.rng.IntN(len(s.open)), s.rng.IntN(len(s.open)))
	tx := s.open[i]
	s.open = slices.Delete(s.open, i, i+1)
	for _, k := range tx.keys {
		s.free[k] = true
	}
	if s.rng.IntN(5) == 0 {
		return
	}
	for _, r := range tx.rows {
		if r.ID < s.highest[r.Lane] {
			s.late++
		}
		s.table[r.Lane][r.ID] = r
		s.rows[r.ID] = r
	}
	for _, w := range s.workers {
		if s.rng.IntN(2) == 0 {
			w.wake()
		}
		if s.rng.IntN(20) == 0 {
			w.databaseBack(s.now)
		}
	}
}

// snapshot is the moment that a read's statement sees.
func (s *simulation) snapshot(w *simWorker) {
	if w.read == nil || w.read.snapped {
		return
	}
	w.read.snapped = true
	if w.read.ahead != nil {
		s.snapshotAhead(w.read)
		return
	}
	for _, number := range w.read.Lanes {
		n, bytes := 0, 0
		for _, id := range slices.Sorted(maps.Keys(s.table[number])) {
			r := s.table[number][id]
			if slices.Contains(w.read.Known, r.Known()) || r.Key != "" && slices.Contains(w.read.Busy, r.Key) {
				continue
			}
			if n == w.read.Rows || n > 0 && bytes >= w.read.Bytes {
				break
			}
			row := r.Row
			if slices.Contains(w.read.Hollow, row.Topic) {
				row.Hollow, row.Payload = true, nil
				s.stats["hollow"]++
			}
			n, bytes = n+1, bytes+len(row.Payload)
			w.read.seen = append(w.read.seen, newEntry(row))
		}
	}
}

// snapshotAhead is that of a look ahead.
func (s *simulation) snapshotAhead(r *simRead) {
	s.stats["looks ahead"]++
	rows := 0
	for _, lane := range s.table {
		rows += len(lane)
	}
	for _, number := range r.Lanes {
		ids := slices.Sorted(maps.Keys(s.table[number]))
		complete := rows < r.ahead.Scan
		first, taken, others := map[string]bool{}, map[int64]bool{}, []int64(nil)
		for at, id := range ids {
			row := s.table[number][id]
			if slices.Contains(r.Known, row.Known()) || slices.Contains(r.Busy, row.Key) {
				continue
			}
			mayGo := row.Key == "" || r.ahead.Unordered || complete && !first[row.Key]
			first[row.Key] = true
			switch {
			case !mayGo || at < len(ids)-r.ahead.Look || slices.Contains(r.ahead.Not, row.Topic):
			case !slices.Contains(r.ahead.Topics, row.Topic):
				others = append(others, id)
			case len(taken) < r.Rows:
				taken[id] = true
			}
		}
		for _, id := range others[max(0, len(others)-r.ahead.Newest):] {
			taken[id] = true
		}
		for _, id := range slices.Sorted(maps.Keys(taken)) {
			s.stats["ahead"]++
			r.seen = append(r.seen, newEntry(s.table[number][id].Row))
		}
	}
}

func (s *simulation) answerRead(w *simWorker) {
	if w.read == nil || !w.read.snapped {
		return
	}
	r := w.read
	w.read = nil
	if s.faults && s.rng.IntN(15) == 0 {
		r.retryIn = time.Duration(s.rng.IntN(20)) * time.Millisecond
		w.engine.read(r.read, nil, s.now, errors.New("connection lost"))
		return
	}
	w.engine.read(r.read, r.seen, s.now, nil)
}

func (s *simulation) commitRemoval(w *simWorker) {
	if w.removal == nil || w.removal.committed {
		return
	}
	w.removal.committed = true
	for _, ref := range w.removal.refs {
		if s.faults && s.rng.IntN(12) == 0 { // another transaction has locked it
			w.removal.locked = append(w.removal.locked, ref)
			s.stats["locked"]++
			continue
		}
		if s.rows[ref.ID].copies == 0 {
			s.stats["deleted before it was sent"]++
		}
		delete(s.table[ref.Lane], ref.ID)
		s.highest[ref.Lane] = max(s.highest[ref.Lane], ref.ID)
	}
}

// answerRemoval answers, or loses the answer, of a deletion that committed or
// failed.
func (s *simulation) answerRemoval(w *simWorker) {
	if w.removal == nil {
		return
	}
	lost := s.faults && s.rng.IntN(10) == 0
	if !w.removal.committed && !lost {
		return
	}
	locked := w.removal.locked
	w.removal = nil
	if lost {
		w.removed(s.now, removeAnswer{err: errors.New("failed"), lost: s.rng.IntN(2) == 0, retryIn: time.Millisecond})
		return
	}
	w.removed(s.now, removeAnswer{locked: locked})
}
