package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// memStore is a store in memory, for one worker and no faults.
type memStore struct {
	taskStore
	parked map[int64]*relaystore.Row // by id
	timed  map[int64]bool
	moved  []string // keys that were swept
	stays  string   // a key that cannot be
	looks  int
	rows   int // brought by looks
}

func newMemStore() *memStore {
	return &memStore{parked: map[int64]*relaystore.Row{}, timed: map[int64]bool{}}
}

func (s *memStore) put(lane int, id int64, topic, key string) {
	s.parked[id] = &relaystore.Row{Row: outboxstore.Row{Ref: outboxstore.Ref{Lane: lane, ID: id, MessageID: fmt.Sprint("m", id)}, Topic: topic, Key: key, Payload: []byte("x")}}
	s.promote(lane, key)
	if key == "" {
		s.timed[id] = true
	}
}

func (s *memStore) ids(lane int, key string) (ids []int64) {
	for _, id := range slices.Sorted(maps.Keys(s.parked)) {
		if r := s.parked[id]; r.Lane == lane && r.Key == key {
			ids = append(ids, id)
		}
	}
	return ids
}

func (s *memStore) promote(lane int, key string) {
	if key == "" {
		return
	}
	for i, id := range s.ids(lane, key) {
		if i == 0 {
			s.timed[id] = true
		} else {
			delete(s.timed, id)
		}
	}
}

func (s *memStore) Due(_ context.Context, r relaystore.DueRequest) (relaystore.Due, error) {
	s.looks++
	found, next := s.due(r)
	s.rows += len(found)
	return relaystore.Due{Rows: found, Next: next}, nil
}

func (s *memStore) due(r relaystore.DueRequest) (found []relaystore.Row, next time.Duration) {
	for _, id := range slices.Sorted(maps.Keys(s.timed)) {
		h := s.parked[id]
		if !slices.Contains(r.Lanes, h.Lane) || slices.Contains(r.Known, h.Known()) || slices.Contains(r.ExceptTopics, h.Topic) {
			continue
		}
		if r.Heads--; r.Heads < 0 {
			return found, 0
		}
		ids := []int64{id}
		if h.Key != "" {
			ids = s.ids(h.Lane, h.Key)
			ids = ids[:min(len(ids), r.Rows)]
		}
		for _, id := range ids {
			found = append(found, *s.parked[id])
		}
	}
	return found, -1
}

func (s *memStore) Remove(_ context.Context, refs []outboxstore.Ref, _ bool) (removal relaystore.Removal, err error) {
	for _, ref := range refs {
		r := s.parked[ref.ID]
		if r == nil {
			continue
		}
		delete(s.parked, ref.ID)
		delete(s.timed, ref.ID)
		s.promote(r.Lane, r.Key)
		if r.Key != "" && len(s.ids(r.Lane, r.Key)) == 0 {
			removal.Ended = append(removal.Ended, relaystore.Key{Lane: r.Lane, Key: r.Key})
		}
	}
	return removal, nil
}

func (s *memStore) Keys(_ context.Context, lanes []int) (keys []relaystore.Key, err error) {
	for _, id := range slices.Sorted(maps.Keys(s.parked)) {
		if r := s.parked[id]; r.Key != "" && slices.Contains(lanes, r.Lane) && !slices.Contains(keys, relaystore.Key{Lane: r.Lane, Key: r.Key}) {
			keys = append(keys, relaystore.Key{Lane: r.Lane, Key: r.Key})
		}
	}
	return keys, nil
}

func (s *memStore) Commands(context.Context, []int, int) ([]relaystore.Command, error) {
	return nil, nil
}

func (s *memStore) FindOtherTopics(context.Context, []int, []string, int) (map[int]int64, error) {
	return map[int]int64{}, nil
}

func (s *memStore) ClearCrashes(context.Context, string, map[int]int64) error { return nil }

func (s *memStore) SetAlone(context.Context, relaystore.Fence, int64) error { return nil }

func (s *memStore) Follow(_ context.Context, _ relaystore.Fence, keys []string, _ []outboxstore.Known, _ int) (int, error) {
	if slices.Contains(keys, s.stays) {
		return 0, errors.New("a trigger")
	}
	s.moved = append(s.moved, keys...)
	return 0, nil
}

func (s *memStore) Fail(_ context.Context, _ relaystore.Fence, failures []relaystore.Failure, followers []outboxstore.Ref) error {
	return nil
}
