package idempotency_test

import (
	"database/sql"
	"net/http"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// Claims made together equal claims made alone.
func TestSQLStore_ClaimsTogetherAsAlone(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]*testDB{
		"read committed": onPostgres(t),
		"serializable":   onPostgres(t, "default_transaction_isolation=serializable"),
	} {
		t.Run(name, func(t *testing.T) {
			var claims []idempotency.Claim
			for i := range 24 {
				c := idempotency.Claim{Lease: 20 * time.Second, Retention: time.Hour, Endpoint: `POST /a"b,{}\`, CorrelationID: `{},\"'`}
				c.ID[0], c.Token[0], c.Fingerprint[0], c.Caller[0] = byte(i), byte(i), 255, 7
				claims = append(claims, c)
			}
			const free, started, done, over = 0, 1, 2, 3
			for i, c := range claims {
				c.Token[1] = 1 // of somebody before
				owner := idempotency.Owner{Token: c.Token, Fence: 1}
				var err error
				if i%4 != free {
					_, _, err = p.store.Claim(t.Context(), c)
				}
				if err == nil && i%4 == done {
					err = p.store.Complete(t.Context(), c.ID, owner, idempotency.Completion{
						State: idempotency.StateCompleted, Status: 201, Response: []byte{0, 1, 255}, Large: i%8 == done, Retention: time.Hour, Location: "/x",
					})
				}
				if err != nil {
					t.Fatal(err)
				}
				if i%4 == over {
					p.exec(t, `update {{idempotency}} set lease_until = 'yesterday', forget_at = 'yesterday' where key_hash = $1`, c.ID[:])
				}
			}
			for round := range 2 {
				records, found, err := p.store.ClaimAll(t.Context(), claims)
				if err != nil {
					t.Fatal(err)
				}
				for i, c := range claims {
					if i%4 == over && round == 0 { // is forgotten first, and asked for again
						if found[i] {
							t.Errorf("%d: found %+v", i, records[i])
						}
						continue
					}
					alone, ok, err := p.store.Find(t.Context(), c.ID)
					if err != nil || !ok || !found[i] {
						t.Fatalf("%d: %v %v %v", i, err, ok, found[i])
					}
					got := records[i]
					alone.LeaseLeft, alone.ExpiresIn = got.LeaseLeft, got.ExpiresIn
					if !reflect.DeepEqual(got, alone) || (got.Owner.Token == c.Token) != (i%4 == free || i%4 == over) || got.ExpiresIn <= 0 {
						t.Errorf("%d: got %+v, alone %+v", i, got, alone)
					}
				}
			}
		})
	}
}

// A member whose key was taken over fails alone.
func TestGroup_AStaleMemberLosesAlone(t *testing.T) {
	t.Parallel()
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			p := onPostgres(t)
			keys := keysUpTo(12)
			engine := p.engine(t, func(c *idempotency.Config) { c.Transactions.GroupSize, c.Transactions.Isolation = 50, level })
			var once sync.Once
			answers := sendTogether(t, engine, keys, func(w http.ResponseWriter, r *http.Request) {
				key := r.Header.Get("Idempotency-Key")
				if err := addNamed(r.Context(), key); err != nil {
					http.Error(w, err.Error(), http.StatusInternalServerError) // its group may have been given up
					return
				}
				once.Do(func() { // one of the others, which may have run or not
					p.exec(t, `update {{idempotency}} set owner = '\x00112233445566778899aabbccddeeff', fence = fence + 1
						where key_hash = (select key_hash from {{idempotency}} where state = 1 order by key_hash desc limit 1)`)
				})
			})
			statuses := map[int]int{}
			for _, key := range keys {
				statuses[answers[key].Code]++
			}
			if statuses[http.StatusOK] != 11 || statuses[http.StatusConflict] != 1 {
				t.Errorf("statuses: %v", statuses)
			}
			if n := p.count(t, `select count(*) from effects`); n != 11 {
				t.Errorf("%d effects", n)
			}
			if n := p.count(t, `select count(*) from {{idempotency}} where state = 1 and fence = 2`); n != 1 {
				t.Errorf("%d keys are the other's", n)
			}
		})
	}
}

// Groups of two engines that contend for the same rows in any order all succeed, once each.
func TestGroup_ConflictsAreNobodysFault(t *testing.T) {
	t.Parallel()
	quick := map[string]func(*testing.T) *testDB{
		"postgresql": func(t *testing.T) *testDB { return onPostgres(t, "deadlock_timeout=20ms") }, // of those alone
		"sqlite":     onSQLite,
	}
	for name, open := range quick {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			expectAllOnceInConflict(t, open(t))
		})
	}
}
