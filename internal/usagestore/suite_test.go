package usagestore_test

import (
	"context"
	"database/sql"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements/plantest"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/internal/usagestore"
)

// fixture is a database with counts.
type fixture struct {
	*usagestore.Store
	db    *sql.DB
	where database.Database
}

// each runs a test of the contract of Store on both databases.
func each(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	t.Parallel()
	run := func(t *testing.T, db *sql.DB, cfg oncemill.Config) {
		t.Helper()
		must(t, oncemill.Migrate(t.Context(), db, cfg, oncemill.Migrations{Name: "idempotency_usage", FS: usagestore.Migrations}))
		where, err := database.Resolve(db, cfg)
		must(t, err)
		test(t, &fixture{usagestore.Open(db, where), db, where})
	}
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		pg := testserver.Postgres(t)
		run(t, pg.DB, pg.Config)
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		run(t, testserver.SQLite(t), oncemill.Config{})
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) exec(t *testing.T, text string, args ...any) {
	t.Helper()
	if _, err := f.db.ExecContext(t.Context(), f.where.Expand(text), args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

func (f *fixture) add(t *testing.T, caller byte, window time.Duration, keys, bytes, wantKeys, wantBytes int64) usagestore.Usage {
	t.Helper()
	u, err := f.Add(t.Context(), [16]byte{caller}, window, keys, bytes)
	if err != nil || u.Keys != wantKeys || u.Bytes != wantBytes || u.Left <= 0 || u.Left > window {
		t.Errorf("%+v, %v; want %d keys, %d bytes", u, err, wantKeys, wantBytes)
	}
	return u
}

const window = 31 * 24 * time.Hour

func TestStore_AddsUpWithinAWindow(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.add(t, 1, window, 2, 10, 2, 10)
		f.add(t, 1, window, 1, 5, 3, 15)
		f.add(t, 1, window, -1, 0, 2, 15)
		f.add(t, 1, window, -7, -20, 0, 0) // never less than nothing
		f.add(t, 2, window, -1, 3, 0, 3)
		f.add(t, 1, window-time.Hour, 4, 4, 4, 4) // another length is counted alone
		f.exec(t, `update {{idempotency_usage}} set ends_at = ends_at - span where caller = $1`, append([]byte{2}, make([]byte, 15)...))
		f.add(t, 2, window, 1, 1, 1, 1) // a new window
	})
}

// A clock that is set back begins no new window, or each step back would forget the counts.
func TestStore_KeepsItsCountsWhenTheClockGoesBack(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.add(t, 1, window, 5, 5, 5, 5)
		f.exec(t, `update {{idempotency_usage}} set ends_at = ends_at + span`)
		if u, err := f.Add(t.Context(), [16]byte{1}, window, 1, 1); err != nil || u.Keys != 6 || u.Left <= window {
			t.Errorf("%+v, %v", u, err)
		}
	})
}

// A clock that was far ahead for a moment does not stop a caller until it is right.
func TestStore_ForgetsWhatAWrongClockHasCounted(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.add(t, 1, window, 5, 5, 5, 5)
		f.exec(t, `update {{idempotency_usage}} set ends_at = ends_at + 100 * span`)
		f.add(t, 1, window, 1, 1, 1, 1)
		f.add(t, 1, window, 1, 1, 2, 2)
	})
}

func TestStore_CountsEachOfManyAtOnce(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		const callers, each = 4, 25
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // the server's limits follow it
		defer cancel()
		var adding sync.WaitGroup
		for i := range callers * each {
			adding.Go(func() {
				if _, err := f.Add(ctx, [16]byte{byte(i % callers)}, window, 1, 7); err != nil {
					t.Error(err)
				}
			})
		}
		adding.Wait()
		for i := range callers {
			f.add(t, byte(i), window, 0, 0, each, 7*each)
		}
	})
}

func TestStore_PurgesWindowsThatHaveEnded(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		for i := range byte(5) {
			f.add(t, i, window, 1, 1, 1, 1)
		}
		f.exec(t, `update {{idempotency_usage}} set ends_at = ends_at - span where caller < $1`, append([]byte{3}, make([]byte, 15)...))
		for _, want := range []int{2, 1, 0} {
			if n, err := f.Purge(t.Context(), 2); err != nil || n != want {
				t.Errorf("purged %d, want %d, %v", n, want, err)
			}
		}
	})
}

func TestStore_ErasesACaller(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.add(t, 1, window, 1, 1, 1, 1)
		f.add(t, 2, window, 1, 1, 1, 1)
		must(t, f.Erase(t.Context(), [16]byte{1}))
		f.add(t, 1, window, 0, 0, 0, 0)
		f.add(t, 2, window, 0, 0, 1, 1)
		f.exec(t, `drop table {{idempotency_usage}}`)
		must(t, f.Erase(t.Context(), [16]byte{1}))
	})
}

func TestPlans_NoStatementScansTheTable(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		caller, now, second := `sha256(int8send(i))`, `(extract(epoch from statement_timestamp()) * 1000000)::bigint`, `1000000::bigint`
		drop := `drop index {{idempotency_usage_ends}}`
		if f.where.Dialect == oncemill.SQLite {
			caller, now, second, drop = `cast(i as blob)`, `cast(unixepoch('subsec') * 1000000 as integer)`, `1000000`, `drop index {{name:idempotency_usage_ends}}`
		}
		f.exec(t, strings.NewReplacer("CALLER", caller, "NOW", now, "SECOND", second).Replace(`
			insert into {{idempotency_usage}} (caller, span, ends_at, keys, bytes)
			with recursive n (i) as (select 1 union all select i + 1 from n where i < 20000)
			select CALLER, 3600000000, NOW + (i - 100) * SECOND, 1, 1 from n`))
		f.exec(t, `analyze {{idempotency_usage}}`)
		plantest.Check(t, f.db, f.where, usagestore.Files)
		f.exec(t, drop)
		if faults := strings.Join(plantest.Faults(t, f.db, f.where, usagestore.Files), "\n"); !strings.Contains(faults, "purge: ") {
			t.Errorf("no fault without the index: %s", faults)
		}
	})
}
