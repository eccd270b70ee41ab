package idempotency_test

import (
	"context"
	"crypto/rand"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// onEachLevel runs test with each isolation level as the default of its database.
func onEachLevel(t *testing.T, test func(t *testing.T, p *testDB)) {
	t.Helper()
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			test(t, onPostgres(t, "default_transaction_isolation="+level))
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

// The owner of a key may be about to commit for long, if its process is paused.
func TestSQLStore_AClaimWaitsForNoOwner(t *testing.T) {
	onEachLevel(t, func(t *testing.T, p *testDB) {
		for _, text := range []string{`update {{idempotency}} set state = 2, completed_at = now() where key_hash = $1`, `delete from {{idempotency}} where key_hash = $1`} {
			first := newClaim()
			if _, granted, err := p.store.Claim(t.Context(), first); !granted || err != nil {
				t.Fatal(granted, err)
			}
			owner, err := p.db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer owner.Rollback() //nolint:errcheck // nothing of it is wanted
			if _, err := owner.ExecContext(t.Context(), p.expand(t, text), first.ID[:]); err != nil {
				t.Fatal(err)
			}
			second := first
			rand.Read(second.Token[:])
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if r, granted, err := p.store.Claim(ctx, second); granted || err != nil || r.Owner.Token != first.Token {
				t.Errorf("%s: granted %t, %v: %+v", text, granted, err, r)
			}
		}
	})
}

// Claims of different keys do not contend, at any isolation level.
func TestSQLStore_DifferentKeysDoNotMeet(t *testing.T) {
	onEachLevel(t, func(t *testing.T, p *testDB) {
		p.db.SetMaxOpenConns(16)
		var working sync.WaitGroup
		for range 16 {
			working.Go(func() {
				for i := range testserver.Rounds(15, 40) {
					c := newClaim()
					r, granted, err := p.store.Claim(t.Context(), c)
					if !granted || err != nil {
						t.Errorf("granted %t: %v", granted, err)
						return
					}
					if _, err := p.store.Outstanding(t.Context(), c.Caller, 10); err != nil {
						t.Error(err)
					}
					err = p.store.Extend(t.Context(), c.ID, r.Owner, time.Minute)
					if err == nil && i%2 == 0 {
						err = p.store.Release(t.Context(), c.ID, r.Owner)
					} else if err == nil {
						err = p.store.Complete(t.Context(), c.ID, r.Owner, idempotency.Completion{State: idempotency.StateCompleted, Status: 200, Retention: time.Hour})
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

// Claims that need not survive a crash of the server do not wait for the disk.
func TestSQLStore_WaitsForTheDiskWhereItMust(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	p.db.SetMaxOpenConns(1)
	for _, durable := range []bool{true, false} {
		p.exec(t, `create temporary table seen (setting text)`)
		p.exec(t, `create function pg_temp.see() returns trigger language plpgsql as $$
			begin insert into seen values (current_setting('synchronous_commit')); return null; end $$`)
		p.exec(t, `create constraint trigger see after insert or update on {{idempotency}} deferrable initially deferred for each row execute function pg_temp.see()`)
		c := newClaim()
		c.Durable, c.Lease = durable, time.Millisecond
		r, _, err := p.store.Claim(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		next := c
		rand.Read(next.Token[:])
		var owner idempotency.Owner
		eventually(t, "it is taken over", func() bool {
			taken, granted, err := p.store.TakeOver(t.Context(), next, r.Owner)
			if err != nil {
				t.Error(err)
			}
			owner = taken.Owner
			return granted
		})
		if n := p.count(t, `select count(*) from seen where (setting <> 'off') = $1`, durable); n != 2 {
			t.Errorf("durable %t: %d of two", durable, n)
		}
		p.exec(t, `truncate seen`)
		if err := p.store.Extend(t.Context(), c.ID, owner, time.Minute); err != nil {
			t.Error(err)
		}
		if n := p.count(t, `select count(*) from seen where setting = 'off'`); n != 1 {
			t.Errorf("durable %t: an extension waits for the disk", durable)
		}
		p.exec(t, `drop trigger see on {{idempotency}}`)
		p.exec(t, `drop function pg_temp.see()`)
		p.exec(t, `drop table seen`)
	}
}

// No body is left of a key that is used again and then released.
func TestSQLStore_NoBodyOutlivesItsRecord(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		c := newClaim()
		claim := func() idempotency.Owner {
			t.Helper()
			rand.Read(c.Token[:])
			r, granted, err := p.store.Claim(t.Context(), c)
			if !granted || err != nil {
				t.Fatalf("granted %t: %v", granted, err)
			}
			return r.Owner
		}
		err := p.store.Complete(t.Context(), c.ID, claim(), idempotency.Completion{
			State: idempotency.StateCompleted, Status: 200, Response: make([]byte, 100_000), Large: true, Retention: time.Millisecond,
		})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "it is forgotten", func() bool {
			_, found, err := p.store.Find(t.Context(), c.ID)
			if err != nil {
				t.Error(err)
			}
			return !found
		})
		if err := p.store.Release(t.Context(), c.ID, claim()); err != nil {
			t.Error(err)
		}
		if n := p.count(t, `select count(*) from {{idempotency_body}}`); n != 0 {
			t.Errorf("%d bodies are left", n)
		}
	})
}

// A driver may send a takeover again whose answer it has lost.
func TestSQLStore_ATakeOverAskedTwiceIsGrantedTwice(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		c := newClaim()
		r, _, err := p.store.Claim(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		p.endLeases(t)
		from := r.Owner
		for range 2 {
			rand.Read(c.Token[:])
			mine := c
			for try := range 2 {
				r, granted, err := p.store.TakeOver(t.Context(), mine, from)
				if first := from.Fence == 1; granted != first || err != nil || granted && r.Owner != (idempotency.Owner{Token: mine.Token, Fence: 2}) {
					t.Errorf("try %d: granted %t, %v: %+v", try, granted, err, r)
				}
			}
			from.Fence = 7 // nobody's
		}
	})
}
