package idempotency_test

import (
	"crypto/rand"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// onEachLevel has each isolation level as the default of its database.
func onEachLevel(t *testing.T, test func(t *testing.T, p *place)) {
	t.Helper()
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			test(t, onPostgres(t, "default_transaction_isolation="+url.PathEscape(level)))
		})
	}
}

func newClaim() idempotency.Claim {
	c := idempotency.Claim{Endpoint: "POST /", Lease: time.Minute, Retention: time.Hour, Durable: true}
	for _, b := range [][]byte{c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:]} {
		rand.Read(b)
	}
	return c
}

// A claim that waits for a release gets what it made, not what its snapshot shows.
func TestSQLStore_AClaimBesideAReleaseKnowsItsOwn(t *testing.T) {
	onEachLevel(t, func(t *testing.T, p *place) {
		first := newClaim()
		if _, granted, err := p.store.Claim(t.Context(), first); !granted || err != nil {
			t.Fatal(granted, err)
		}
		release, err := p.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer release.Rollback() //nolint:errcheck // a no-op after the commit
		if _, err := release.ExecContext(t.Context(), p.expand(t, `delete from {{idempotency}} where key_hash = $1`), first.ID[:]); err != nil {
			t.Fatal(err)
		}
		second := first
		rand.Read(second.Token[:])
		var claiming sync.WaitGroup
		claiming.Go(func() {
			r, granted, err := p.store.Claim(t.Context(), second)
			if !granted || err != nil || r.Owner.Token != second.Token || r.LeaseLeft != second.Lease || r.CreatedAt.IsZero() {
				t.Errorf("granted %t, %v: %+v", granted, err, r)
			}
		})
		eventually(t, "it waits", func() bool {
			return p.count(t, `select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%' || $1 || '%'`, p.cfg.Schema) > 0
		})
		if err := release.Commit(); err != nil {
			t.Fatal(err)
		}
		claiming.Wait()
	})
}

// Claims of different keys are in nobody's way, nor is what becomes of them.
func TestSQLStore_DifferentKeysDoNotMeet(t *testing.T) {
	onEachLevel(t, func(t *testing.T, p *place) {
		p.db.SetMaxOpenConns(16)
		var working sync.WaitGroup
		for range 16 {
			working.Go(func() {
				for i := range 40 {
					c := newClaim()
					r, granted, err := p.store.Claim(t.Context(), c)
					if !granted || err != nil {
						t.Errorf("granted %t: %v", granted, err)
						return
					}
					err = p.store.Extend(t.Context(), c.ID, r.Owner, time.Minute)
					if err == nil && i%2 == 0 {
						err = p.store.Release(t.Context(), c.ID, r.Owner)
					} else if err == nil {
						err = p.store.Complete(t.Context(), c.ID, r.Owner, idempotency.Completion{State: idempotency.Completed, Status: 200, Retention: time.Hour})
					}
					if err != nil {
						t.Errorf("its own claim: %v", err)
					}
				}
			})
		}
		working.Wait()
	})
}

// What need not survive a crash of the server does not wait for the disk.
func TestSQLStore_WaitsForTheDiskWhereItMust(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	p.db.SetMaxOpenConns(1)
	for _, durable := range []bool{true, false} {
		p.exec(t, `create temporary table seen (setting text)`)
		p.exec(t, p.expand(t, `create function pg_temp.see() returns trigger language plpgsql as $$
			begin insert into seen values (current_setting('synchronous_commit')); return null; end $$`))
		p.exec(t, `create trigger see after insert or update on {{idempotency}} for each row execute function pg_temp.see()`)
		c := newClaim()
		c.Durable, c.Lease = durable, time.Millisecond
		r, _, err := p.store.Claim(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		next := c
		rand.Read(next.Token[:])
		eventually(t, "it is taken over", func() bool {
			_, granted, err := p.store.TakeOver(t.Context(), next, r.Owner)
			if err != nil {
				t.Error(err)
			}
			return granted
		})
		if n := p.count(t, `select count(*) from seen where (setting <> 'off') = $1`, durable); n != 2 {
			t.Errorf("durable %t: %d of two", durable, n)
		}
		p.exec(t, `drop trigger see on {{idempotency}}`)
		p.exec(t, `drop function pg_temp.see()`)
		p.exec(t, `drop table seen`)
	}
}
