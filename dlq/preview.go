package dlq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/inboxstore"
)

// Preview is what a job would replay if it started now.
type Preview struct {
	Total   int64
	Partial bool // only the oldest 10,000 dead letters of each state were looked at, and there are more
	Counts  []PreviewCount

	// Uncounted is why Duplicates could not be counted; nil if they were. Errors of the
	// database: the table of the inbox is elsewhere, or its grant is missing.
	Uncounted error
}

// PreviewCount is a number of dead letters of one source or consumer, in one state.
type PreviewCount struct {
	Source   Source
	Consumer string // empty if a relay wrote them
	State    State
	Count    int64

	// MaybeDelivered is how many of them the broker may already have: a replay may deliver
	// those again. See Letter.MayHaveBeenDelivered.
	MaybeDelivered int64

	// Duplicates is how many of a consumer's it would drop, since its inbox has handled their
	// id, or since another one of the set has the same id.
	Duplicates int64
}

const previewLook = 10_000 // in each state

// PreviewJob counts the dead letters that a job with this plan would replay. It changes nothing.
// It looks at the oldest 10,000 of each state. Errors are those of StartJob. If ctx ends while it
// counts duplicates, Preview.Uncounted says so.
func (s *Store) PreviewJob(ctx context.Context, plan JobPlan) (*Preview, error) {
	resolved, err := plan.resolve()
	if err != nil {
		return nil, err
	}
	p := &Preview{}
	counts := map[PreviewCount]*PreviewCount{}
	seen := map[PreviewCount]map[string]int64{} // the ids of a consumer
	count := func(l *dlqstore.Letter) {
		of := PreviewCount{Source: Source(l.Source), Consumer: l.Consumer, State: State(l.State)}
		if counts[of] == nil {
			made := of
			counts[of] = &made
		}
		counts[of].Count++
		if l.MayHaveBeenDelivered {
			counts[of].MaybeDelivered++
		}
		if of.Source == FromConsumer {
			if seen[of] == nil {
				seen[of] = map[string]int64{}
			}
			seen[of][l.ReplayID()]++
		}
		p.Total++
	}
	if len(resolved.IDs) > 0 {
		err = s.previewIDs(ctx, resolved.IDs, count)
	} else {
		for _, state := range resolved.Filter.States {
			partial, listErr := s.previewState(ctx, resolved.Filter, state, count)
			if p.Partial, err = p.Partial || partial, listErr; err != nil {
				break
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("dlq: preview job: %w", err)
	}
	for of, ids := range seen {
		if counts[of].Duplicates, p.Uncounted = s.duplicates(ctx, of.Consumer, ids); p.Uncounted != nil {
			break
		}
	}
	for _, c := range counts {
		p.Counts = append(p.Counts, *c)
	}
	slices.SortFunc(p.Counts, func(a, b PreviewCount) int {
		return cmp.Or(cmp.Compare(a.Source, b.Source), cmp.Compare(a.Consumer, b.Consumer), cmp.Compare(a.State, b.State))
	})
	return p, nil
}

// duplicates returns how many dead letters of a consumer, which are counted by id, its inbox
// would drop.
func (s *Store) duplicates(ctx context.Context, consumer string, letters map[string]int64) (n int64, err error) {
	where := database.Of(s.cfg.Database)
	stored := inboxstore.Config{Consumer: consumer}.Resolve(where.Dialect, func(string, string, string) {}) // defaults are good
	ids := slices.Collect(maps.Keys(letters))
	for batch := range slices.Chunk(ids, actBatch) {
		handled, err := inboxstore.Open(s.db, where, stored).Handled(ctx, batch)
		if err != nil {
			return 0, fmt.Errorf("dlq: look for handled messages: %w", err)
		}
		n += int64(len(handled)) // one of each id, and those below
	}
	for _, count := range letters {
		n += count - 1
	}
	return n, nil
}

func (s *Store) previewIDs(ctx context.Context, ids []int64, count func(*dlqstore.Letter)) error {
	for batch := range slices.Chunk(ids, actBatch) {
		states, err := s.store.States(ctx, batch)
		if err != nil {
			return err
		}
		for id, state := range states {
			if State(state) != StateDead && State(state) != StateHeld {
				continue
			}
			l, err := s.store.Get(ctx, id)
			if errors.Is(err, ErrNotFound) { // purged meanwhile
				continue
			}
			if err != nil {
				return err
			}
			count(l)
		}
	}
	return nil
}

func (s *Store) previewState(ctx context.Context, f dlqstore.JobFilter, state string, count func(*dlqstore.Letter)) (partial bool, err error) {
	list := dlqstore.Filter{
		States: []string{state}, Source: f.Source, Consumer: f.Consumer, Topic: f.Topic, Key: f.Key, MessageID: f.MessageID,
		Reason: f.Reason, Fingerprint: f.Fingerprint, From: f.From, Until: f.Until, OldestFirst: true, Limit: mostLimit,
	}
	for range previewLook / mostLimit {
		page, err := s.store.List(ctx, list)
		if err != nil {
			return false, err
		}
		for _, l := range page {
			count(l)
			list.AfterDiedAt, list.AfterID = l.DiedAt, l.ID
		}
		if len(page) < mostLimit {
			return false, nil
		}
	}
	return true, nil
}
