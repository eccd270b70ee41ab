package group

import (
	"context"
	"time"
)

// Limits of what is done together.
type Limits struct {
	Size    int           // members of a group
	Bytes   int           // of its members; a single one may have more
	Wait    time.Duration // of the first member for others
	Writers int           // transactions that the database lets write at once; 0: many

	// MaxWait is how long a member waits for somebody to take it along before it goes
	// its own way; 0: for ever.
	MaxWait time.Duration
}

// Work does what its members want, and tells what has become of each.
type Work[W, R any] interface {
	// Together is one try for all of members, sorted by Key and ID. It settles each,
	// by Finish or Alone, or returns it to be tried again: in a group with whoever comes
	// if they were InTheWay, else without those that were settled. ctx has the values of
	// the first member's, and ends when those of all have ended.
	Together(ctx context.Context, members []*Member[W, R]) (again []*Member[W, R], result Result)

	// Alone is a try for one.
	Alone(ctx context.Context, w W) (R, Result)
}

// Result of a try, by which groups become larger or smaller.
type Result int

const (
	Failed   Result = iota // for a reason that has nothing to do with their size
	Clean                  // it has committed
	InTheWay               // its locks were in the way of others: try again, with fewer
)

// Member is one of those that come at the same time.
type Member[W, R any] struct {
	Work  W
	ID    string // no two of a group have the same
	Key   string // nor this, where it is not ""
	Bytes int
	Since time.Time // its arrival: the oldest are taken first

	ctx     context.Context //nolint:containedctx // of the member, while it is here
	leader  bool            // it has been told to lead; guarded by the group's mu
	failed  int             // groups that it was part of and that were given up
	verdict chan verdict[R]
}

// Context is that of the member alone.
func (m *Member[W, R]) Context() context.Context { return m.ctx }

// Finish tells the member that it is over.
func (m *Member[W, R]) Finish(r R) { m.verdict <- verdict[R]{do: finish, result: r} }

// Alone tells the member to go its own way.
func (m *Member[W, R]) Alone() { m.verdict <- verdict[R]{do: runAlone} }

// mostFailed is the number of groups after which a member goes its own way.
const mostFailed = 3

// verdict tells a member what has become of it, or what to do.
type verdict[R any] struct {
	do     task
	result R
}

type task int

const (
	finish   task = iota // it is over
	lead                 // take some along and handle them
	runAlone             // in a transaction of its own
)
