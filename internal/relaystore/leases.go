package relaystore

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// Fence is a lease as its holder knows it. A fenced write takes effect only while the
// row of the lease still matches.
type Fence struct {
	Lane  int
	Owner string
	Epoch int64
}

// ErrFenced is the result of a fenced write of a former owner: nothing was written.
var ErrFenced = errors.New("the lane belongs to another worker")

// Identity is how a running worker identifies itself.
type Identity struct {
	Owner    string // random, new at each start
	Name     string // for operators
	Ready    bool   // it can work
	Stopping bool
	Host     string
	Version  string // of the program
	Problem  string // why it is not ready; short, for operators
}

// Leases are the exclusive, expiring rights of workers to lanes, and the workers that
// are alive. The lane [UpkeepLane] has a lease, too.
type Leases interface {
	// Beat keeps the worker registered as alive and extends its leases on lanes. It
	// returns all lanes of the worker: the extended ones, those not in lanes, and those
	// that it could not extend because somebody has locked them.
	Beat(ctx context.Context, me Identity, lanes []int, term time.Duration) (held map[int]Renewal, err error)

	// Census returns all leases and the workers that are alive.
	Census(ctx context.Context) ([]Lease, []Worker, error)

	// Take leases up to most of those lanes that are still free, each with a new epoch.
	// It counts a crash for a lane whose lease another owner let expire with messages
	// that may have been in flight. It does not if two or more other owners have let
	// leases expire: that was an outage of the database.
	Take(ctx context.Context, owner string, lanes []int, most int, term time.Duration) (map[int]Taken, error)

	// Expire ends leases and workers that nobody has renewed since they were seen like
	// this: they date from before the database's clock was set back.
	Expire(ctx context.Context, leases []Lease, peers []Worker) error

	// ExpireFormer ends the leases and the registration of other workers with the same
	// name.
	ExpireFormer(ctx context.Context, me Identity) error

	// Release frees lanes that are still the owner's, in these epochs. Of those in unsure the next owner
	// may send again what has arrived: see Taken.UnsureUntil.
	Release(ctx context.Context, owner string, epochs map[int]int64, unsure []int) error

	// Leave frees all lanes of a worker that has stopped, and removes it from those registered as alive.
	// Of lanes not in sure the next owner may send again what has arrived.
	Leave(ctx context.Context, owner string, sure []int) error

	// Flush returns when everything that was committed before is durable.
	Flush(ctx context.Context, owner string) error

	// Guard locks a lease in tx and reports whether it is the owner's, with that epoch.
	Guard(ctx context.Context, tx *sql.Tx, lane int, owner string, epoch int64) (bool, error)
}

// Crashes are what is known of lanes whose workers have died.
type Crashes interface {
	// SetAlone records the one message that is about to be in flight alone, or WholeLane,
	// or with id 0 that there is nothing.
	SetAlone(ctx context.Context, f Fence, id int64) error

	// ClearCrashes resets the crash count of lanes whose epochs still match.
	ClearCrashes(ctx context.Context, owner string, epochs map[int]int64) error
}

// WholeLane in place of the id of a message alone in flight stands for several of its lane,
// without any of another lane with two crashes or more.
const WholeLane = -1

// UpkeepLane is the lease under which one worker maintains the tables.
const UpkeepLane = -1

// Lease is a row of relay_leases as one statement saw it.
type Lease struct {
	Lane  int
	Owner string
	Epoch int64
	Left  time.Duration // until it expires, by the database's clock; negative since it did
	Until int64         // when that is, in microseconds
}

// Worker is a live row of relay_workers.
type Worker struct {
	Owner    string
	Ready    bool // reaches its sink
	Stopping bool
	Until    int64 // when it stops counting, in microseconds
}

// Renewal is a lease as seen by a heartbeat.
type Renewal struct {
	Epoch   int64
	Renewed bool // it was extended
}

// Taken is a lease that was taken.
type Taken struct {
	Epoch   int64
	Crashes int   // takeovers in a row without a window confirmed
	Alone   int64 // id that was alone in flight when the former owner died, or WholeLane; 0: none

	// Former owners may have sent messages that were created up to then, and recorded no answer.
	// It is a minute after the last lease expired that was not given back, or after the lane was given
	// back as unsure, and never earlier than before. Zero: neither has happened.
	UnsureUntil time.Time
}
