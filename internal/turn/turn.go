// Package turn queues the writers of one SQLite database handle.
//
// SQLite has one writer at a time. Others retry after a pause, so that frequent writers
// starve infrequent ones. Here the turn to write passes from one to the next in the order
// of asking, lease renewals first.
//
// A waiting heartbeat goes first. If both callers' transactions and background work
// wait, the two kinds alternate. So background work, which empties the tables, waits for
// one transaction of a caller and not for all of them, and the other way round.
//
// Other processes, and transactions that are begun without this package, do not take
// turns. They compete for SQLite's lock (see [Turn.Begin]). For them, the turn pauses for
// a moment after a long transaction.
package turn

import (
	"context"
	"database/sql"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/oncemill/oncemill/internal/txcontext"
)

// Kind is a kind of transaction.
type Kind uint8

const (
	Heartbeat  Kind = iota // renews leases
	Caller                 // the transaction of a caller
	Background             // work of a relay, such as deletions and upkeep
	kinds
)

const (
	// Slice is how long a background transaction may keep the turn while others wait.
	// The rest of its work goes into the next transaction.
	Slice = 40 * time.Millisecond

	// mostAlone is how long it may keep the turn while nobody in this process waits.
	// Other processes may wait.
	mostAlone = 250 * time.Millisecond

	// maxWait is how long to wait for one holder of the turn, or for SQLite's lock. The
	// holder may be the waiter itself, with a transaction that is not in its context.
	maxWait = 10 * time.Second
)

// Turns queues the writers of one database handle.
type Turns struct {
	mu       sync.Mutex // guards the fields up to favoured
	held     bool
	since    time.Time      // when the turn last passed
	tx       *sql.Tx        // of the holder, if known
	waiting  [kinds][]*wait // in the order of asking
	favoured Kind           // Caller or Background: goes first when both wait

	file file

	checked atomic.Bool  // the settings of the database are right
	busy    atomic.Int64 // its busy timeout in milliseconds; 0: unknown
}

// wait is a waiting writer. granted is closed when it gets the turn.
type wait struct{ granted chan struct{} }

// all maps each handle to its Turns, without keeping the handle alive.
var all = struct {
	sync.Mutex // guards turns
	turns      map[weak.Pointer[sql.DB]]*Turns
}{turns: map[weak.Pointer[sql.DB]]*Turns{}}

// Of returns the Turns of a handle.
func Of(db *sql.DB) *Turns {
	key := weak.Make(db)
	all.Lock()
	defer all.Unlock()
	t := all.turns[key]
	if t == nil {
		t = &Turns{favoured: Caller}
		all.turns[key] = t
		runtime.AddCleanup(db, forget, key)
	}
	return t
}

func forget(key weak.Pointer[sql.DB]) {
	all.Lock()
	defer all.Unlock()
	delete(all.turns, key)
}

// Checked reports whether [Turns.Passed] was called.
func (t *Turns) Checked() bool { return t.checked.Load() }

// Passed records that the settings of the database are right.
func (t *Turns) Passed() { t.checked.Store(true) }

// Turn is the right to write. [Turn.Give] passes it on.
type Turn struct {
	turns *Turns
	began time.Time
	give  sync.Once
}

// Take waits for the turn until ctx ends. It returns [ErrLocked] if one holder keeps the
// turn for ten seconds, and [ErrNested] at once if the transaction in ctx holds it.
func (t *Turns) Take(ctx context.Context, kind Kind) (*Turn, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("wait for the turn to write: %w", err)
	}
	t.mu.Lock()
	if t.heldBy(ctx) {
		t.mu.Unlock()
		return nil, ErrNested
	}
	if !t.held {
		t.held, t.since = true, time.Now()
		t.mu.Unlock()
		return t.taken(), nil
	}
	w := &wait{granted: make(chan struct{})}
	t.waiting[kind] = append(t.waiting[kind], w)
	t.mu.Unlock()
	err := t.await(ctx, w)
	if err == nil {
		return t.taken(), nil
	}
	t.leave(kind, w)
	return nil, err
}

func (t *Turns) taken() *Turn { return &Turn{turns: t, began: time.Now()} }

// heldBy reports whether the transaction in ctx holds the turn.
func (t *Turns) heldBy(ctx context.Context) bool {
	if t.tx == nil {
		return false
	}
	switch tx := txcontext.From(ctx).(type) {
	case *sql.Tx:
		return tx == t.tx
	case interface{ Wraps(tx *sql.Tx) bool }:
		return tx.Wraps(t.tx)
	}
	return false
}

func (t *Turns) await(ctx context.Context, w *wait) error {
	checks := time.NewTicker(maxWait / 10)
	defer checks.Stop()
	for {
		select {
		case <-w.granted:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("wait for the turn to write: %w", ctx.Err())
		case <-checks.C:
			if t.stuck() {
				return ErrLocked
			}
		}
	}
}

// stuck reports whether one holder has kept the turn for too long.
func (t *Turns) stuck() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.held && time.Since(t.since) > maxWait
}

// leave removes a writer that gave up. If it got the turn at that moment, the turn passes on.
func (t *Turns) leave(kind Kind, w *wait) {
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-w.granted:
		t.pass()
		return
	default:
	}
	for i, other := range t.waiting[kind] {
		if other == w {
			t.waiting[kind] = append(t.waiting[kind][:i], t.waiting[kind][i+1:]...)
			return
		}
	}
}

// pass gives the turn to the next writer. The caller holds mu.
func (t *Turns) pass() {
	t.tx = nil
	kind, ok := t.next()
	t.held = ok
	if !ok {
		return
	}
	w := t.waiting[kind][0]
	t.waiting[kind] = t.waiting[kind][1:]
	t.since = time.Now()
	close(w.granted)
}

// next returns the kind that is next, and false if nobody waits.
func (t *Turns) next() (Kind, bool) {
	other := Caller + Background - t.favoured
	switch {
	case len(t.waiting[Heartbeat]) > 0:
		return Heartbeat, true
	case len(t.waiting[t.favoured]) > 0:
		kind := t.favoured
		t.favoured = other
		return kind, true
	case len(t.waiting[other]) > 0:
		return other, true
	}
	return 0, false
}

func (t *Turns) wanted() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.waiting[Heartbeat])+len(t.waiting[Caller])+len(t.waiting[Background]) > 0
}

// Runs records the holder's transaction. A Take with tx in its context then returns
// [ErrNested] instead of waiting for itself.
func (t *Turn) Runs(tx *sql.Tx) {
	t.turns.mu.Lock()
	defer t.turns.mu.Unlock()
	t.turns.tx = tx
}

// Over reports whether a background transaction should commit and continue in another one.
func (t *Turn) Over() bool {
	held := time.Since(t.began)
	return held > Slice && (held > mostAlone || t.turns.wanted())
}

// Give passes the turn on. Further calls do nothing. After a long transaction the next
// writer waits for a twenty-fifth of its duration, at most two milliseconds. Meanwhile
// SQLite's lock is free for other processes, which try every millisecond.
func (t *Turn) Give() {
	t.give.Do(func() {
		const share, least, most = 25, 500 * time.Microsecond, 2 * time.Millisecond
		rest := min(time.Since(t.began)/share, most)
		pass := func() {
			t.turns.mu.Lock()
			defer t.turns.mu.Unlock()
			t.turns.pass()
		}
		if rest < least {
			pass()
			return
		}
		t.turns.mu.Lock()
		t.turns.tx = nil // the transaction has ended
		t.turns.mu.Unlock()
		time.AfterFunc(rest, pass)
	})
}
