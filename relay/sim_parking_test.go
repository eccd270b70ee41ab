package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// simParked is a row of the model's parked.
type simParked struct {
	row      *simRow
	attempts int
	next     time.Time // zero: none
	held     bool
	crashed  bool
	tried    bool
}

// simLetter is a dead letter of the model.
type simLetter struct {
	row     *simRow
	held    bool
	state   string // dead, replaying, discarding, closed
	replays int
}

// simChore is a chore that a worker has begun.
type simChore struct {
	*chore
	committed bool
	lost      bool
	found     func()
	err       error
}

// simParking is the model of parked and dead letters: what the databases do in a
// statement, it does at once.
type simParking struct {
	*simulation
	parked  map[int]map[int64]*simParked // by lane and id
	letters []*simLetter
}

func newSimParking(s *simulation) *simParking {
	p := &simParking{simulation: s, parked: map[int]map[int64]*simParked{}}
	for i := range outbox.Lanes {
		p.parked[i] = map[int64]*simParked{}
	}
	return p
}

func (p *simParking) fenced(f fence) bool {
	l := p.leases[f.lane]
	if fmt.Sprint(l.worker) == f.owner && l.epoch == f.epoch {
		return false
	}
	p.stats["fenced"]++
	return true
}

// ids returns the ids of a key's rows in parked, in order.
func (p *simParking) ids(lane int, key string) []int64 {
	var ids []int64
	for _, id := range slices.Sorted(maps.Keys(p.parked[lane])) {
		if p.parked[lane][id].row.Key == key {
			ids = append(ids, id)
		}
	}
	return ids
}

// promote makes the first row of a key due now if it has no time and is not
// held.
func (p *simParking) promote(lane int, key string) {
	if key == "" || p.order == OrderNone {
		return
	}
	for i, id := range p.ids(lane, key) {
		r := p.parked[lane][id]
		if i == 0 && r.next.IsZero() && !r.held {
			r.next = p.now
		}
	}
}

func (p *simParking) parkedKeys(_ context.Context, lanes []int) ([]parkedKey, error) {
	var keys []parkedKey
	for _, lane := range lanes {
		seen := map[string]bool{"": true}
		for _, id := range slices.Sorted(maps.Keys(p.parked[lane])) {
			if r := p.parked[lane][id]; !seen[r.row.Key] {
				seen[r.row.Key] = true
				keys = append(keys, parkedKey{lane, r.row.Key})
			}
		}
	}
	return keys, nil
}

func (p *simParking) beyond(_ context.Context, lanes []int, topics []string, rows int) (map[int]int64, error) {
	found := map[int]int64{}
	for _, lane := range lanes {
		ids := slices.Sorted(maps.Keys(p.table[lane]))
		for _, id := range ids[max(0, len(ids)-rows):] {
			if !slices.Contains(topics, p.table[lane][id].Topic) {
				found[lane] = id
			}
		}
	}
	return found, nil
}

func (p *simParking) look(_ context.Context, req dueRequest) (looked, error) {
	more := ""
	if p.rng.IntN(3) == 0 { // there are three topics
		if more = fmt.Sprint("t", p.rng.IntN(2)); more <= req.after {
			more = ""
		}
	}
	found, next := p.due(req, more)
	return looked{found, next, more}, nil
}

func (p *simParking) piece(context.Context, outboxstore.Ref, int, int) ([]byte, error) {
	return nil, nil
}

// due returns what is due of the topics after req.after, up to one (empty: all).
func (p *simParking) due(req dueRequest, upTo string) (found []parkedRow, next time.Duration) {
	next = -1
	for _, lane := range req.lanes {
		for _, id := range slices.Sorted(maps.Keys(p.parked[lane])) {
			r := p.parked[lane][id]
			if r.next.IsZero() || slices.Contains(req.known, r.row.Known()) || slices.Contains(req.topics, r.row.Topic) ||
				r.row.Topic <= req.after || upTo != "" && r.row.Topic > upTo {
				continue
			}
			if r.next.After(p.now) {
				if in := r.next.Sub(p.now); next < 0 || in < next {
					next = in
				}
				continue
			}
			if req.heads--; req.heads < 0 {
				return found, 0
			}
			all := []int64{id}
			if r.row.Key != "" && p.order != OrderNone {
				ids := p.ids(lane, r.row.Key)
				all = ids[:min(len(ids), req.rows)]
			}
			for _, id := range all {
				r := p.parked[lane][id]
				if r.held {
					break
				}
				found = append(found, parkedRow{Row: r.row.Row, attempts: r.attempts, tried: r.tried, crashed: r.crashed})
			}
		}
	}
	return found, next
}

func (p *simParking) fail(_ context.Context, f fence, failures []failure, followers []outboxstore.Ref) error {
	if p.fenced(f) {
		return errFenced
	}
	for _, x := range failures {
		if p.leases[f.lane].suspect == x.ID {
			p.leases[f.lane].suspect = 0
		}
		r := p.parked[f.lane][x.ID]
		if row := p.table[f.lane][x.ID]; row != nil && !x.parked {
			r = &simParked{row: row, attempts: x.attempt - 1}
			p.parked[f.lane][x.ID] = r
			delete(p.table[f.lane], x.ID)
			p.highest[f.lane] = max(p.highest[f.lane], x.ID)
		} else if r == nil || !x.parked || !x.free && r.attempts != x.attempt-1 || x.free && r.attempts != x.attempt {
			continue
		}
		r.tried = true
		r.attempts, r.next = x.attempt, time.Time{}
		r.crashed = r.crashed || x.class == classCrashed
		switch {
		case x.free && x.class == classUnavailable:
			p.stats["set aside"]++
		case x.free:
			p.stats["postponed"]++
		}
		if x.attempt > 0 && !x.free && !r.row.lethal && x.class != classCrashed && !r.row.guilty && !p.mayDoubt(r.row) {
			p.stats["charged without a reason"]++
		}
		switch x.verdict {
		case retryLater:
			r.next = p.now.Add(x.retryIn)
		case letterHold:
			r.held = true
			p.letters = append(p.letters, &simLetter{row: r.row, held: true, state: "dead"})
		case letterSkip:
			delete(p.parked[f.lane], x.ID)
			p.letters = append(p.letters, &simLetter{row: r.row, state: "dead"})
			p.promote(f.lane, r.row.Key)
		}
	}
	for _, ref := range followers {
		if row := p.table[f.lane][ref.ID]; row != nil {
			p.parked[f.lane][ref.ID] = &simParked{row: row}
			delete(p.table[f.lane], ref.ID)
			p.highest[f.lane] = max(p.highest[f.lane], ref.ID)
			p.promote(f.lane, row.Key)
		}
	}
	return nil
}

func (p *simParking) follow(_ context.Context, f fence, keys []string, known []outboxstore.Known, limit int) (int, error) {
	if p.fenced(f) {
		return 0, errFenced
	}
	moved := 0
	for _, id := range slices.Sorted(maps.Keys(p.table[f.lane])) {
		row := p.table[f.lane][id]
		if !slices.Contains(keys, row.Key) || slices.Contains(known, row.Known()) || moved == limit {
			continue
		}
		p.parked[f.lane][id] = &simParked{row: row}
		delete(p.table[f.lane], id)
		p.highest[f.lane] = max(p.highest[f.lane], id)
		p.promote(f.lane, row.Key)
		moved++
		p.stats["swept"]++
	}
	return moved, nil
}

func (p *simParking) settle(_ context.Context, rows []outboxstore.Ref) (unparked []parkedKey, missed int, err error) {
	for _, ref := range rows {
		r := p.parked[ref.Lane][ref.ID]
		if r == nil {
			continue
		}
		if r.row.copies == 0 {
			p.stats["deleted before it was sent"]++
		}
		delete(p.parked[ref.Lane], ref.ID)
		p.promote(ref.Lane, r.row.Key)
	}
	for _, ref := range rows {
		if key := p.rows[ref.ID].Key; len(p.ids(ref.Lane, key)) == 0 {
			unparked = append(unparked, parkedKey{ref.Lane, key})
		}
	}
	return unparked, 0, nil
}

func (p *simParking) commands(_ context.Context, lanes []int, limit int) ([]command, error) {
	var found []command
	for i, l := range p.letters {
		if (l.state == "replaying" || l.state == "discarding") && slices.Contains(lanes, l.row.Lane) && len(found) < limit {
			found = append(found, command{letter: int64(i), lane: l.row.Lane, key: l.row.Key})
		}
	}
	return found, nil
}

func (p *simParking) carryOut(_ context.Context, f fence, letters []int64) (parked, unparked []parkedKey, err error) {
	if p.fenced(f) {
		return nil, nil, errFenced
	}
	for _, i := range letters {
		l := p.letters[i]
		lane, key := l.row.Lane, l.row.Key
		switch l.state {
		case "replaying":
			l.replays++
			l.row.replayed = true
			for _, id := range p.ids(lane, key) {
				if r := p.parked[lane][id]; id > l.row.ID && key != "" && p.order != OrderNone {
					r.next = time.Time{} // it is not the first any more
				}
			}
			p.parked[lane][l.row.ID] = &simParked{row: l.row}
			if key == "" || p.order == OrderNone {
				p.parked[lane][l.row.ID].next = p.now
			}
		case "discarding":
			l.row.discarded = true
			if l.held {
				delete(p.parked[lane], l.row.ID)
			}
		default:
			continue
		}
		l.state = "closed"
		p.promote(lane, key)
		if len(p.ids(lane, key)) > 0 {
			parked = append(parked, parkedKey{lane, key})
		} else {
			unparked = append(unparked, parkedKey{lane, key})
		}
	}
	return parked, unparked, nil
}

func (p *simParking) suspect(_ context.Context, f fence, id int64) error {
	if p.fenced(f) {
		return errFenced
	}
	p.leases[f.lane].suspect = id
	return nil
}

func (p *simParking) find(_ context.Context, lane int, id int64) (row parkedRow, parked, found bool, err error) {
	if r := p.parked[lane][id]; r != nil {
		return parkedRow{Row: r.row.Row, attempts: r.attempts, tried: r.tried, crashed: r.crashed}, true, true, nil
	}
	if r := p.table[lane][id]; r != nil {
		return parkedRow{Row: r.Row}, false, true, nil
	}
	return parkedRow{}, false, false, nil
}

func (p *simParking) calm(_ context.Context, owner string, epochs map[int]int64) error {
	for lane, epoch := range epochs {
		if l := &p.leases[lane]; fmt.Sprint(l.worker) == owner && l.epoch == epoch {
			l.crashes, l.suspect = 0, 0
		}
	}
	return nil
}

// operate is an operator pressing a button.
func (p *simParking) operate() {
	if len(p.letters) == 0 {
		return
	}
	l := p.letters[p.rng.IntN(len(p.letters))]
	if l.state != "dead" {
		return
	}
	if p.rng.IntN(4) == 0 {
		l.state = "discarding"
		if !l.held { // nothing but the letter exists
			l.row.discarded, l.state = true, "closed"
		}
		return
	}
	l.state = "replaying"
	l.row.poison, l.row.lethal = 0, false // they mended the cause
}

// chore commits or answers the chore of a worker.
func (p *simParking) chore(w *simWorker) {
	c := w.chore
	if c == nil {
		return
	}
	if !c.committed {
		c.committed = true
		if p.faults && p.rng.IntN(12) == 0 {
			c.err = errors.New("connection lost before")
			return
		}
		c.found, c.err = c.do(choreContext{Context: context.Background(), store: p, clock: func() time.Time { return p.now }, missed: func(int) {}})
		if c.err == nil && p.faults && p.rng.IntN(12) == 0 {
			c.err, c.lost = errors.New("answer lost"), true
		}
		return
	}
	w.chore = nil
	// What took effect, and was not answered, is lost; what the database refused did not.
	kind := choreLost
	if c.err != nil && !c.lost {
		kind = choreError(p.rng.IntN(3)) //nolint:gosec // small
	}
	w.choreDone(p.now, choreAnswer{found: c.found, err: c.err, kind: kind, retryIn: time.Millisecond})
}
