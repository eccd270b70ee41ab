package dlq

import (
	"context"
	"fmt"
	"time"
)

// Group is a group of open dead letters that failed alike: of one source or consumer, with the same
// reason, and with errors that differ only in ids and numbers. List them with
// [Filter].Fingerprint.
type Group struct {
	Fingerprint string
	Count       int64
	First, Last time.Time // when the first and the last of them died

	// Newest is the id of one of them, which the rest is from.
	Newest   int64
	Source   Source
	Consumer string // "" if a relay wrote it
	Topic    string
	Reason   string
	Error    string
}

const (
	groupsLook = 10_000
	groupsMost = 1000
)

// Groups returns the groups of dead letters that are neither replayed nor discarded, the largest
// first, at most 1,000. It looks at the newest 10,000 in each state, so it costs the same however
// many there are; counts and first times are of those.
func (s *Store) Groups(ctx context.Context) ([]Group, error) {
	found, err := s.store.Groups(ctx, groupsLook, groupsMost)
	if err != nil {
		return nil, fmt.Errorf("dlq: group dead letters: %w", err)
	}
	groups := make([]Group, len(found))
	for i, g := range found {
		groups[i] = Group{
			Fingerprint: g.Fingerprint, Count: g.N, First: g.First, Last: g.Last, Newest: g.Newest,
			Source: Source(g.Source), Consumer: g.Consumer, Topic: g.Topic, Reason: g.Reason, Error: g.Error,
		}
	}
	return groups, nil
}
