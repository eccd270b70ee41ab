package keystore_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/keystore"
)

// The contract of Operators, on each database. package idempotency tests what an Admin
// makes of it.
func TestOperators(t *testing.T) {
	t.Parallel()
	for name, open := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for name, test := range map[string]func(*suite, *keystore.Operators){
				"a record is found by any of its prefixes":           (*suite).findsByPrefix,
				"slices cover each record once":                      (*suite).slices,
				"an act changes a record only as it was seen":        (*suite).actsAsSeen,
				"a large answer of an operator comes back":           (*suite).settlesLarge,
				"what is due is deleted unless it was claimed again": (*suite).deletesDue,
			} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					s := newSuite(t, open, false)
					cfg := s.where.Config()
					s.must(oncemill.Migrate(t.Context(), s.db, cfg, oncemill.Migrations{Name: "audit", FS: auditstore.Migrations}))
					test(s, keystore.OpenOperators(s.db, s.where))
				})
			}
		})
	}
}

var act = keystore.Act{By: "ada", Reason: "test"}

func (s *suite) findsByPrefix(o *keystore.Operators) {
	ids := []keystore.ID{{}, {1}, {1, 1}, {1, 255}, {2}, {255, 255}}
	ids = append(ids, keystore.ID(bytes.Repeat([]byte{255}, 32)), keystore.ID(append(bytes.Repeat([]byte{255}, 31), 0)), keystore.ID(append(make([]byte, 31), 1)))
	for _, id := range ids {
		c := newClaim()
		c.ID = id
		s.claimed(c)
	}
	for _, id := range ids {
		for n := range len(id) {
			prefix := id[:n+1]
			var want []keystore.ID
			for _, other := range ids {
				if bytes.HasPrefix(other[:], prefix) {
					want = append(want, other)
				}
			}
			found, err := o.Prefixed(s.Context(), prefix, 100)
			s.must(err)
			if len(found) != len(want) {
				s.Fatalf("%x: %d records, want %d", prefix, len(found), len(want))
			}
			for _, f := range found {
				if !slices.Contains(want, f.ID) {
					s.Errorf("%x: found %x", prefix, f.ID)
				}
			}
		}
	}
}

func (s *suite) slices(o *keystore.Operators) {
	const n = 23
	caller := newClaim().Caller
	for i := range n {
		c := newClaim()
		if i%2 == 0 {
			c.Caller = caller
		}
		s.claimed(c)
	}
	for _, size := range []int{1, 5, 22, 23, 24} {
		seen, of, from := 0, 0, []byte(nil)
		for more := true; more; {
			end, next, err := o.Slice(s.Context(), from, size)
			s.must(err)
			found, err := o.Between(s.Context(), from, end, keystore.Filter{Phases: keystore.PhaseAny, Limit: n})
			s.must(err)
			count, err := o.KeysOf(s.Context(), caller, from, end)
			s.must(err)
			if len(found) > size {
				s.Errorf("a slice of %d has %d", size, len(found))
			}
			seen, of, from, more = seen+len(found), of+count, end, next
		}
		if seen != n || of != (n+1)/2 {
			s.Errorf("slices of %d: %d records, %d of the caller", size, seen, of)
		}
	}
}

func (s *suite) actsAsSeen(o *keystore.Operators) {
	c := newClaim()
	owner := s.claimed(c)
	seen := keystore.Seen{ID: c.ID, Owner: owner, State: keystore.StateStarted}
	try := func(what string, seen keystore.Seen, want bool) {
		s.Helper()
		s.expectOwned("settle "+what, want)(o.Settle(s.Context(), seen, [16]byte{1}, completion(), act))
		if !want {
			s.expectOwned("release "+what, false)(o.Release(s.Context(), seen, act))
		}
	}
	try("a running claim", seen, false)
	s.ends(c.ID, "lease_until")
	other := seen
	other.Owner.Fence++
	try("another fence", other, false)
	other = seen
	other.Owner.Token[0]++
	try("another token", other, false)
	try("what was seen", seen, true)
	try("what has ended", seen, false)
	s.expectOwned("complete late", false)(s.Complete(s.Context(), c.ID, owner, completion()))
	r := s.found(c.ID)
	if r.State != keystore.StateCompleted || r.Status != 201 || r.Owner == owner || r.Location != "/7" {
		s.Errorf("%+v", r)
	}
	s.expectOwned("release", true)(o.Release(s.Context(), keystore.Seen{ID: c.ID, Owner: r.Owner, State: r.State}, act))
	if _, found, err := s.Find(s.Context(), c.ID); found || err != nil {
		s.Errorf("found %t, %v", found, err)
	}
}

func (s *suite) settlesLarge(o *keystore.Operators) {
	c, done := newClaim(), completion()
	done.Large, done.Response = true, bytes.Repeat([]byte("large"), 50_000)
	seen := keystore.Seen{ID: c.ID, Owner: s.claimed(c), State: keystore.StateStarted}
	s.ends(c.ID, "lease_until")
	s.expectOwned("settle", true)(o.Settle(s.Context(), seen, [16]byte{1}, done, act))
	r := s.found(c.ID)
	if !bytes.Equal(r.Response, done.Response) {
		s.Errorf("%d bytes", len(r.Response))
	}
	s.expectOwned("release", true)(o.Release(s.Context(), keystore.Seen{ID: c.ID, Owner: r.Owner, State: r.State}, act))
	var bodies int
	s.must(s.db.QueryRowContext(s.Context(), s.where.Expand(`select count(*) from {{idempotency_body}}`)).Scan(&bodies))
	if bodies != 0 {
		s.Errorf("%d bodies without a record", bodies)
	}
}

func (s *suite) deletesDue(*keystore.Operators) {
	due, claimedAgain, young, running := newClaim(), newClaim(), newClaim(), newClaim()
	for _, c := range []keystore.Claim{due, claimedAgain, young, running} {
		s.claimed(c)
	}
	s.ends(running.ID, "expires_at", "forget_at")
	for _, c := range []keystore.Claim{due, claimedAgain} {
		s.ends(c.ID, "lease_until", "expires_at", "forget_at")
	}
	for _, c := range []struct {
		id   keystore.ID
		want bool
	}{{due.ID, true}, {young.ID, false}, {running.ID, false}, {newClaim().ID, false}} {
		if got, err := s.DueWithin(s.Context(), c.id, 0); err != nil || got != c.want {
			s.Errorf("due %t, want %t, %v", got, c.want, err)
		}
	}
	found, err := s.Due(s.Context(), 10)
	s.must(err)
	if len(found) != 2 {
		s.Fatalf("%d are due", len(found))
	}
	if _, found, err := s.Claim(s.Context(), again(claimedAgain)); err == nil && !found {
		s.claimed(again(claimedAgain))
	}
	if n, err := s.DeleteDue(s.Context(), found); err != nil || n != 1 {
		s.Errorf("deleted %d, %v", n, err)
	}
	if _, found, err := s.Find(s.Context(), claimedAgain.ID); !found || err != nil {
		s.Errorf("found %t, %v", found, err)
	}
}
