package idempotency_test

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A session keeps the plan that it made for an empty table.
func TestPlans_ThoseOfAnEmptyTableAreRightForAFullOne(t *testing.T) {
	t.Parallel()
	for _, prepare := range []bool{false, true} {
		t.Run(strconv.FormatBool(prepare), func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			db, seen := testserver.Explained(t, pg.DSN, "log_nested_statements=on")
			p := &testDB{db: db, cfg: pg.Config, prepare: prepare}
			if err := oncemill.Migrate(t.Context(), db, pg.Config, idempotency.Migrations); err != nil {
				t.Fatal(err)
			}
			p.open(t)
			p.exec(t, `analyze {{idempotency}}`) // it has seen nothing that is started
			// It would count now and then, which is looked at below.
			engine := p.engine(t, func(c *idempotency.Config) { c.Keys.MaxOutstanding = idempotency.Unlimited })
			inTx, snapshot := engine.TxMiddleware(ok("x")), engine.Middleware(ok("x"))
			inGroups := p.engine(t, func(c *idempotency.Config) {
				c.Keys.MaxOutstanding, c.Transactions.GroupSize = idempotency.Unlimited, 4
			}).TxMiddleware(ok("x"))
			requests := func(from, to int) {
				for i := from; i < to; i++ {
					if _, _, err := p.store.Find(t.Context(), idempotency.ID{byte(i)}); err != nil {
						t.Fatal(err)
					}
					for range 2 {
						var sending sync.WaitGroup
						for g := range 4 {
							sending.Go(func() {
								if w := do(t, inGroups, post("/", "x", withKey(fmt.Sprintf("g%d-%d", i, g)))); w.Code != http.StatusOK {
									t.Errorf("got %d %s", w.Code, w.Body)
								}
							})
						}
						sending.Wait()
					}
					for name, h := range map[string]http.Handler{"a": inTx, "b": snapshot} {
						for range 2 {
							if w := do(t, h, post("/", "x", withKey(name+strconv.Itoa(i)))); w.Code != http.StatusOK {
								t.Fatalf("got %d %s", w.Code, w.Body)
							}
						}
					}
				}
			}
			requests(0, 10) // after some, PostgreSQL keeps a plan
			p.exec(t, `
				insert into {{idempotency}} (
					key_hash, caller, fingerprint, state, owner, fence, endpoint, completed_at, lease_until, expires_at, forget_at, status
				)
				select sha256(int8send(i)), '', '', 2, '', 1, '', now(), now(), now() + interval '1 day', now() + interval '1 day', 200
				from generate_series(1::bigint, 20000) as i`)
			expect := func() {
				t.Helper()
				plans := seen.Take()
				if len(plans) < 8 {
					t.Errorf("only %d plans were seen", len(plans))
				}
				for _, plan := range plans {
					// The index of started claims is full of dead entries, which no plan tells.
					if plan.Rows > 10 || len(plan.Faults) > 0 || strings.Contains(plan.Text, "idempotency_outstanding") {
						t.Errorf("looked at %v rows, %q: %s", plan.Rows, plan.Faults, plan.Text)
					}
				}
			}
			seen.Take()
			requests(10, 12)
			expect()
			p.exec(t, `vacuum analyze {{idempotency}}`) // nor has this one
			seen.Take()
			requests(12, 14)
			expect()
			if _, err := p.store.Outstanding(t.Context(), idempotency.Caller{}, 10); err != nil {
				t.Fatal(err)
			}
			if plans := seen.Take(); len(plans) != 1 || len(plans[0].Faults) > 0 || !strings.Contains(plans[0].Text, "idempotency_outstanding") {
				t.Errorf("counting goes by %v", plans)
			}
		})
	}
}
