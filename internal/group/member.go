package group

import (
	"context"
	"time"
)

// Limits bound the groups.
type Limits struct {
	Size    int           // most members of a group
	Bytes   int           // most bytes of a group; a single member may have more
	Wait    time.Duration // how long a leader waits for a full group
	Writers int           // transactions that may write at once; 0: no limit

	// MaxWait is how long a member waits for a group before it runs alone; 0: no
	// limit.
	MaxWait time.Duration
}

// Work runs members and reports the outcome of each.
type Work[W, R any] interface {
	// Together tries all members once, sorted by Key and ID. It calls Finish or Alone
	// for a member, or returns it in again. If the result is Contended, the returned
	// members join new, smaller groups; otherwise they are tried again together. ctx
	// has the values of the first member's context, and ends when the contexts of all
	// members have ended.
	Together(ctx context.Context, members []*Member[W, R]) (again []*Member[W, R], result Result)

	// Alone tries one member once.
	Alone(ctx context.Context, w W) (R, Result)
}

// Result is the outcome of one try. It decides whether groups grow or shrink.
type Result int

const (
	Failed    Result = iota // for a reason unrelated to the group's size
	Clean                   // committed
	Contended               // lost against another transaction's locks: try again in smaller groups
)

// Member is one unit of work that can share a transaction with others.
type Member[W, R any] struct {
	Work  W
	ID    string // unique within a group
	Key   string // unique within a group, unless ""
	Bytes int
	Since time.Time // its arrival; the oldest are taken first

	ctx         context.Context //nolint:containedctx // of the member's Do
	leader      bool            // its instruction is lead; guarded by the group's mu
	failed      int             // contended groups that it was part of
	instruction chan instruction[R]
}

// Context returns the member's own context, not the group's.
func (m *Member[W, R]) Context() context.Context { return m.ctx }

// Finish ends the member's Do with r.
func (m *Member[W, R]) Finish(r R) { m.instruction <- instruction[R]{do: finish, result: r} }

// Alone makes the member run alone.
func (m *Member[W, R]) Alone() { m.instruction <- instruction[R]{do: runAlone} }

// mostFailed is the number of contended groups after which a member runs alone.
const mostFailed = 3

// instruction is a result for a member, or what it has to do next.
type instruction[R any] struct {
	do     task
	result R
}

type task int

const (
	finish   task = iota // return the result
	lead                 // take a group and run it
	runAlone             // run in its own transaction
)
