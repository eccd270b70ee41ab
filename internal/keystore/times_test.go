package keystore_test

import (
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/keystore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A lease is as long as its owner believes, and nothing is forgotten early.
func TestStore_KeepsItsTimes(t *testing.T) {
	t.Parallel()
	for name, open := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSuite(t, open, false)
			const lease, retention, refuse = 10 * time.Minute, 2 * time.Hour, 5 * time.Hour
			claim := func() keystore.Claim {
				c := newClaim()
				c.Lease, c.Retention = lease, retention
				return c
			}
			ended := func() keystore.Completed {
				c := claim()
				done := keystore.Completed{ID: c.ID, Owner: s.claimed(c), Completion: completion()}
				done.Retention, done.Refuse = retention, refuse
				return done
			}
			c := claim()
			owner := s.claimed(c)
			s.expectTimes("claim", c.ID, lease, retention, retention)
			s.expectOwned("extend", true)(s.Extend(s.Context(), c.ID, owner, 2*lease))
			s.expectTimes("extend", c.ID, 2*lease, retention, retention)
			s.ends(c.ID, "lease_until", "expires_at", "forget_at")
			_, _, err := s.TakeOver(s.Context(), again(c), owner)
			s.must(err)
			s.expectTimes("take over", c.ID, lease, retention, retention)

			done := ended()
			s.expectOwned("complete", true)(s.Complete(s.Context(), done.ID, done.Owner, done.Completion))
			s.expectTimes("complete", done.ID, lease, retention, retention+refuse)

			done = ended()
			tx := s.sealed(done)
			s.expectOwned("finish", true)(s.Finish(s.Context(), tx.Raw, done.ID, done.Owner, done.Completion))
			s.must(tx.Commit(time.Minute))
			s.expectTimes("finish", done.ID, lease, retention, retention+refuse)

			done = ended()
			tx = s.sealed(done)
			_, err = s.FinishAll(s.Context(), tx.Raw, []keystore.Completed{done})
			s.must(err)
			s.must(tx.Commit(time.Minute))
			s.expectTimes("finish together", done.ID, lease, retention, retention+refuse)

			if s.Traits().ClaimsTogether {
				c = claim()
				_, _, err = s.ClaimAll(s.Context(), []keystore.Claim{c})
				s.must(err)
				s.expectTimes("claim together", c.ID, lease, retention, retention)
			}
		})
	}
}

// expectTimes expects the times of a record, less those that a test takes.
func (s *suite) expectTimes(what string, id keystore.ID, lease, expires, forget time.Duration) {
	s.Helper()
	text := `select (extract(epoch from forget_at - clock_timestamp()) * 1000000)::bigint from {{idempotency}} where key_hash = $1`
	if s.sqlite {
		text = `select forget_at - cast(unixepoch('subsec') * 1000000 as integer) from {{idempotency}} where key_hash = $1`
	}
	var micros int64
	s.must(s.db.QueryRowContext(s.Context(), s.where.Expand(text), id[:]).Scan(&micros))
	r := s.found(id)
	for name, times := range map[string][2]time.Duration{
		"lease":   {r.LeaseLeft, lease},
		"expires": {r.ExpiresIn, expires},
		"forget":  {time.Duration(micros) * time.Microsecond, forget},
	} {
		if got, want := times[0], times[1]; got > want || got < want-5*time.Minute {
			s.Errorf("%s: %s in %s, want %s", what, name, got, want)
		}
	}
}

// On PostgreSQL a claim waits for one of the same key that is just being committed. What has
// become of that key by then stays.
func TestStore_AClaimKeepsWhatHasEndedMeanwhile(t *testing.T) {
	t.Parallel()
	s := newSuite(t, databases["postgresql"], false)
	c := newClaim()
	tx, err := s.db.BeginTx(s.Context(), nil)
	s.must(err)
	defer tx.Rollback() //nolint:errcheck // it has committed
	_, err = tx.ExecContext(s.Context(), s.where.Expand(`
		insert into {{idempotency}} (key_hash, caller, fingerprint, state, owner, fence, endpoint, completed_at, lease_until, expires_at, forget_at, status)
		values ($1, $2, $3, 2, $4, 1, 'POST /', now(), now() + interval '1 minute', now() + interval '1 hour', now() + interval '1 hour', 201)`),
		c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:])
	s.must(err)
	var pid int
	s.must(tx.QueryRowContext(s.Context(), `select pg_backend_pid()`).Scan(&pid))
	copied := again(c)
	claimed := make(chan error, 1)
	go func() {
		_, _, err := s.Claim(s.Context(), copied)
		claimed <- err
	}()
	testserver.Eventually(t, "the copy waits", func() bool {
		n := 0
		s.must(s.db.QueryRowContext(s.Context(), `select count(*) from pg_stat_activity where $1 = any (pg_blocking_pids(pid))`, pid).Scan(&n))
		return n == 1
	})
	s.must(tx.Commit())
	s.must(<-claimed)
	r, found, err := s.Claim(s.Context(), copied)
	if err != nil || !found || r.State != keystore.StateCompleted || r.Owner.Token != c.Token {
		s.Errorf("found %t: %+v, %v", found, r, err)
	}
}
