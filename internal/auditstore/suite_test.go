package auditstore_test

import (
	"database/sql"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements/plantest"
	"github.com/oncemill/oncemill/internal/testserver"
)

// fixture is a database with an audit.
type fixture struct {
	auditstore.Store
	db    *sql.DB
	where database.Database
}

// each runs a test of the contract of Store on both databases.
func each(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	t.Parallel()
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		pg := testserver.Postgres(t)
		test(t, newFixture(t, pg.DB, pg.Config))
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, newFixture(t, testserver.SQLite(t), oncemill.Config{}))
	})
}

var set = oncemill.Migrations{Name: "audit", FS: auditstore.Migrations}

func newFixture(t *testing.T, db *sql.DB, cfg oncemill.Config) *fixture {
	t.Helper()
	must(t, oncemill.Migrate(t.Context(), db, cfg, set))
	where, err := database.Resolve(db, cfg)
	must(t, err)
	return &fixture{auditstore.Open(db, where), db, where}
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

func (f *fixture) record(t *testing.T, acts ...auditstore.Act) {
	t.Helper()
	tx, err := f.db.BeginTx(t.Context(), nil)
	must(t, err)
	defer tx.Rollback()
	for _, act := range acts {
		must(t, f.Record(t.Context(), tx, act))
	}
	must(t, tx.Commit())
}

func (f *fixture) subjects(t *testing.T, filter auditstore.Filter) (subjects []string) {
	t.Helper()
	if filter.Limit == 0 {
		filter.Limit = 100
	}
	entries, err := f.List(t.Context(), filter)
	must(t, err)
	for _, e := range entries {
		subjects = append(subjects, e.Subject)
	}
	return subjects
}

func TestStore_AnEntryTellsWhoWhenWhyWhat(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.record(t, auditstore.Act{Action: "dead_letter.replay", By: "ada", Reason: "fixed", Subjects: []string{"dead_letter 1", "dead_letter 2"}, Details: "edited"})
		entries, err := f.List(t.Context(), auditstore.Filter{Limit: 10, OldestFirst: true})
		must(t, err)
		if len(entries) != 2 {
			t.Fatalf("%+v", entries)
		}
		e := entries[0]
		if e.ID == 0 || time.Since(e.At).Abs() > time.Hour || e.By != "ada" || e.Reason != "fixed" || e.Action != "dead_letter.replay" || e.Subject != "dead_letter 1" || e.Details != "edited" {
			t.Errorf("%+v", e)
		}
		if hasRole := e.Role != ""; hasRole != (f.where.Dialect == oncemill.PostgreSQL) {
			t.Errorf("role %q", e.Role)
		}
		if entries[1].Subject != "dead_letter 2" {
			t.Errorf("%+v", entries[1])
		}
	})
}

func TestStore_AnEntryGoesWithItsTransaction(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		tx, err := f.db.BeginTx(t.Context(), nil)
		must(t, err)
		must(t, f.Record(t.Context(), tx, auditstore.Act{Action: "a", By: "ada", Subjects: []string{"s"}}))
		must(t, tx.Rollback())
		if got := f.subjects(t, auditstore.Filter{}); len(got) > 0 {
			t.Errorf("%q", got)
		}
	})
}

func TestStore_ListsByEachIndexInBothDirectionsPageByPage(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.record(t, auditstore.Act{Action: "a", By: "ada", Subjects: []string{"1", "2"}})
		f.record(t, auditstore.Act{Action: "b", By: "bob", Subjects: []string{"3", "1"}})
		f.record(t, auditstore.Act{Action: "a", By: "bob", Subjects: []string{"4"}})
		for _, c := range []struct {
			filter auditstore.Filter
			want   string
		}{
			{auditstore.Filter{}, "1 2 3 1 4"},
			{auditstore.Filter{By: "bob"}, "3 1 4"},
			{auditstore.Filter{Action: "a"}, "1 2 4"},
			{auditstore.Filter{Subject: "1"}, "1 1"},
			{auditstore.Filter{By: "bob", Action: "a"}, "4"},
			{auditstore.Filter{Since: time.Now().Add(-time.Hour), Until: time.Now().Add(time.Hour)}, "1 2 3 1 4"},
			{auditstore.Filter{Since: time.Now().Add(time.Hour)}, ""},
			{auditstore.Filter{Until: time.Now().Add(-time.Hour)}, ""},
		} {
			want := strings.Fields(c.want)
			for _, oldestFirst := range []bool{true, false} {
				c.filter.OldestFirst, c.filter.Limit, c.filter.AfterAt, c.filter.AfterID = oldestFirst, 1, time.Time{}, 0
				var got []string
				for {
					page, err := f.List(t.Context(), c.filter)
					must(t, err)
					if len(page) == 0 {
						break
					}
					got = append(got, page[0].Subject)
					c.filter.AfterAt, c.filter.AfterID = page[0].At, page[0].ID
				}
				if !oldestFirst {
					slices.Reverse(got)
				}
				if !slices.Equal(got, want) {
					t.Errorf("%+v: %q, want %q", c.filter, got, want)
				}
			}
		}
	})
}

func TestStore_BoundsTexts(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		long := strings.Repeat("é", 5000)
		f.record(t, auditstore.Act{Action: "a", By: "a\x00" + long, Reason: "b\xff" + long, Subjects: []string{long}, Details: long})
		entries, err := f.List(t.Context(), auditstore.Filter{Limit: 10})
		must(t, err)
		for _, s := range []string{entries[0].By, entries[0].Reason, entries[0].Subject, entries[0].Details} {
			if len(s) > 5000 || len(s) < 4000 || !utf8.ValidString(s) || strings.Contains(s, "\x00") {
				t.Errorf("%d bytes: %.20q", len(s), s)
			}
		}
		if got := f.subjects(t, auditstore.Filter{Subject: entries[0].Subject, By: entries[0].By}); len(got) != 1 {
			t.Errorf("found %d by its long texts", len(got))
		}
	})
}

func TestStore_PurgesWhatIsOlder(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.record(t, auditstore.Act{Action: "a", By: "ada", Subjects: []string{"old", "young"}})
		const many = 1200
		old := map[oncemill.Dialect]string{oncemill.SQLite: "at - 7200000000", oncemill.PostgreSQL: "at - interval '2 hours'"}[f.where.Dialect]
		f.exec(t, `insert into {{audit}} (actor, action, subject) with recursive n (i) as (select 1 union all select i + 1 from n where i < $1) select 'ada', 'a', 'old' from n`, many)
		f.exec(t, `update {{audit}} set at = `+old+` where subject = 'old'`)
		if n, err := f.Purge(t.Context(), time.Hour); err != nil || n != many+1 {
			t.Errorf("purged %d, %v", n, err)
		}
		if got := f.subjects(t, auditstore.Filter{}); !slices.Equal(got, []string{"young"}) {
			t.Errorf("left %q", got)
		}
	})
}

func TestStore_TellsThatItsTableIsMissing(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.exec(t, `drop table {{audit}}`)
		tx, err := f.db.BeginTx(t.Context(), nil)
		must(t, err)
		defer tx.Rollback()
		if err := f.Record(t.Context(), tx, auditstore.Act{Action: "a", By: "ada", Subjects: []string{"s"}}); !errors.Is(err, auditstore.ErrNotMigrated) {
			t.Errorf("got %v", err)
		}
	})
}

func (f *fixture) fill(t *testing.T) {
	t.Helper()
	at := `clock_timestamp() - i * interval '1 minute'`
	if f.where.Dialect == oncemill.SQLite {
		at = `cast(unixepoch('subsec') * 1000000 as integer) - i * 60000000`
	}
	f.exec(t, strings.ReplaceAll(`
		insert into {{audit}} (actor, action, subject, at)
		with recursive n (i) as (select 1 union all select i + 1 from n where i < 20000)
		select 'actor ' || (i % 300), 'action ' || (i % 50), 'subject ' || (i % 5000), AT from n`, "AT", at))
	f.exec(t, `analyze {{audit}}`)
}

func TestPlans_NoStatementScansTheTable(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.fill(t)
		plantest.Check(t, f.db, f.where, auditstore.Files)
		for index, names := range map[string][]string{
			"at": {"newest_by_time", "oldest_by_time", "purge"}, "actor": {"newest_by_actor", "oldest_by_actor"},
			"action": {"newest_by_action", "oldest_by_action"}, "subject": {"newest_by_subject", "oldest_by_subject"},
		} {
			drop := `drop index {{audit_` + index + `}}`
			if f.where.Dialect == oncemill.SQLite {
				drop = `drop index {{name:audit_` + index + `}}`
			}
			f.exec(t, drop)
			faults := strings.Join(plantest.Faults(t, f.db, f.where, auditstore.Files), "\n")
			for _, name := range names {
				if !strings.Contains(faults, name+": ") {
					t.Errorf("without audit_%s, %s has no fault: %s", index, name, faults)
				}
			}
		}
	})
}

// Two acts of the same time are told apart by their ids.
func TestStore_PagesThroughEntriesOfOneTime(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		for i := range 7 {
			f.record(t, auditstore.Act{Action: "a", By: "ada", Subjects: []string{strconv.Itoa(i)}})
		}
		f.exec(t, `update {{audit}} set at = (select min(at) from {{audit}})`)
		filter := auditstore.Filter{Limit: 3, OldestFirst: true}
		var got []string
		for {
			page, err := f.List(t.Context(), filter)
			must(t, err)
			if len(page) == 0 {
				break
			}
			for _, e := range page {
				got = append(got, e.Subject)
			}
			last := page[len(page)-1]
			filter.AfterAt, filter.AfterID = last.At, last.ID
		}
		if strings.Join(got, "") != "0123456" {
			t.Errorf("%q", got)
		}
	})
}
