package keystore_test

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/keystore"
)

func (s *suite) countsStarted() {
	s.Helper()
	for i := range 4 {
		c := newClaim()
		if i == 3 {
			c.Endpoint = "POST /refunds"
		}
		owner := s.claimed(c)
		switch i {
		case 1:
			s.expectOwned("complete", true)(s.Complete(s.Context(), c.ID, owner, completion()))
		case 2:
			s.expectOwned("extend", true)(s.Extend(s.Context(), c.ID, owner, -time.Second))
		}
	}
	counts, err := s.CountStarted(s.Context(), 10)
	s.must(err)
	for i := range counts {
		if age := counts[i].Oldest; age < 0 || age > time.Hour {
			s.Errorf("%+v", counts[i])
		}
		counts[i].Oldest = 0
	}
	want := []keystore.StartedCount{
		{Endpoint: "POST /orders", Running: false, N: 1}, {Endpoint: "POST /orders", Running: true, N: 1}, {Endpoint: "POST /refunds", Running: true, N: 1},
	}
	if !slices.Equal(counts, want) {
		s.Errorf("counted %+v, want %+v", counts, want)
	}
	counts, err = s.CountStarted(s.Context(), 1)
	if s.must(err); len(counts) != 1 || counts[0].N != 1 {
		s.Errorf("at most one: %+v", counts)
	}
	s.changes(`analyze {{idempotency}}`)
	if n, estimated, err := s.CountStored(s.Context(), 100); err != nil || n != 4 || estimated == s.sqlite {
		s.Errorf("estimate %d, %v", n, err)
	}
}
