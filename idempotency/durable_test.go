package idempotency_test

import (
	"fmt"
	"net/http"
	"sync"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
)

// A claim whose effects are elsewhere has to outlive a crash of the server, with groups
// and without. One that commits with its effects need not.
func TestMiddleware_ItsClaimsWaitForTheDisk(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	p.exec(t, `create table seen (setting text)`)
	p.exec(t, `create function see() returns trigger language plpgsql as $$
		begin insert into seen values (current_setting('synchronous_commit')); return null; end $$`)
	p.exec(t, `create constraint trigger see after insert on {{idempotency}} deferrable initially deferred for each row execute function see()`)
	for shape, size := range shapes {
		engine := p.engine(t, func(c *idempotency.Config) { c.Transactions.GroupSize = size })
		for _, durable := range []bool{true, false} {
			wrap := engine.TxMiddleware
			if durable {
				wrap = engine.Middleware
			}
			p.exec(t, `truncate seen`)
			handler := wrap(ok("done"))
			const requests = 40
			var sending sync.WaitGroup
			for i := range requests {
				sending.Go(func() {
					key := fmt.Sprintf("%d-%t-%d", size, durable, i)
					if w := do(t, handler, post("/", "x", withKey(key))); w.Code != http.StatusOK {
						t.Errorf("%d %s", w.Code, w.Body)
					}
				})
			}
			sending.Wait()
			if n := p.count(t, `select count(*) from seen where (setting <> 'off') = $1`, durable); n != requests {
				t.Errorf("%s, durable %t: %d of %d claims", shape, durable, n, requests)
			}
		}
	}
}
