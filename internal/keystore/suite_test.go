package keystore_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/keystore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// The contract of Store, on each database. storetest tests what idempotency.SQLStore makes
// of it.
func TestStore(t *testing.T) {
	t.Parallel()
	for name, open := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for name, test := range map[string]func(*suite){
				"a key is claimed once":                             (*suite).claimsOnce,
				"a record comes back as it was written":             (*suite).findsWhatWasWritten,
				"a record that is due is replaced":                  (*suite).replacesWhatIsDue,
				"claims together are as claims alone":               (*suite).claimsTogether,
				"only the owner changes a claim":                    (*suite).refusesOtherOwners,
				"an ended claim does not change":                    (*suite).keepsWhatHasEnded,
				"a claim is taken over when its lease has ended":    (*suite).takesOver,
				"running claims are counted":                        (*suite).countsRunning,
				"started claims are counted":                        (*suite).countsStarted,
				"a purge changes what is due, up to its limit":      (*suite).purges,
				"a purge empties what is refused":                   (*suite).strips,
				"a sealed transaction commits only when finished":   (*suite).sealsTransactions,
				"a sealed transaction belongs to the claim's owner": (*suite).finishesOnlyItsOwn,
				"a group finishes all claims or none":               (*suite).finishesAll,
				"a failed statement leaves a known state":           (*suite).knowsWhatFailed,
			} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					for _, prepare := range []bool{false, true} {
						test(newSuite(t, open, prepare))
					}
				})
			}
		})
	}
}

var databases = map[string]func(*testing.T) (*sql.DB, oncemill.Config){
	"postgresql": func(t *testing.T) (*sql.DB, oncemill.Config) {
		pg := testserver.Postgres(t)
		return pg.DB, pg.Config
	},
	"sqlite": func(t *testing.T) (*sql.DB, oncemill.Config) {
		return testserver.SQLite(t), oncemill.Config{}
	},
}

type suite struct {
	*testing.T
	keystore.Store
	db     *sql.DB
	where  database.Database
	sqlite bool
}

func newSuite(t *testing.T, open func(*testing.T) (*sql.DB, oncemill.Config), prepare bool) *suite {
	t.Helper()
	db, cfg := open(t)
	if err := oncemill.Migrate(t.Context(), db, cfg, oncemill.Migrations{Name: "idempotency", FS: keystore.Migrations}); err != nil {
		t.Fatal(err)
	}
	where, err := database.Resolve(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &suite{
		T: t, db: db, where: where, sqlite: where.Dialect == oncemill.SQLite,
		Store: keystore.Open(db, where, bounded.New(8), prepare),
	}
}

func newClaim() keystore.Claim {
	c := keystore.Claim{Endpoint: "POST /orders", Lease: time.Minute, Retention: time.Hour, CorrelationID: "correlation", TraceID: "trace"}
	for _, b := range [][]byte{c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:]} {
		rand.Read(b)
	}
	return c
}

func again(c keystore.Claim) keystore.Claim {
	rand.Read(c.Token[:])
	return c
}

func completion() keystore.Completion {
	return keystore.Completion{
		State: keystore.StateCompleted, Status: 201, Response: []byte("\x00\xffresponse"), Retention: time.Hour, Location: "/7", ResourceID: "7",
	}
}

func (s *suite) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// claimed claims a key that nobody has.
func (s *suite) claimed(c keystore.Claim) keystore.Owner {
	s.Helper()
	r, found, err := s.Claim(s.Context(), c)
	if err != nil || !found || r.Owner != (keystore.Owner{Token: c.Token, Fence: 1}) {
		s.Fatalf("found %t: %+v, %v", found, r, err)
	}
	return r.Owner
}

func (s *suite) found(id keystore.ID) keystore.Record {
	s.Helper()
	r, found, err := s.Find(s.Context(), id)
	if err != nil || !found {
		s.Fatalf("found %t: %v", found, err)
	}
	return r
}

// changes executes statements on a table of the store, in a writer's transaction.
func (s *suite) changes(text string, args ...any) {
	s.Helper()
	_, err := s.db.ExecContext(s.Context(), s.where.Expand(text), args...)
	s.must(err)
}

// ends makes times of a claim pass.
func (s *suite) ends(id keystore.ID, columns ...string) {
	s.Helper()
	for _, column := range columns {
		past := `statement_timestamp() - interval '1 second'`
		if s.sqlite {
			past = `1`
		}
		s.changes(`update {{idempotency}} set `+column+` = `+past+` where key_hash = $1`, id[:])
	}
}

func (s *suite) expectOwned(what string, want bool) func(owned bool, err error) {
	return func(owned bool, err error) {
		s.Helper()
		if err != nil || owned != want {
			s.Errorf("%s: owned %t, want %t: %v", what, owned, want, err)
		}
	}
}

func (s *suite) claimsOnce() {
	c := newClaim()
	owner := s.claimed(c)
	r, found, err := s.Claim(s.Context(), again(c))
	if err != nil || !found || r.Owner != owner || r.State != keystore.StateStarted {
		s.Errorf("found %t: %+v, %v", found, r, err)
	}
}

func (s *suite) findsWhatWasWritten() {
	for _, large := range []bool{false, true} {
		c, done := newClaim(), completion()
		done.Large, done.Response = large, bytes.Repeat(done.Response, 10_000)
		owner := s.claimed(c)
		r := s.found(c.ID)
		if r.ID != c.ID || r.Caller != c.Caller || r.Fingerprint != c.Fingerprint || r.Endpoint != c.Endpoint ||
			r.CorrelationID != c.CorrelationID || r.TraceID != c.TraceID || r.Response != nil || !r.CompletedAt.IsZero() ||
			r.LeaseLeft <= 0 || r.LeaseLeft > c.Lease || r.ExpiresIn <= 0 || r.ExpiresIn > c.Retention {
			s.Errorf("found %+v", r)
		}
		s.expectOwned("complete", true)(s.Complete(s.Context(), c.ID, owner, done))
		r = s.found(c.ID)
		if r.State != keystore.StateCompleted || r.Status != 201 || !bytes.Equal(r.Response, done.Response) ||
			r.Location != "/7" || r.ResourceID != "7" || r.Owner != owner || r.CompletedAt.IsZero() {
			s.Errorf("found %+v", r)
		}
	}
	if _, found, err := s.Find(s.Context(), newClaim().ID); found || err != nil {
		s.Errorf("found %t: %v", found, err)
	}
}

func (s *suite) replacesWhatIsDue() {
	c, done := newClaim(), completion()
	done.Large = true
	s.expectOwned("complete", true)(s.Complete(s.Context(), c.ID, s.claimed(c), done))
	s.ends(c.ID, "expires_at", "forget_at")
	next := again(c)
	r, found, err := s.Claim(s.Context(), next)
	if err == nil && !found {
		r, found, err = s.Claim(s.Context(), next)
	}
	if err != nil || !found || r.Owner.Token != next.Token || r.Response != nil {
		s.Errorf("found %t: %+v, %v", found, r, err)
	}
	var bodies int
	s.must(s.db.QueryRowContext(s.Context(), s.where.Expand(`select count(*) from {{idempotency_body}}`)).Scan(&bodies))
	if bodies != 0 {
		s.Errorf("%d bodies without a record", bodies)
	}
}

func (s *suite) claimsTogether() {
	if !s.Traits().ClaimsTogether {
		return
	}
	taken, free, due := newClaim(), newClaim(), newClaim()
	owner := s.claimed(taken)
	s.claimed(due)
	s.ends(due.ID, "lease_until", "expires_at", "forget_at")
	all := []keystore.Claim{again(taken), free, again(due)}
	slices.SortFunc(all, func(a, b keystore.Claim) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	records, found, err := s.ClaimAll(s.Context(), all)
	s.must(err)
	for i, c := range all {
		switch c.ID {
		case taken.ID:
			if !found[i] || records[i].Owner != owner {
				s.Errorf("taken: found %t: %+v", found[i], records[i])
			}
		case free.ID:
			if !found[i] || records[i].Owner != (keystore.Owner{Token: c.Token, Fence: 1}) {
				s.Errorf("free: found %t: %+v", found[i], records[i])
			}
		case due.ID:
			if found[i] {
				s.Errorf("due: found %+v", records[i])
			}
		}
	}
}

// strangers are owners that the claim does not have.
func strangers(owner keystore.Owner) map[string]keystore.Owner {
	return map[string]keystore.Owner{
		"another fence": {Token: owner.Token, Fence: owner.Fence + 1},
		"another token": {Fence: owner.Fence},
	}
}

func (s *suite) refusesOtherOwners() {
	c := newClaim()
	owner := s.claimed(c)
	for name, stranger := range strangers(owner) {
		s.expectOwned("extend by "+name, false)(s.Extend(s.Context(), c.ID, stranger, time.Hour))
		s.expectOwned("complete by "+name, false)(s.Complete(s.Context(), c.ID, stranger, completion()))
		s.expectOwned("release by "+name, false)(s.Release(s.Context(), c.ID, stranger))
		s.ends(c.ID, "lease_until")
		if _, _, err := s.TakeOver(s.Context(), again(c), stranger); err != nil {
			s.Error(err)
		}
		if r := s.found(c.ID); r.Owner != owner || r.State != keystore.StateStarted || r.LeaseLeft > 0 {
			s.Errorf("after %s: %+v", name, r)
		}
		s.expectOwned("extend", true)(s.Extend(s.Context(), c.ID, owner, c.Lease))
	}
	s.expectOwned("release", true)(s.Release(s.Context(), c.ID, owner))
	s.expectOwned("release again", false)(s.Release(s.Context(), c.ID, owner))
}

func (s *suite) keepsWhatHasEnded() {
	c := newClaim()
	owner := s.claimed(c)
	s.expectOwned("complete", true)(s.Complete(s.Context(), c.ID, owner, completion()))
	before := s.found(c.ID)
	s.expectOwned("extend", false)(s.Extend(s.Context(), c.ID, owner, time.Hour))
	s.expectOwned("complete again", false)(s.Complete(s.Context(), c.ID, owner, keystore.Completion{State: keystore.StateNotReplayable}))
	s.expectOwned("release", false)(s.Release(s.Context(), c.ID, owner))
	s.ends(c.ID, "lease_until")
	if _, _, err := s.TakeOver(s.Context(), again(c), owner); err != nil {
		s.Error(err)
	}
	if r := s.found(c.ID); r.State != before.State || r.Owner != before.Owner || !bytes.Equal(r.Response, before.Response) {
		s.Errorf("got %+v, was %+v", r, before)
	}
}

func (s *suite) takesOver() {
	c := newClaim()
	owner := s.claimed(c)
	next := again(c)
	if _, _, err := s.TakeOver(s.Context(), next, owner); err != nil || s.found(c.ID).Owner != owner {
		s.Errorf("taken over while the lease runs, %v", err)
	}
	s.ends(c.ID, "lease_until")
	for range 2 { // the second call finds what the first has done
		r, found, err := s.TakeOver(s.Context(), next, owner)
		if err != nil || !found || r.Owner != (keystore.Owner{Token: next.Token, Fence: 2}) || r.LeaseLeft <= 0 {
			s.Errorf("found %t: %+v, %v", found, r, err)
		}
	}
	s.expectOwned("complete by the first owner", false)(s.Complete(s.Context(), c.ID, owner, completion()))
	s.expectOwned("complete", true)(s.Complete(s.Context(), c.ID, keystore.Owner{Token: next.Token, Fence: 2}, completion()))
}

func (s *suite) countsRunning() {
	var first keystore.Claim
	for i := range 4 {
		c := newClaim()
		if i == 0 {
			first = c
		}
		c.Caller = first.Caller
		owner := s.claimed(c)
		switch i {
		case 1:
			s.expectOwned("complete", true)(s.Complete(s.Context(), c.ID, owner, completion()))
		case 2:
			s.expectOwned("extend", true)(s.Extend(s.Context(), c.ID, owner, -time.Second))
		}
	}
	s.claimed(newClaim())
	for limit, want := range map[int]int{1: 1, 10: 2} {
		if n, err := s.Outstanding(s.Context(), first.Caller, limit); n != want || err != nil {
			s.Errorf("%d of at most %d, want %d: %v", n, limit, want, err)
		}
	}
}

func (s *suite) purges() {
	kept, running := newClaim(), newClaim()
	s.expectOwned("complete", true)(s.Complete(s.Context(), kept.ID, s.claimed(kept), completion()))
	s.claimed(running)
	s.ends(running.ID, "expires_at", "forget_at") // its lease has not
	for range 5 {
		c := newClaim()
		s.claimed(c)
		s.ends(c.ID, "lease_until", "expires_at", "forget_at")
	}
	for _, want := range []int{3, 2, 0} {
		if n, err := s.Purge(s.Context(), 3); n != want || err != nil {
			s.Errorf("%d, want %d: %v", n, want, err)
		}
	}
	s.found(kept.ID)
	s.found(running.ID)
}

func (s *suite) strips() {
	c, done := newClaim(), completion()
	done.Refuse = time.Hour
	s.expectOwned("complete", true)(s.Complete(s.Context(), c.ID, s.claimed(c), done))
	s.ends(c.ID, "expires_at")
	for _, want := range []int{1, 0} {
		if r := s.found(c.ID); r.State != keystore.StateExpired || r.Response != nil {
			s.Errorf("found %+v", r)
		}
		if n, err := s.Purge(s.Context(), 3); n != want || err != nil {
			s.Errorf("%d, want %d: %v", n, want, err)
		}
	}
	var left int
	s.must(s.db.QueryRowContext(s.Context(), s.where.Expand(`select count(response) from {{idempotency}}`)).Scan(&left))
	if left != 0 {
		s.Error("the response is still there")
	}
}

// sealed begins a transaction that is sealed for the claims.
func (s *suite) sealed(claims ...keystore.Completed) *boundtx.Tx {
	s.Helper()
	tx, err := s.Begin(s.Context(), sql.LevelReadCommitted)
	s.must(err)
	s.Cleanup(tx.Rollback)
	s.must(s.Seal(s.Context(), tx.Raw, keystore.SealLimits{Idle: time.Minute, Lock: time.Second}))
	for _, c := range claims {
		if owned, enforced, err := s.SealClaim(s.Context(), tx.Raw, c.ID, c.Owner); err != nil || !owned || !enforced {
			s.Fatalf("owned %t, enforced %t: %v", owned, enforced, err)
		}
	}
	return tx
}

// started claims a key, to be completed.
func (s *suite) started() keystore.Completed {
	s.Helper()
	c := newClaim()
	return keystore.Completed{ID: c.ID, Owner: s.claimed(c), Completion: completion()}
}

func (s *suite) sealsTransactions() {
	for _, large := range []bool{false, true} {
		c := s.started()
		c.Large = large
		if err := s.sealed(c).Commit(time.Minute); err == nil {
			s.Error("committed with its seal")
		}
		if r := s.found(c.ID); r.State != keystore.StateStarted || r.Owner != c.Owner {
			s.Errorf("found %+v", r)
		}
		tx := s.sealed(c)
		s.expectOwned("finish", true)(s.Finish(s.Context(), tx.Raw, c.ID, c.Owner, c.Completion))
		s.must(tx.Commit(time.Minute))
		if r := s.found(c.ID); r.State != keystore.StateCompleted || !bytes.Equal(r.Response, c.Response) {
			s.Errorf("found %+v", r)
		}
	}
}

func (s *suite) finishesOnlyItsOwn() {
	c := s.started()
	for name, stranger := range strangers(c.Owner) {
		if s.Traits().SealsClaims {
			tx, err := s.Begin(s.Context(), sql.LevelReadCommitted)
			s.must(err)
			owned, _, err := s.SealClaim(s.Context(), tx.Raw, c.ID, stranger)
			s.expectOwned("seal by "+name, false)(owned, err)
			tx.Rollback()
		}
		tx := s.sealed(c)
		s.expectOwned("finish by "+name, false)(s.Finish(s.Context(), tx.Raw, c.ID, stranger, c.Completion))
		if err := tx.Commit(time.Minute); err == nil {
			s.Errorf("committed by %s", name)
		}
	}
	unsealed, err := s.Begin(s.Context(), sql.LevelReadCommitted) // as if the handler had ended the sealed one
	s.must(err)
	s.expectOwned("finish without a seal", false)(s.Finish(s.Context(), unsealed.Raw, c.ID, c.Owner, c.Completion))
	unsealed.Rollback()
	if r := s.found(c.ID); r.State != keystore.StateStarted || r.Owner != c.Owner {
		s.Errorf("found %+v", r)
	}
}

func (s *suite) finishesAll() {
	mine, also := s.started(), s.started()
	also.State, also.Response = keystore.StateNotReplayable, nil
	for name, stranger := range strangers(also.Owner) {
		tx := s.sealed(mine, also)
		foreign := also
		foreign.Owner = stranger
		if stale, err := s.FinishAll(s.Context(), tx.Raw, []keystore.Completed{mine, foreign}); err != nil || !slices.Equal(stale, []int{1}) {
			s.Errorf("%s: stale %v: %v", name, stale, err)
		}
		if err := tx.Commit(time.Minute); err == nil {
			s.Errorf("committed with %s", name)
		}
	}
	tx := s.sealed(mine, also)
	if stale, err := s.FinishAll(s.Context(), tx.Raw, []keystore.Completed{mine, also}); err != nil || stale != nil {
		s.Errorf("stale %v: %v", stale, err)
	}
	s.must(tx.Commit(time.Minute))
	if a, b := s.found(mine.ID), s.found(also.ID); a.State != keystore.StateCompleted || b.State != keystore.StateNotReplayable || b.Response != nil {
		s.Errorf("found %+v and %+v", a, b)
	}
}

func (s *suite) knowsWhatFailed() {
	c := s.started()
	for text, want := range map[string]keystore.TxState{
		`select nothing_like_this`:      keystore.TxOpen,
		`set constraints all immediate`: keystore.TxSealed, // not known to SQLite
		`rollback`:                      keystore.TxGone,   // as SQLite does by itself
	} {
		tx := s.sealed(c)
		_, err := tx.Raw.ExecContext(s.Context(), text)
		switch {
		case s.sqlite && want == keystore.TxSealed:
			want = keystore.TxOpen
		case !s.sqlite && want == keystore.TxGone:
			tx.Rollback()
			continue
		}
		if got := s.AfterFailure(s.Context(), tx.Raw, c.ID, err); got != want {
			s.Errorf("%s leaves %d, want %d", text, got, want)
		}
		if aborted := s.Aborted(s.Context(), tx.Raw); aborted == s.sqlite {
			s.Errorf("%s: aborted %t", text, aborted)
		}
		tx.Rollback()
	}
	tx := s.sealed(c)
	if s.Aborted(context.WithoutCancel(s.Context()), tx.Raw) {
		s.Error("aborted without a failure")
	}
	tx.Rollback()
}
