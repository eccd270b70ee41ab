package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// simParked is a row of the model's parked.
type simRetrying struct {
	row      *simRow
	attempts int
	next     time.Time // zero: none
	held     bool
	crashed  bool
	tried    bool
	unsure   bool // a copy may have arrived
}

// simLetter is a dead letter of the model.
type simDeadLetter struct {
	row     *simRow
	held    bool
	unsure  bool   // its message may have been delivered
	state   string // dead, replaying, discarding, closed
	replays int
}

// silentLetters are those that do not say that their message may have been delivered.
const silentLetters = "letters that do not say that their message may have been delivered"

// simTask is a task that a worker has begun.
type simTask struct {
	*task
	committed bool
	lost      bool
	found     func()
	err       error
}

// simParking is the model of parked and dead letters: what the databases do in a
// statement, it does at once.
type simRetries struct {
	*simulation
	parked  map[int]map[int64]*simRetrying // by lane and id
	letters []*simDeadLetter
}

func newSimRetries(s *simulation) *simRetries {
	p := &simRetries{simulation: s, parked: map[int]map[int64]*simRetrying{}}
	for i := range outbox.Lanes {
		p.parked[i] = map[int64]*simRetrying{}
	}
	return p
}

func (p *simRetries) fenced(f relaystore.Fence) bool {
	l := p.leases[f.Lane]
	if fmt.Sprint(l.worker) == f.Owner && l.epoch == f.Epoch {
		return false
	}
	p.stats["fenced"]++
	return true
}

// ids returns the ids of a key's rows in parked, in order.
func (p *simRetries) ids(lane int, key string) []int64 {
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
func (p *simRetries) promote(lane int, key string) {
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

func (p *simRetries) Keys(_ context.Context, lanes []int) ([]relaystore.Key, error) {
	var keys []relaystore.Key
	for _, lane := range lanes {
		seen := map[string]bool{"": true}
		for _, id := range slices.Sorted(maps.Keys(p.parked[lane])) {
			if r := p.parked[lane][id]; !seen[r.row.Key] {
				seen[r.row.Key] = true
				keys = append(keys, relaystore.Key{Lane: lane, Key: r.row.Key})
			}
		}
	}
	return keys, nil
}

func (p *simRetries) FindOtherTopics(_ context.Context, lanes []int, topics []string, rows int) (map[int]int64, error) {
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

func (p *simRetries) Due(_ context.Context, req relaystore.DueRequest) (relaystore.Due, error) {
	more := ""
	if p.rng.IntN(3) == 0 { // there are three topics
		if more = fmt.Sprint("t", p.rng.IntN(2)); more <= req.AfterTopic {
			more = ""
		}
	}
	found, next := p.due(req, more)
	return relaystore.Due{Rows: found, Next: next, More: more}, nil
}

func (p *simRetries) ReadPiece(context.Context, outboxstore.Ref, int, int) ([]byte, error) {
	return nil, nil
}

// due returns what is due of the topics after req.after, up to one (empty: all).
func (p *simRetries) due(req relaystore.DueRequest, upTo string) (found []relaystore.Row, next time.Duration) {
	next = -1
	for _, lane := range req.Lanes {
		for _, id := range slices.Sorted(maps.Keys(p.parked[lane])) {
			r := p.parked[lane][id]
			if r.next.IsZero() || slices.Contains(req.Known, r.row.Known()) || slices.Contains(req.ExceptTopics, r.row.Topic) ||
				r.row.Topic <= req.AfterTopic || upTo != "" && r.row.Topic > upTo {
				continue
			}
			if r.next.After(p.now) {
				if in := r.next.Sub(p.now); next < 0 || in < next {
					next = in
				}
				continue
			}
			if req.Heads--; req.Heads < 0 {
				return found, 0
			}
			all := []int64{id}
			if r.row.Key != "" && p.order != OrderNone {
				ids := p.ids(lane, r.row.Key)
				all = ids[:min(len(ids), req.Rows)]
			}
			for _, id := range all {
				r := p.parked[lane][id]
				if r.held {
					break
				}
				found = append(found, relaystore.Row{Row: r.row.Row, Attempts: r.attempts, Tried: r.tried, Crashed: r.crashed, Unanswered: r.unsure})
			}
		}
	}
	return found, next
}

func (p *simRetries) Fail(_ context.Context, f relaystore.Fence, failures []relaystore.Failure, followers []outboxstore.Ref) error {
	if p.fenced(f) {
		return relaystore.ErrFenced
	}
	for _, x := range failures {
		if p.leases[f.Lane].alone == x.ID {
			p.leases[f.Lane].alone = 0
		}
		r := p.parked[f.Lane][x.ID]
		if row := p.table[f.Lane][x.ID]; row != nil && !x.Retrying {
			r = &simRetrying{row: row, attempts: x.Attempt - 1}
			p.parked[f.Lane][x.ID] = r
			delete(p.table[f.Lane], x.ID)
			p.highest[f.Lane] = max(p.highest[f.Lane], x.ID)
		} else if r == nil || !x.Retrying || !x.Uncharged && r.attempts != x.Attempt-1 || x.Uncharged && r.attempts != x.Attempt {
			continue
		}
		r.tried = true
		r.unsure = r.unsure || x.Unanswered
		r.attempts, r.next = x.Attempt, time.Time{}
		r.crashed = r.crashed || x.Class == classCrashed
		switch {
		case x.Uncharged && x.Class == classUnavailable:
			p.stats["set aside"]++
		case x.Uncharged && x.Class == classPaused:
			p.stats["set aside while paused"]++
		case x.Uncharged:
			p.stats["postponed"]++
		}
		if x.Attempt > 0 && !x.Uncharged && !r.row.lethal && x.Class != classCrashed && !r.row.blamed && !p.mayDoubt(r.row) {
			p.stats["charged without a reason"]++
		}
		if x.Fate != relaystore.FateRetry && r.row.copies > 0 {
			p.stats["letters of what was delivered"]++
			if !r.unsure {
				p.stats[silentLetters]++
			}
		}
		switch x.Fate {
		case relaystore.FateRetry:
			r.next = p.now.Add(x.RetryIn)
		case relaystore.FateHoldKey:
			r.held = true
			p.letters = append(p.letters, &simDeadLetter{row: r.row, unsure: r.unsure, held: true, state: "dead"})
		case relaystore.FateDeadLetter:
			delete(p.parked[f.Lane], x.ID)
			p.letters = append(p.letters, &simDeadLetter{row: r.row, unsure: r.unsure, state: "dead"})
			p.promote(f.Lane, r.row.Key)
		}
	}
	for _, ref := range followers {
		if row := p.table[f.Lane][ref.ID]; row != nil {
			p.parked[f.Lane][ref.ID] = &simRetrying{row: row}
			delete(p.table[f.Lane], ref.ID)
			p.highest[f.Lane] = max(p.highest[f.Lane], ref.ID)
			p.promote(f.Lane, row.Key)
		}
	}
	return nil
}

func (p *simRetries) Follow(_ context.Context, f relaystore.Fence, keys []string, known []outboxstore.Known, limit int) (int, error) {
	if p.fenced(f) {
		return 0, relaystore.ErrFenced
	}
	moved := 0
	for _, id := range slices.Sorted(maps.Keys(p.table[f.Lane])) {
		row := p.table[f.Lane][id]
		if !slices.Contains(keys, row.Key) || slices.Contains(known, row.Known()) || moved == limit {
			continue
		}
		p.parked[f.Lane][id] = &simRetrying{row: row}
		delete(p.table[f.Lane], id)
		p.highest[f.Lane] = max(p.highest[f.Lane], id)
		p.promote(f.Lane, row.Key)
		moved++
		p.stats["swept"]++
	}
	return moved, nil
}

func (p *simRetries) Remove(_ context.Context, rows []outboxstore.Ref, _ bool) (removal relaystore.Removal, err error) {
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
			removal.Ended = append(removal.Ended, relaystore.Key{Lane: ref.Lane, Key: key})
		}
	}
	return removal, nil
}

func (p *simRetries) Commands(_ context.Context, lanes []int, limit int) ([]relaystore.Command, error) {
	var found []relaystore.Command
	for i, l := range p.letters {
		if (l.state == "replaying" || l.state == "discarding") && slices.Contains(lanes, l.row.Lane) && len(found) < limit {
			found = append(found, relaystore.Command{DeadLetter: int64(i), Lane: l.row.Lane, Key: l.row.Key})
		}
	}
	return found, nil
}

func (p *simRetries) CarryOut(_ context.Context, f relaystore.Fence, letters []int64) (parked, unparked []relaystore.Key, err error) {
	if p.fenced(f) {
		return nil, nil, relaystore.ErrFenced
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
			p.parked[lane][l.row.ID] = &simRetrying{row: l.row, unsure: l.unsure}
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
			parked = append(parked, relaystore.Key{Lane: lane, Key: key})
		} else {
			unparked = append(unparked, relaystore.Key{Lane: lane, Key: key})
		}
	}
	return parked, unparked, nil
}

func (p *simRetries) SetAlone(_ context.Context, f relaystore.Fence, id int64) error {
	if p.fenced(f) {
		return relaystore.ErrFenced
	}
	p.leases[f.Lane].alone = id
	return nil
}

func (p *simRetries) Find(_ context.Context, lane int, id int64) (row relaystore.Row, parked, found bool, err error) {
	if r := p.parked[lane][id]; r != nil {
		return relaystore.Row{Row: r.row.Row, Attempts: r.attempts, Tried: r.tried, Crashed: r.crashed, Unanswered: r.unsure}, true, true, nil
	}
	if r := p.table[lane][id]; r != nil {
		return relaystore.Row{Row: r.Row}, false, true, nil
	}
	return relaystore.Row{}, false, false, nil
}

func (p *simRetries) ClearCrashes(_ context.Context, owner string, epochs map[int]int64) error {
	for lane, epoch := range epochs {
		if l := &p.leases[lane]; fmt.Sprint(l.worker) == owner && l.epoch == epoch {
			l.crashes, l.alone = 0, 0
		}
	}
	return nil
}

// operate is an operator pressing a button.
func (p *simRetries) operate() {
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

// work commits or answers the task of a worker.
func (p *simRetries) work(w *simWorker) {
	c := w.task
	if c == nil {
		return
	}
	if !c.committed {
		c.committed = true
		if p.faults && p.rng.IntN(12) == 0 {
			c.err = errors.New("connection lost before")
			return
		}
		c.found, c.err = c.do(taskContext{Context: context.Background(), store: p, clock: func() time.Time { return p.now }, moveOrDelete: alwaysMove})
		if c.err == nil && p.faults && p.rng.IntN(12) == 0 {
			c.err, c.lost = errors.New("answer lost"), true
		}
		return
	}
	w.task = nil
	// What took effect, and was not answered, is lost; what the database refused did not.
	kind := taskLost
	if c.err != nil && !c.lost {
		kind = taskError(p.rng.IntN(3)) //nolint:gosec // small
	}
	w.taskDone(p.now, taskAnswer{found: c.found, err: c.err, kind: kind, retryIn: time.Millisecond})
}

// alwaysMove is an outbox whose history works.
func alwaysMove(remove func(ctx context.Context, move bool) (int, error)) error {
	_, err := remove(context.Background(), true)
	return err
}
