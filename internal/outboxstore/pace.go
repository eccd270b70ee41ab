package outboxstore

import (
	"slices"
	"sync"
	"time"
)

// pace decides how many scheduled messages are moved at a time, and which are put
// aside.
type pace struct {
	mu         sync.Mutex // guards what follows
	halvings   int        // of the batch
	largeLimit time.Duration
	largeAt    time.Time // when the next large message may be tried
	aside      []aside   // in the order in which they were put aside
	most       int       // of them

	// Messages up to behind that are not put aside are left to rounds, which try them
	// one by one: too many could not be moved, or more than mostWaiting keys wait among
	// them.
	mostWaiting int
	behind      place
	round       place // everything up to it has been tried in this round
	roundAt     time.Time
	roundWait   time.Duration // of the next one
	missed      bool          // a message found no room in this round

	last attempt // the last one tried alone

	toldAt time.Time // last log entry about a message that could not be moved
	untold int       // since then
}

// aside is a message that could not be moved.
type aside struct {
	row
	bytes int64
	limit time.Duration // of the next attempt
	wait  time.Duration
	until time.Time
}

const (
	mostHalvings = 11 // one row

	// Every message that cannot be moved is tried again after a while.
	leastAside = 10 * time.Second
	longAside  = 10 * time.Minute

	// mostAside bounds how many such messages are tracked, and mostWaiting the keys
	// that a look passes over in addition.
	mostAside   = 10_000
	mostWaiting = 10_000

	// A large message gets the time that its size needs on a slow disk, but less than
	// ten seconds: the connection may be dead. It gets more once the server has
	// answered that this was not enough.
	largeBytesPerSecond = 20 << 20
	mostLargeLimit      = time.Minute
)

// attempt is what is tried alone.
type attempt int

const (
	ofNone attempt = iota
	ofAside
	ofRound
	ofLarge
)

// takeTurn chooses one of the things that may be tried alone. Each waits only until
// there is no other.
func (p *pace) takeTurn(aside, round, large bool) attempt {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range attempt(3) {
		one := 1 + (p.last+i)%3
		if one == ofAside && aside || one == ofRound && round || one == ofLarge && large {
			p.last = one
			return one
		}
	}
	return ofNone
}

// turnAgain repeats a turn that asked for more time: the next call, which has it, gets
// it.
func (p *pace) turnAgain(what attempt) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last = what - 1
}

// row is a scheduled message.
type row struct {
	place
	key string
}

// place is the position of a message in the order in which messages are due.
type place struct {
	at  string // as the database writes it
	seq int64
}

// All messages are between beginning and end.
var beginning, end = place{at: "-infinity"}, place{at: "infinity"}

// batch returns the rows and bytes of a batch.
func (p *pace) batch() (rows int, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(1, moveRows>>p.halvings), moveBytes >> p.halvings
}

// slower halves the batch, and reports whether that is possible.
func (p *pace) slower() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.halvings == mostHalvings {
		return false
	}
	p.halvings++
	return true
}

// took doubles the batch after one that used only a small part of its time.
func (p *pace) took(elapsed, limit time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if elapsed < limit/8 {
		p.halvings = max(0, p.halvings-1)
	}
}

// tryLarge reports whether a large message may be tried. After one that took too long,
// smaller messages have their turn for a while.
func (p *pace) tryLarge(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !now.Before(p.largeAt)
}

// large returns the time limit of the statement that moves a message of the given size,
// which may have been put aside.
func (p *pace) large(seq, bytes int64) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	needs := max(moveLimits.Statement+time.Duration(bytes)*time.Second/largeBytesPerSecond, p.largeLimit)
	if i := p.find(seq); i >= 0 {
		needs = max(needs, p.aside[i].limit)
	}
	return min(needs, mostLargeLimit)
}

func (p *pace) find(seq int64) int {
	return slices.IndexFunc(p.aside, func(a aside) bool { return a.seq == seq })
}

// movedAlone records that a message was moved.
func (p *pace) movedAlone(seq, bytes int64, took, limit time.Duration) {
	p.mu.Lock()
	p.largeAt = time.Time{}
	if bytes > moveBytes {
		p.largeLimit = 2 * took
	}
	p.aside = slices.DeleteFunc(p.aside, func(a aside) bool { return a.seq == seq })
	p.mu.Unlock()
	if bytes <= moveBytes { // large only because the batch was halved
		p.took(took, limit)
	}
}

// failed puts a message aside, and returns for how long. If there is no room for it, it
// is left to rounds, with everything before it.
func (p *pace) failed(r row, bytes int64, limit time.Duration, late, inRound bool, now time.Time) (wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := p.find(r.seq)
	switch {
	case i >= 0:
	case len(p.aside) < p.most:
		i = len(p.aside)
		p.aside = append(p.aside, aside{row: r, bytes: bytes})
	case inRound:
		p.missed = true
		if late { // may need more time than a round gives
			p.largeLimit = min(2*limit, mostLargeLimit)
		}
		return p.roundWait
	default:
		p.leaveTo(r.place, now)
		return p.roundAt.Sub(now)
	}
	a := &p.aside[i]
	if late {
		a.limit, p.largeAt = min(2*limit, mostLargeLimit), now.Add(leastAside)
	}
	if a.wait = max(2*a.wait, leastAside); late && limit < mostLargeLimit {
		a.wait = leastAside
	}
	a.wait = min(a.wait, longAside)
	a.until = now.Add(a.wait)
	return a.wait
}

// tell reports whether to log that a message could not be moved, and how many there
// were since the last log entry: at most one a second.
func (p *pace) tell(now time.Time) (others int, due bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Sub(p.toldAt) < time.Second {
		p.untold++
		return 0, false
	}
	others, p.untold, p.toldAt = p.untold, 0, now
	return others, true
}

// forget drops a message from those put aside. It is gone, or it waits for another one
// of its key, as any message does.
func (p *pace) forget(seq int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.aside = slices.DeleteFunc(p.aside, func(a aside) bool { return a.seq == seq })
}

// retry returns the message put aside that is to be retried first.
func (p *pace) retry(now time.Time) (aside, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var first *aside
	for i, a := range p.aside {
		if !now.Before(a.until) && (a.limit == 0 || !now.Before(p.largeAt)) && (first == nil || a.until.Before(first.until)) {
			first = &p.aside[i]
		}
	}
	if first == nil {
		return aside{}, false
	}
	return *first, true
}

// retryIn returns when a message is to be retried, or when a round continues.
func (p *pace) retryIn(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	in := longAside
	for _, a := range p.aside {
		wait := a.until.Sub(now)
		if a.limit > 0 {
			wait = max(wait, p.largeAt.Sub(now))
		}
		in = min(in, wait)
	}
	if p.behind != beginning {
		in = min(in, p.roundAt.Sub(now))
	}
	return in
}

// notNow postpones what could not be looked at: the message that was put aside, or
// large ones.
func (p *pace) notNow(seq int64, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := p.find(seq); i >= 0 {
		p.aside[i].until = now.Add(leastAside)
	} else {
		p.largeAt = now.Add(leastAside)
	}
}

// leave leaves everything up to a place to rounds. It may be retried soon: the
// transactions that it waits for may have ended.
func (p *pace) leave(upTo place, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leaveTo(upTo, now)
}

// leaveTo is called with mu held.
func (p *pace) leaveTo(upTo place, now time.Time) {
	if p.behind == beginning {
		p.roundWait, p.roundAt = leastAside, now.Add(leastAside)
	}
	p.behind = upTo
}

// inRound returns the places between which a round tries the next message.
func (p *pace) inRound(now time.Time) (after, upTo place, due bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.round, p.behind, p.behind != beginning && !now.Before(p.roundAt)
}

// wentTo records that everything up to a place has been tried in this round.
func (p *pace) wentTo(last place) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.round = last
}

// roundLater makes the round continue after a while.
func (p *pace) roundLater(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.roundAt = now.Add(leastAside)
}

// roundOver records that a round has found nothing more. It was the last one if every
// message that could not be moved was put aside.
func (p *pace) roundOver(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.missed {
		p.behind = beginning
	}
	p.roundWait = min(2*p.roundWait, longAside)
	p.round, p.missed, p.roundAt = beginning, false, now.Add(p.roundWait)
}

// leftOut is what a look skips: the messages that are put aside, all of their keys, and
// everything that is left to rounds.
type leftOut struct {
	seqs  []int64
	keys  []string
	after place
}

func (p *pace) leftOut() leftOut {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := leftOut{seqs: []int64{}, keys: []string{}, after: p.behind}
	for _, a := range p.aside {
		o.seqs = append(o.seqs, a.seq)
		if a.key != "" {
			o.keys = append(o.keys, a.key)
		}
	}
	return o
}
