package audit_test

import (
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// each runs a test on both databases, with the tables of the audit and of dead letters.
func each(t *testing.T, test func(t *testing.T, db *sql.DB, cfg oncemill.Config)) {
	t.Helper()
	t.Parallel()
	migrated := func(t *testing.T, db *sql.DB, cfg oncemill.Config) {
		if err := oncemill.Migrate(t.Context(), db, cfg, audit.Migrations, dlq.Migrations); err != nil {
			t.Fatal(err)
		}
		test(t, db, cfg)
	}
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		pg := testserver.Postgres(t)
		migrated(t, pg.DB, pg.Config)
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		migrated(t, testserver.SQLite(t), oncemill.Config{})
	})
}

func TestLog_ListsActsPageByPage(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, cfg oncemill.Config) {
		log, err := audit.New(db, audit.Config{Database: cfg})
		if err != nil {
			t.Fatal(err)
		}
		letters, err := dlq.New(db, dlq.Config{Database: cfg})
		if err != nil {
			t.Fatal(err)
		}
		where := database.Of(log.Config().Database)
		const n = 25
		ids := make([]int64, n)
		for i := range ids {
			ids[i] = int64(i + 1)
			if _, err := db.ExecContext(t.Context(), where.Expand(`insert into {{dead_letters}} (id, source, consumer, topic, message_id, payload, reason, error, fingerprint) values ($1, 'consumer', 'stock', 'orders', 'm', '', 'failed', '', 'f')`), ids[i]); err != nil {
				t.Fatal(err)
			}
		}
		begin := time.Now()
		if _, err := letters.Replay(t.Context(), ids, dlq.Act{By: "ada", Reason: "fixed"}); err != nil {
			t.Fatal(err)
		}
		var subjects []string
		f := audit.Filter{Limit: 10, By: "ada", Since: begin.Add(-time.Hour), OldestFirst: true}
		for {
			page, err := log.List(t.Context(), f)
			if err != nil {
				t.Fatal(err)
			}
			if len(page) == 0 {
				break
			}
			for _, e := range page {
				subjects = append(subjects, e.Subject)
				if e.Action != "dead_letter.replay" || e.Reason != "fixed" || e.By != "ada" || e.At.IsZero() {
					t.Errorf("%+v", e)
				}
			}
			f.After = page[len(page)-1].Cursor()
		}
		want := make([]string, n)
		for i, id := range ids {
			want[i] = fmt.Sprint("dead_letter ", id)
		}
		slices.Sort(want)
		slices.Sort(subjects)
		if !slices.Equal(subjects, want) {
			t.Errorf("audited %q", subjects)
		}
	})
}

func TestLog_PurgesAfterItsRetention(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, cfg oncemill.Config) {
		log, err := audit.New(db, audit.Config{Database: cfg, Retention: 48 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		where := database.Of(log.Config().Database)
		at := `clock_timestamp() - interval '1 hour' * `
		if where.Dialect == oncemill.SQLite {
			at = `cast(unixepoch('subsec') * 1000000 as integer) - 3600000000 * `
		}
		for _, hours := range []string{"1", "47", "49"} {
			if _, err := db.ExecContext(t.Context(), where.Expand(`insert into {{audit}} (actor, action, subject, at) values ('ada', 'x', '`+hours+`', `+at+hours+`)`)); err != nil {
				t.Fatal(err)
			}
		}
		if n, err := log.Purge(t.Context()); err != nil || n != 1 {
			t.Errorf("purged %d, %v", n, err)
		}
		left, err := log.List(t.Context(), audit.Filter{})
		if err != nil || len(left) != 2 || left[0].Subject != "1" || left[1].Subject != "47" {
			t.Errorf("left %+v, %v", left, err)
		}
	})
}

func TestNew_RefusesBadValuesTogether(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	_, err := audit.New(db, audit.Config{Retention: time.Hour, Database: oncemill.Config{Prefix: "a-b"}})
	if bad := testserver.ConfigErrors(err); len(bad) != 2 {
		t.Errorf("got %v", err)
	}
	if _, err := audit.New(nil, audit.Config{}); len(testserver.ConfigErrors(err)) != 1 {
		t.Errorf("got %v", err)
	}
	log, err := audit.New(db, audit.Config{})
	if err != nil || log.Config().Retention != 400*24*time.Hour {
		t.Fatalf("%+v, %v", log.Config(), err)
	}
	var bad *oncemill.ConfigError
	for _, limit := range []int{-1, 1001} {
		if _, err := log.List(t.Context(), audit.Filter{Limit: limit}); !errors.As(err, &bad) {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
}
