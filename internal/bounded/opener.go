package bounded

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/nopanic"
)

const (
	// openLimit is how long opening a connection apart from calls may take, or as long as its call.
	openLimit = 15 * time.Second

	// A slow pool begins to open a connection after firstPause, then after twice that, and so on, but
	// at least every lastPause.
	firstPause = 50 * time.Millisecond
	lastPause  = time.Second

	// In a pool with a limit, only the first of so many places are for connections that are opened apart.
	// More would leave too few to calls. They would queue up for them, and database/sql opens
	// connections for its queue one after the other, without any limit of time.
	partApart = 4

	// mostVain is how many calls may then try by themselves in vain, before one more is opened apart,
	// unless the pool has a single place.
	mostVain = 4

	// mostApart is how many are opened apart at a time, at most: a driver may never return.
	mostApart = 16

	// look is how long a call waits, on average, before it looks again for an idle connection.
	// database/sql does not tell when there is one.
	look = 50 * time.Millisecond
)

// opener keeps calls from opening connections for which they have no time.
//
// To open one may take longer than a call: of several addresses the first may be silent, and a
// server that has just become the primary has many clients to accept. A connection that is given
// up half-way costs the server nearly as much as one that is used, and whoever gave it up begins
// anew. So a busy server whose clients have short limits might stay busy for ever, and none of
// them ever be connected.
//
// Therefore a pool is slow after a call that had no answer or no connection. In a slow pool a call
// without an idle connection waits for one. One call at a time may begin to open one, after growing
// pauses, or when the last has ended. If the pool has places to spare, it is opened apart from the call, and
// may take longer than it. When one is open within the time of its call, calls have time for it again,
// and open their own. So many processes connect by and by: those that failed ask the server for few
// connections, and keep what it has accepted.
//
// A call that had to wait shows nothing if it fails, since it had less time. Calls that have more than
// twice the time of those that failed do not wait, and a pool that is full is left alone.
type opener struct {
	db *sql.DB

	mu    sync.Mutex    // guards the fields below
	well  chan struct{} // closed when the pool is not slow any more; nil if it is not
	next  time.Time     // when the next connection may be begun
	pause time.Duration // between that and the one after it
	apart int           // how many are being opened apart from calls
	vain  int           // how many calls try by themselves, or have tried in vain
	short time.Duration // a call failed although it had so much time
}

// failed is called after a call that had no answer or no connection, although it had the given time, all
// for itself.
func (o *opener) failed(given time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.well == nil {
		o.well, o.next, o.pause, o.short = make(chan struct{}), time.Time{}, firstPause, 0
	}
	o.short = max(o.short, given)
}

// tried is called when a call that opened its own connection has ended within its time: it was
// refused, or all is well.
func (o *opener) tried(well bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.next, o.vain = time.Time{}, max(0, o.vain-1)
	if well {
		o.recovered()
	}
}

// recovered is called when a call had time to open a connection. The caller holds mu.
func (o *opener) recovered() {
	o.vain = 0
	if o.well != nil {
		close(o.well)
		o.well = nil
	}
}

// full reports whether calls have to wait for places of a pool that is not slow.
func (o *opener) full() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.well == nil && Full(o.db.Stats())
}

// Full reports whether a call has to wait for a place of a pool.
func Full(pool sql.DBStats) bool {
	return pool.MaxOpenConnections > 0 && pool.InUse >= pool.MaxOpenConnections
}

// slow returns nil unless a call would have to open a connection, for which it may have no time. Then
// it returns o.well.
func (o *opener) slow(ctx context.Context) (well <-chan struct{}) {
	end, _ := ctx.Deadline() // the context of a call has one
	o.mu.Lock()
	well = o.well
	patient := time.Until(end)/2 > o.short
	o.mu.Unlock()
	if well == nil || patient {
		return nil
	}
	pool := o.db.Stats()
	if pool.Idle > 0 || Full(pool) {
		return nil
	}
	return well
}

// ready returns when a call may take a connection from the pool, or when ctx, its context, ends. If
// tries is true, the call opens its own, and tells how that went.
func (o *opener) ready(ctx context.Context) (tries, waited bool) {
	end, _ := ctx.Deadline()
	late := time.Now().Add(time.Until(end) / 2)
	var opened <-chan struct{} // what this call has begun; nil: nothing
	for well := o.slow(ctx); well != nil; well = o.slow(ctx) {
		if opened == nil {
			if opened, tries = o.begin(ctx); tries {
				return true, waited
			}
		}
		waited = true
		select {
		case <-well:
			return false, true
		case <-opened: // if it has failed, the call finds out why
			return false, true
		case <-ctx.Done():
			return false, true
		case <-time.After(look/2 + rand.N(look)): //nolint:gosec // not a secret
		}
		if opened == nil && time.Now().After(late) {
			// Others have more time for an idle connection. It would be closed with a statement that
			// has too little.
			select {
			case <-well:
			case <-ctx.Done():
			}
			return false, true
		}
	}
	return false, waited
}

// begin begins to open a connection, if it is time to, and returns a channel that is closed at its end.
// If tries is true, the call opens its own instead.
func (o *opener) begin(ctx context.Context) (opened <-chan struct{}, tries bool) {
	pool := o.db.Stats()
	most := pool.MaxOpenConnections
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.well == nil || now.Before(o.next) {
		return nil, false
	}
	o.next, o.pause = now.Add(o.pause), min(2*o.pause, lastPause)
	crowded := most > 0 && pool.OpenConnections >= most/partApart
	if crowded && o.vain >= mostVain && most > 1 {
		crowded = o.apart > 0 // calls have no time at all
	}
	if crowded || o.apart >= mostApart {
		o.vain++
		return nil, true
	}
	o.apart++
	ended := make(chan struct{})
	go o.open(ctx, o.well, ended)
	return ended, false
}

// open opens a connection for the call that has ctx, unless the pool is well before, and closes ended.
func (o *opener) open(ctx context.Context, well <-chan struct{}, ended chan<- struct{}) {
	apart, cancel := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer cancel()
		select {
		case <-well: // a silent one would keep its place in the pool
			return
		case <-apart.Done():
			return
		case <-time.After(openLimit):
		}
		select {
		case <-well:
		case <-apart.Done():
		case <-ctx.Done():
		}
	}()
	open := false
	defer func() { // also when the driver ends its goroutine
		cancel()
		o.mu.Lock()
		defer o.mu.Unlock()
		o.next = time.Time{}
		o.apart--
		if inTime, _ := ctx.Deadline(); open && time.Now().Before(inTime) {
			o.recovered()
		}
		close(ended)
	}()
	_ = nopanic.Call(func() error { // calls see why it fails
		if o.db.Stats().Idle > 0 { // to take it shows nothing
			return nil
		}
		conn, err := o.db.Conn(apart)
		if err != nil {
			return err
		}
		open = true
		return conn.Close() // to the pool
	})
}
