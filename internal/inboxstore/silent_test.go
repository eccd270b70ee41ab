package inboxstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A server that is frozen executes what was abandoned when it thaws. That is not to count as a
// crash.
func TestCharge_CountsNothingThatWasAbandoned(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	direct := newFixture(t, pg.Open(t), pg.Config, 0)
	proxy, db := testserver.OpenSilenceable(t, pg.DSN)
	behind := newFixture(t, db, pg.Config, 0)
	for range 2 {
		_, err := direct.RecordStart(t.Context(), "a", false)
		must(t, err)
	}
	proxy.Silence(testserver.Containing("alone + 1"), 1)
	_, err := bounded.Do(t.Context(), behind.calls, 100*time.Millisecond, func(ctx context.Context) (int, error) { return behind.Charge(ctx, "a") })
	if err == nil || proxy.Silenced() != 1 {
		t.Fatalf("%v, %d silenced: the test shows nothing", err, proxy.Silenced())
	}
	proxy.Resume()
	testserver.Eventually(t, "no connection is in use", func() bool { return db.Stats().InUse == 0 })
	must(t, db.Close())
	testserver.Eventually(t, "the server has ended what was abandoned", func() bool {
		var n int
		err := direct.db.QueryRowContext(t.Context(), `select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and query like '%alone + 1%'`).Scan(&n)
		return err == nil && n == 0
	})
	if n, err := direct.Charge(t.Context(), "a"); err != nil || n != 1 {
		t.Errorf("charged with %d, %v", n, err)
	}
}
