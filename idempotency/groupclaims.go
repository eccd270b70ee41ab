package idempotency

import (
	"context"
	"log/slog"
	"math"
	"time"

	"github.com/oncemill/oncemill/internal/group"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// claims makes claims with one statement, so that they share the cost of its commit.
type claims struct {
	store *SQLStore
	log   *slog.Logger
	group *group.Group[Claim, claimEnd]
}

// claimEnd is what [Store.Claim] returns.
type claimEnd struct {
	record  Record
	granted bool
	err     error
}

// groupWait is how long a request waits for a group, and a group for one handler.
const groupWait = time.Second

// groupLimits are the limits of groups of claims, and of requests.
func groupLimits(size int, store *SQLStore) group.Limits {
	limits := group.Limits{Size: size, Bytes: math.MaxInt, MaxWait: groupWait}
	if store.keys.Traits().OneWriter {
		limits.Writers = 1
	}
	return limits
}

func newClaims(store *SQLStore, limits group.Limits, log *slog.Logger) *claims {
	c := &claims{store: store, log: log}
	c.group = group.New(limits, c)
	return c
}

// claim makes a claim, possibly together with others.
func (c *claims) claim(ctx context.Context, claim Claim) (Record, bool, error) {
	if claim.Durable || !c.store.keys.Traits().ClaimsTogether { // a durable claim waits for the disk
		return c.store.Claim(ctx, claim)
	}
	end, done := c.group.Do(ctx, &group.Member[Claim, claimEnd]{Work: claim, ID: string(claim.ID[:]), Since: time.Now()})
	if !done {
		return Record{}, false, ctx.Err()
	}
	return end.record, end.granted, end.err
}

// Alone makes one claim.
func (c *claims) Alone(ctx context.Context, claim Claim) (claimEnd, group.Result) {
	record, granted, err := c.store.Claim(ctx, claim)
	return claimEnd{record, granted, err}, group.Clean
}

// Together makes several claims. If anything goes wrong, each is made alone. So is a copy
// of a key that arrives at the same time, since it was not part of the statement.
func (c *claims) Together(ctx context.Context, members []*group.Member[Claim, claimEnd]) ([]*group.Member[Claim, claimEnd], group.Result) {
	if len(members) == 1 {
		end, result := c.Alone(ctx, members[0].Work) // here, so that others can join the next group
		members[0].Finish(end)
		return nil, result
	}
	all := make([]Claim, len(members))
	for i, m := range members {
		all[i] = m.Work
	}
	records, found, err := c.store.claimAll(ctx, all)
	result := group.Clean
	if err != nil {
		c.log.LogAttrs(ctx, slog.LevelDebug, "keys not claimed together", slog.Any("error", err))
		result = group.Failed
		if sqlerr.Retryable(err) {
			result = group.Contended
		}
	}
	for i, m := range members {
		if err != nil || !found[i] {
			m.Alone()
			continue
		}
		m.Finish(claimEnd{record: records[i], granted: grants(records[i], m.Work)})
	}
	return nil, result
}
