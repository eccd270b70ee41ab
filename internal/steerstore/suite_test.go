package steerstore_test

import (
	"cmp"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements/plantest"
	"github.com/oncemill/oncemill/internal/steerstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// fixture is a database with pauses and an audit.
type fixture struct {
	steerstore.Store
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

var (
	set      = oncemill.Migrations{Name: "steer", FS: steerstore.Migrations}
	auditSet = oncemill.Migrations{Name: "audit", FS: auditstore.Migrations}
)

func newFixture(t *testing.T, db *sql.DB, cfg oncemill.Config) *fixture {
	t.Helper()
	must(t, oncemill.Migrate(t.Context(), db, cfg, auditSet, set))
	where, err := database.Resolve(db, cfg)
	must(t, err)
	return &fixture{steerstore.Open(db, where), db, where}
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

// audited returns the entries of the audit, oldest first.
func (f *fixture) audited(t *testing.T) (acts []string) {
	t.Helper()
	entries, err := auditstore.Open(f.db, f.where).List(t.Context(), auditstore.Filter{Limit: 100, OldestFirst: true})
	must(t, err)
	for _, e := range entries {
		acts = append(acts, e.By+" "+e.Action+" "+e.Subject+" "+e.Reason)
	}
	return acts
}

var ada, bob = steerstore.Act{By: "ada", Reason: "full"}, steerstore.Act{By: "bob", Reason: "mine"}

func TestStore_APauseStaysUntilItIsResumedAndTellsWho(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		if already, err := f.Pause(t.Context(), "topic", "orders", ada); err != nil || already != nil {
			t.Fatal(already, err)
		}
		already, err := f.Pause(t.Context(), "topic", "orders", bob)
		if err != nil || already == nil || already.By != "ada" || already.Reason != "full" || time.Since(already.Since).Abs() > time.Hour {
			t.Fatalf("%+v, %v", already, err)
		}
		for kind, want := range map[string]int{"": 1, "topic": 1, "key": 0} {
			if got, err := f.Paused(t.Context(), kind); err != nil || len(got) != want {
				t.Errorf("%q: %+v, %v", kind, got, err)
			}
		}
		if ended, err := f.Resume(t.Context(), "topic", "orders", bob); err != nil || ended.By != "ada" {
			t.Errorf("%+v, %v", ended, err)
		}
		if _, err := f.Resume(t.Context(), "topic", "orders", bob); !errors.Is(err, steerstore.ErrNotPaused) {
			t.Error(err)
		}
		if got, err := f.Pauses(t.Context()); err != nil || len(got) != 0 {
			t.Errorf("%+v, %v", got, err)
		}
		want := []string{"ada topic.pause topic orders full", "bob topic.resume topic orders mine"}
		if got := f.audited(t); strings.Join(got, ";") != strings.Join(want, ";") {
			t.Errorf("audited %q", got)
		}
	})
}

func TestStore_OfTwoOperatorsOnePausesAndTheyStayBelowTheBound(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.exec(t, `insert into {{pauses}} (kind, name, actor) with recursive n (i) as (select 1 union all select i + 1 from n where i < $1) select 'key', 'k' || i, 'x' from n`, steerstore.MostPauses-1)
		var group sync.WaitGroup
		errs := make([]error, 4)
		for i := range errs {
			group.Go(func() { _, errs[i] = f.Pause(t.Context(), "topic", fmt.Sprint("t", i), ada) })
		}
		group.Wait()
		refused := 0
		for _, err := range errs {
			if errors.Is(err, steerstore.ErrTooMany) {
				refused++
			} else if err != nil {
				t.Error(err)
			}
		}
		got, err := f.Pauses(t.Context())
		if refused != len(errs)-1 || err != nil || len(got) != steerstore.MostPauses || len(f.audited(t)) != 1 {
			t.Errorf("%d refused, %d paused, %v", refused, len(got), err)
		}
		f.exec(t, `insert into {{pauses}} (kind, name, actor) with recursive n (i) as (select 1 union all select i + 1 from n where i < 50) select 'topic', 'by hand' || i, 'x' from n`)
		paused, err := f.Paused(t.Context(), "")
		if err != nil || len(paused) != steerstore.MostPauses+50 {
			t.Errorf("%d are paused, %v", len(paused), err)
		}
		if got, err := f.Pauses(t.Context()); err != nil || len(got) != steerstore.MostPauses {
			t.Errorf("%d are listed, %v", len(got), err)
		}
		f.exec(t, `insert into {{pauses}} (kind, name, actor) with recursive n (i) as (select 1 union all select i + 1 from n where i < 2 * $1) select 'topic', 'more' || i, 'x' from n`, steerstore.MostApplied)
		if paused, err := f.Paused(t.Context(), ""); err != nil || len(paused) != steerstore.MostApplied {
			t.Errorf("%d are paused, %v", len(paused), err)
		}
	})
}

func TestStore_NothingIsPausedWithoutTheTableAndItIsFoundLater(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		_, err := f.Pause(t.Context(), "topic", "orders", ada)
		must(t, err)
		for range 2 { // before a table was seen, and after
			if f.where.Dialect == oncemill.PostgreSQL {
				f.exec(t, `drop function {{pauses_resume}}(text, text)`)
			}
			f.exec(t, `drop table {{lane_commands}}`)
			f.exec(t, `drop table {{pauses}}`)
			f.exec(t, `delete from {{migrations}} where set_name = 'steer'`)
			pauses, err := f.Pauses(t.Context())
			commands, err2 := f.Commands(t.Context())
			if err := errors.Join(err, err2); err != nil || len(pauses)+len(commands) > 0 {
				t.Fatal(pauses, commands, err)
			}
			must(t, oncemill.Migrate(t.Context(), f.db, f.where.Config(), set))
			if _, err := f.Pause(t.Context(), "topic", "orders", ada); err != nil {
				t.Fatal(err)
			}
			if got, err := f.Pauses(t.Context()); err != nil || len(got) != 1 {
				t.Fatalf("%+v, %v", got, err)
			}
		}
	})
}

func TestStore_ACommandIsGivenOnceUntilItIsCarriedOut(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		must(t, f.Give(t.Context(), steerstore.ActionRelease, []int{3}, "", "", "lane 3", "", ada))
		must(t, f.Give(t.Context(), steerstore.ActionRelease, []int{3}, "", "", "lane 3", "", bob))
		must(t, f.Give(t.Context(), steerstore.ActionRetry, []int{0, 1, 31}, "orders", "", "topic orders", "", ada))
		got, err := f.Commands(t.Context())
		slices.SortFunc(got, func(a, b steerstore.Command) int { return cmp.Compare(a.ID, b.ID) })
		if err != nil || len(got) != 4 || got[0].Action != "release" || got[0].Lane != 3 || time.Since(got[0].Asked).Abs() > time.Hour || got[1].Topic != "orders" || got[3].Lane != 31 {
			t.Fatalf("%+v, %v", got, err)
		}
		for _, worker := range []string{"w", "w", "another"} {
			if begun, err := f.BeginRelease(t.Context(), got[0].ID, worker); err != nil || begun != (worker == "w") {
				t.Errorf("begun by %s: %v, %v", worker, begun, err)
			}
		}
		for _, c := range got[1:] {
			must(t, f.End(t.Context(), c.ID))
			must(t, f.End(t.Context(), c.ID))
		}
		if got, err := f.Commands(t.Context()); err != nil || len(got) != 1 || got[0].Worker != "w" {
			t.Errorf("%+v, %v", got, err)
		}
		if got := f.audited(t); len(got) != 3 {
			t.Errorf("audited %q", got)
		}
	})
}

// The commands of one lane keep none of another lane away.
func TestStore_CommandsOfALaneHideNoOthers(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.exec(t, `insert into {{lane_commands}} (action, lane, key) with recursive n (i) as (select 1 union all select i + 1 from n where i < 5000) select 'retry', 3, 'k' || i from n`)
		must(t, f.Give(t.Context(), steerstore.ActionRetry, []int{4}, "", "late", "key late", "", ada))
		must(t, f.Give(t.Context(), steerstore.ActionRelease, []int{3}, "", "", "lane 3", "", ada))
		got, err := f.Commands(t.Context())
		must(t, err)
		lanes, releases := map[int]int{}, 0
		for _, c := range got {
			lanes[c.Lane]++
			if c.Action == steerstore.ActionRelease {
				releases++
			}
		}
		if lanes[3] != steerstore.MostCommands || lanes[4] != 1 || releases != 1 {
			t.Errorf("%d of the first lane, %d of the second, %d releases", lanes[3], lanes[4], releases)
		}
	})
}

func TestStore_AnActWithoutAnAuditDoesNothing(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		_, err := f.Pause(t.Context(), "topic", "orders", ada)
		must(t, err)
		f.exec(t, `drop table {{audit}}`)
		_, err1 := f.Pause(t.Context(), "topic", "other", ada)
		_, err2 := f.Resume(t.Context(), "topic", "orders", ada)
		err3 := f.Give(t.Context(), steerstore.ActionRetry, []int{1}, "", "", "all", "", ada)
		for _, err := range []error{err1, err2, err3} {
			if !errors.Is(err, auditstore.ErrNotMigrated) {
				t.Error(err)
			}
		}
		pauses, err := f.Pauses(t.Context())
		commands, err2 := f.Commands(t.Context())
		if errors.Join(err, err2) != nil || len(pauses) != 1 || pauses[0].Name != "orders" || len(commands) != 0 {
			t.Errorf("%+v, %+v", pauses, commands)
		}
	})
}

func TestPlans_NoStatementScansATable(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		for _, table := range []string{"pauses", "lane_commands"} {
			columns, values := "kind, name, actor", "'key', 'k' || i, 'x'"
			if table == "lane_commands" {
				columns, values = "action, lane, topic", "'retry', i % 32, 't' || i"
			}
			f.exec(t, `insert into {{`+table+`}} (`+columns+`) with recursive n (i) as (select 1 union all select i + 1 from n where i < 20000) select `+values+` from n`)
			f.exec(t, `analyze {{`+table+`}}`)
		}
		plantest.Check(t, f.db, f.where, steerstore.Files)
	})
}
