// Package turn lets those who write to a SQLite database through one handle take turns.
//
// SQLite has one writer at a time, and whoever finds another one there tries again
// after a pause. With several writers in a process, those that come often win, and
// others wait for as long as there is load. Here the turn goes from one to the next in
// the order in which they asked, renewals of leases first.
//
// The order: a heartbeat, if one waits; else, if both a caller's transaction and
// the background's wait, the kind that was not the last one. So the background,
// whose work empties the tables, waits for one transaction of a caller and not for all
// of them, and a caller for one of the background.
//
// Other processes, and transactions that are begun by hand, do not take the turn.
// They meet SQLite's lock, see [Turn.Begin]; for their sake the turn rests a moment
// after a transaction that was long.
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
	Caller                 // somebody waits for it
	Background             // of a relay, or upkeep
	kinds
)

const (
	// Slice is how long a transaction of the background holds the turn while others
	// wait for it; what is left to do is done in the next one.
	Slice = 40 * time.Millisecond

	// mostAlone is how long it holds it while nobody else of this process waits:
	// others may.
	mostAlone = 250 * time.Millisecond

	// maxWait is how long one holder of the turn, or others with the lock, are waited
	// for. It may be who waits itself, by a transaction that its context does not know.
	maxWait = 10 * time.Second
)

// Turns is the turn of one database handle.
type Turns struct {
	mu       sync.Mutex // guards what follows
	held     bool
	since    time.Time      // when it last went to somebody
	tx       *sql.Tx        // of the holder, if that is known
	waiting  [kinds][]*wait // in the order of asking
	favoured Kind           // Caller or Background, when both wait

	file file

	checked atomic.Bool  // the settings of the database
	busy    atomic.Int64 // its busy timeout in milliseconds; 0: not known yet
}

// wait is one who waits. granted is closed when it has the turn.
type wait struct{ granted chan struct{} }

// all finds the turn of a handle, as long as that lives.
var all = struct {
	sync.Mutex // guards turns
	turns      map[weak.Pointer[sql.DB]]*Turns
}{turns: map[weak.Pointer[sql.DB]]*Turns{}}

// Of returns the turn of a handle.
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

// Checked reports that the settings of the database have been found right.
func (t *Turns) Checked() bool { return t.checked.Load() }

// Passed notes that the settings of the database are right.
func (t *Turns) Passed() { t.checked.Store(true) }

// Turn is the turn in the hands of its holder.
type Turn struct {
	turns *Turns
	began time.Time
	give  sync.Once
}

// Take waits for the turn until ctx ends, or gives up with [ErrLocked] when one holder has
// kept the turn for ten seconds. A context whose own transaction holds the turn gets
// [ErrNested] at once.
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

// heldBy reports that the transaction in ctx is the holder's.
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

// stuck reports that one holder has had the turn for too long.
func (t *Turns) stuck() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.held && time.Since(t.since) > maxWait
}

// leave ends a wait in vain. If the turn came at that moment, it goes on.
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

// pass gives the turn to the next one. The caller holds mu.
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

// next says which kind is next, and whether somebody waits at all.
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

// Runs says that the holder runs tx, so that who asks for the turn with tx in its
// context is told instead of waiting for itself.
func (t *Turn) Runs(tx *sql.Tx) {
	t.turns.mu.Lock()
	defer t.turns.mu.Unlock()
	t.turns.tx = tx
}

// Over reports that a transaction of the background ought to commit and to go on in
// another one.
func (t *Turn) Over() bool {
	held := time.Since(t.began)
	return held > Slice && (held > mostAlone || t.turns.wanted())
}

// Give gives the turn to the next one; to call it again does nothing. After a
// transaction of some length the next one waits for a moment, a twenty-fifth of that
// time and at most two milliseconds, in which others than ours find no lock: a process
// that waits for it tries every millisecond.
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
		t.turns.tx = nil // it has ended
		t.turns.mu.Unlock()
		time.AfterFunc(rest, pass)
	})
}
