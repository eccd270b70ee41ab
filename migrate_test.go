package oncemill_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// files makes a set of migrations; the texts do for both dialects.
func files(name string, texts ...string) oncemill.Migrations {
	set := fstest.MapFS{}
	for i, text := range texts {
		for _, dialect := range []string{"postgresql", "sqlite"} {
			number := dialect + "/000" + string(rune('1'+i)) + "_step"
			set[number+".up.sql"] = &fstest.MapFile{Data: []byte(text)}
			set[number+".down.sql"] = &fstest.MapFile{Data: []byte(`select 'not used'`)}
		}
	}
	return oncemill.Migrations{Name: name, FS: set}
}

const (
	makeShelf = "-- A comment; with a semicolon.\ncreate table {{shelf}} (id integer primary key);\ncreate index {{name:shelf_by_id}} on {{shelf}} (id);"
	makeBox   = `create table {{box}} (id integer primary key)`
	broken    = `create table {{halfway}} (id integer primary key); create table {{box}} (id no_such_type_at_all, primary key (nothing))`
)

func (p *testDB) migrate(t *testing.T, sets ...oncemill.Migrations) error {
	t.Helper()
	return oncemill.Migrate(t.Context(), p.db, p.cfg, sets...)
}

func (p *testDB) expectStatus(t *testing.T, want []oncemill.Status, sets ...oncemill.Migrations) {
	t.Helper()
	got, err := oncemill.MigrationStatus(t.Context(), p.db, p.cfg, sets...)
	for i, s := range got { // without what is for MigrationSQL alone
		got[i] = oncemill.Status{Set: s.Set, Version: s.Version, Latest: s.Latest, Oldest: s.Oldest}
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("status is %v, %v; want %v", got, err, want)
	}
}

func TestMigrate_AppliesEachSetOnce(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		one, two, other := files("shop", makeShelf), files("shop", makeShelf, makeBox), files("other", `create table {{other}} (id integer)`)
		p.expectStatus(t, []oncemill.Status{{Set: "shop", Version: 0, Latest: 2}, {Set: "other", Version: 0, Latest: 1}}, two, other)
		if before := p.objects(t); len(before) != 0 {
			t.Errorf("looking made %v", before)
		}
		if err := p.migrate(t, one, other); err != nil {
			t.Fatal(err)
		}
		p.expectStatus(t, []oncemill.Status{{Set: "other", Version: 1, Latest: 1}, {Set: "shop", Version: 1, Latest: 1}}, other, one)
		p.expectStatus(t, []oncemill.Status{{Set: "shop", Version: 1, Latest: 2}, {Set: "third", Version: 0, Latest: 1}}, two, files("third", makeBox))
		p.exec(t, `insert into {{shelf}} (id) values (1)`)
		if err := p.migrate(t, two); err != nil { // the second step alone
			t.Fatal(err)
		}
		p.exec(t, `insert into {{box}} (id) select id from {{shelf}}`)
		p.expectStatus(t, []oncemill.Status{{Set: "shop", Version: 2, Latest: 2}}, two)
		if got := p.list(t, `select set_name || ' ' || version || ' ' || step_name from {{migrations}} order by 1`); !slices.Equal(got, []string{"other 1 step", "shop 1 step", "shop 2 step"}) {
			t.Errorf("remembered: %v", got)
		}
	})
}

func TestMigrate_AgainChangesNothing(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		sets := []oncemill.Migrations{outbox.Migrations, files("shop", makeShelf, makeBox)}
		if err := p.migrate(t, sets...); err != nil {
			t.Fatal(err)
		}
		before := p.objects(t)
		for range 3 {
			if err := p.migrate(t, sets...); err != nil {
				t.Error(err)
			}
		}
		if after := p.objects(t); !slices.Equal(before, after) {
			t.Errorf("it was\n%v\nand is\n%v", before, after)
		}
		if err := p.migrate(t); err != nil { // no set at all
			t.Error(err)
		}
	})
}

// As when a deployment starts ten processes on a fresh database.
func TestMigrate_TenProcessesAtOnce(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		for _, sets := range [][]oncemill.Migrations{
			{files("shop", makeShelf)},
			{files("shop", makeShelf, makeBox), outbox.Migrations},
			{outbox.Migrations, files("shop", makeShelf, makeBox)}, // in the other order; nothing is left to do
		} {
			start := make(chan struct{})
			var running sync.WaitGroup
			for range 10 {
				db := p.open(t)
				running.Go(func() {
					<-start
					if err := oncemill.Migrate(t.Context(), db, p.cfg, sets...); err != nil {
						t.Error(err)
					}
				})
			}
			close(start)
			running.Wait()
		}
		sets := []oncemill.Migrations{outbox.Migrations, files("shop", makeShelf, makeBox)}
		status, err := oncemill.MigrationStatus(t.Context(), p.db, p.cfg, sets...)
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		for _, s := range status {
			for version := range s.Latest {
				want = append(want, fmt.Sprint(s.Set, " ", version+1))
			}
		}
		slices.Sort(want)
		if got := p.list(t, `select set_name || ' ' || version from {{migrations}} order by 1`); !slices.Equal(got, want) {
			t.Errorf("remembered: %v, want %v", got, want)
		}
	})
}

// Two services with prefixes of their own may share a schema.
func TestMigrate_SeveralPrefixesAtOnce(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		prefixes := []string{"a_", "b_", "c_", strings.Repeat("p", 31)}
		var running sync.WaitGroup
		for _, prefix := range prefixes {
			cfg := p.cfg
			cfg.Prefix = prefix
			for range 3 {
				db := p.open(t)
				running.Go(func() {
					if err := oncemill.Migrate(t.Context(), db, cfg, outbox.Migrations, files("shop", makeShelf)); err != nil {
						t.Error(err)
					}
				})
			}
		}
		running.Wait()
		for _, prefix := range prefixes {
			p.cfg.Prefix = prefix
			for _, table := range []string{"outbox", "outbox_history", "shelf", "migrations"} {
				if !p.has(t, table) {
					t.Errorf("%s%s is missing", prefix, table)
				}
			}
			if err := oncemill.CheckMigrated(t.Context(), p.db, p.cfg, outbox.Migrations); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestMigrate_TakesTheLongestSchema(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	p.cfg.Schema += strings.Repeat("x", 31-len(p.cfg.Schema))
	p.cfg.Prefix = strings.Repeat("p", 31)
	t.Cleanup(func() {
		if _, err := p.db.ExecContext(context.WithoutCancel(t.Context()), `drop schema `+p.cfg.Schema+` cascade`); err != nil {
			t.Error(err)
		}
	})
	if err := p.migrate(t, outbox.Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(p.db, outbox.Config{Database: p.cfg})
	if err != nil {
		t.Fatal(err)
	}
	if err := outboxqueue.Of(box).Check(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestMigrate_RefusesANewerDatabaseUnchanged(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		if err := p.migrate(t, files("shop", makeShelf, makeBox), files("other", `create table {{other}} (id integer)`)); err != nil {
			t.Fatal(err)
		}
		before := p.objects(t)
		older := files("shop", makeShelf)
		for act, err := range map[string]error{
			"migrate": p.migrate(t, older),
			"check":   oncemill.CheckMigrated(t.Context(), p.db, p.cfg, older),
		} {
			var newer *oncemill.SchemaError
			if !errors.As(err, &newer) || newer.Set != "shop" || newer.Have != 2 || newer.Want != 1 || !strings.Contains(newer.Problem, "newer") || !strings.Contains(err.Error(), `"shop"`) {
				t.Errorf("%s: got %v", act, err)
			}
		}
		if after := p.objects(t); !slices.Equal(before, after) {
			t.Errorf("it was\n%v\nand is\n%v", before, after)
		}
		p.expectStatus(t, []oncemill.Status{{Set: "shop", Version: 2, Latest: 1, Oldest: 2}}, older)
	})
}

func TestMigrate_RollsBackASetWhoseStepFails(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		p.db.SetMaxOpenConns(1) // a connection left in the transaction would show
		err := p.migrate(t, files("shop", makeShelf, broken))
		if err == nil || !strings.Contains(err.Error(), "shop") || !strings.Contains(err.Error(), "step 2") {
			t.Errorf("got %v", err)
		}
		if left := p.objects(t); len(left) != 0 {
			t.Errorf("left over: %v", left)
		}
		// Sets before it stay.
		if err := p.migrate(t, files("first", makeBox), files("shop", makeShelf, broken)); err == nil {
			t.Error("no error")
		}
		if !p.has(t, "box") || p.has(t, "shelf") || p.has(t, "halfway") {
			t.Errorf("there are %v", p.objects(t))
		}
		before := p.objects(t)
		if err := p.migrate(t, files("shop", makeShelf, broken)); err == nil {
			t.Error("no error")
		}
		if after := p.objects(t); !slices.Equal(before, after) {
			t.Errorf("it was\n%v\nand is\n%v", before, after)
		}
		// Mended, it goes through.
		if err := p.migrate(t, files("shop", makeShelf, `create table {{halfway}} (id integer primary key)`)); err != nil {
			t.Error(err)
		}
	})
}

func TestMigrate_EndsWithItsContext(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		endless := `select pg_sleep(60)`
		if p.isSQLite() {
			endless = `create table {{numbers}} as with recursive n (i) as (select 1 union all select i + 1 from n) select count(*) as n from n`
		}
		start := time.Now()
		if err := oncemill.Migrate(ctx, p.db, p.cfg, files("shop", makeShelf, endless)); err == nil {
			t.Error("no error")
		}
		if took := time.Since(start); took > 20*time.Second {
			t.Errorf("it took %v", took)
		}
		if left := p.objects(t); len(left) != 0 {
			t.Errorf("left over: %v", left)
		}
		if err := p.migrate(t, files("shop", makeShelf)); err != nil {
			t.Error(err)
		}
	})
}

func TestCheckMigrated_NamesEverySetThatIsNot(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		done, behind, absent := files("done", makeShelf), files("behind", makeBox, `create table {{more}} (id integer)`), files("absent", makeBox)
		if err := p.migrate(t, done, files("behind", makeBox)); err != nil {
			t.Fatal(err)
		}
		if err := oncemill.CheckMigrated(t.Context(), p.db, p.cfg, done); err != nil {
			t.Error(err)
		}
		err := oncemill.CheckMigrated(t.Context(), p.db, p.cfg, done, behind, absent)
		joined, ok := err.(interface{ Unwrap() []error })
		if !ok || len(joined.Unwrap()) != 2 {
			t.Fatalf("got %v", err)
		}
		for i, want := range []oncemill.SchemaError{{Set: "behind", Have: 1, Want: 2}, {Set: "absent", Have: 0, Want: 1}} {
			var got *oncemill.SchemaError
			if !errors.As(joined.Unwrap()[i], &got) || got.Set != want.Set || got.Have != want.Have || got.Want != want.Want || !strings.Contains(got.Problem, "migrate") {
				t.Errorf("got %+v, want %+v", got, want)
			}
		}
	})
}

func TestCheckMigrated_OnAnEmptyDatabase(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var missing *oncemill.SchemaError
		if err := oncemill.CheckMigrated(t.Context(), p.db, p.cfg, outbox.Migrations); !errors.As(err, &missing) || missing.Have != 0 {
			t.Errorf("got %v", err)
		}
		if left := p.objects(t); len(left) != 0 {
			t.Errorf("left over: %v", left)
		}
	})
}

func TestMigrate_RefusesABadSetWithoutAConnection(t *testing.T) {
	t.Parallel()
	db := untouchableDB(t)
	file := func(names ...string) fs.FS {
		set := fstest.MapFS{}
		for _, name := range names {
			set[name] = &fstest.MapFile{Data: []byte(`select 1`)}
		}
		return set
	}
	for name, set := range map[string]oncemill.Migrations{
		"no name":          {FS: file("postgresql/0001_a.up.sql")},
		"no files at all":  {Name: "shop"},
		"other dialect":    {Name: "shop", FS: file("sqlite/0001_a.up.sql")},
		"only down":        {Name: "shop", FS: file("postgresql/0001_a.down.sql")},
		"starts at 2":      {Name: "shop", FS: file("postgresql/0002_a.up.sql")},
		"a gap":            {Name: "shop", FS: file("postgresql/0001_a.up.sql", "postgresql/0003_b.up.sql")},
		"a number twice":   {Name: "shop", FS: file("postgresql/0001_a.up.sql", "postgresql/0001_b.up.sql")},
		"a stray file":     {Name: "shop", FS: file("postgresql/0001_a.up.sql", "postgresql/readme.md")},
		"a number too far": {Name: "shop", FS: file("postgresql/0001_a.up.sql", "postgresql/00002_b.up.sql")},
	} {
		cfg := oncemill.Config{Dialect: oncemill.PostgreSQL}
		for act, err := range map[string]error{
			"migrate": oncemill.Migrate(t.Context(), db, cfg, files("good", makeBox), set),
			"check":   oncemill.CheckMigrated(t.Context(), db, cfg, set),
		} {
			if bad := testserver.ConfigErrors(err); len(bad) != 1 || bad[0].Field != "oncemill.Migrations" || bad[0].Problem == "" {
				t.Errorf("%s, %s: got %v", name, act, err)
			}
		}
	}
}

func TestMigrate_NeedsADatabase(t *testing.T) {
	t.Parallel()
	for _, cfg := range []oncemill.Config{{}, {Dialect: oncemill.SQLite}} {
		if err := oncemill.Migrate(t.Context(), nil, cfg, outbox.Migrations); len(testserver.ConfigErrors(err)) != 1 {
			t.Errorf("got %v", err)
		}
	}
}

// A role that may not create schemas can migrate into one that is there.
func TestMigrate_NeedsNoRightToCreateAnExistingSchema(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	role := "role_" + pg.Config.Schema
	for _, text := range []string{`create role ` + role, `create schema ` + pg.Config.Schema + ` authorization ` + role} {
		if _, err := pg.DB.ExecContext(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		for _, text := range []string{`drop owned by ` + role, `drop role ` + role} {
			if _, err := pg.DB.ExecContext(ctx, text); err != nil {
				t.Error(err)
			}
		}
	})
	db := pg.Open(t, "role="+role)
	if err := oncemill.Migrate(t.Context(), db, pg.Config, outbox.Migrations); err != nil {
		t.Error(err)
	}
	other := pg.Config
	other.Schema = "no_" + other.Schema[:20]
	if err := oncemill.Migrate(t.Context(), db, other, outbox.Migrations); err == nil || !strings.Contains(err.Error(), "42501") {
		t.Errorf("a schema was made without the right to: %v", err)
	}
}

// What a migration makes, its down file takes away.
func TestMigrations_OfTheOutboxCanBeUndone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		if err := p.migrate(t, files("shop", makeBox)); err != nil {
			t.Fatal(err)
		}
		without := p.objects(t)
		if err := p.migrate(t, outbox.Migrations); err != nil {
			t.Fatal(err)
		}
		dialect := oncemill.PostgreSQL
		if p.isSQLite() {
			dialect = oncemill.SQLite
		}
		downs, err := fs.Glob(outbox.Migrations.FS, dialect.String()+"/*.down.sql")
		if err != nil || len(downs) == 0 {
			t.Fatalf("%v, %v", downs, err)
		}
		slices.Reverse(downs)
		for _, name := range downs {
			text, err := fs.ReadFile(outbox.Migrations.FS, name)
			if err != nil {
				t.Fatal(err)
			}
			p.exec(t, string(text))
		}
		p.exec(t, `delete from {{migrations}} where set_name = 'outbox'`)
		if after := p.objects(t); !slices.Equal(without, withoutSequence(after)) {
			t.Errorf("it was\n%v\nand is\n%v", without, after)
		}
		if err := p.migrate(t, outbox.Migrations); err != nil {
			t.Error(err)
		}
	})
}

// withoutSequence leaves SQLite's own table of sequences out, which stays.
func withoutSequence(objects []string) []string {
	return slices.DeleteFunc(objects, func(s string) bool { return strings.HasPrefix(s, "sqlite_sequence") })
}

// A migrator that is frozen in the middle keeps its locks for seconds, not for ever.
func TestMigrate_BoundsItsIdleTransaction(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	set := files("shop", `create table {{schema}}.seen as select current_setting('idle_in_transaction_session_timeout') as idle`)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, set); err != nil {
		t.Fatal(err)
	}
	var idle string
	if err := pg.DB.QueryRowContext(t.Context(), database.Of(pg.Config).Expand(`select idle from {{schema}}.seen`)).Scan(&idle); err != nil || idle != "10s" {
		t.Errorf("got %q, %v", idle, err)
	}
}

// A publication for all tables refuses to delete from one without a replica identity.
func TestMigrate_EveryTableHasAReplicaIdentity(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, allSets...); err != nil {
		t.Fatal(err)
	}
	rows, err := pg.DB.QueryContext(t.Context(), `
		select c.relname, c.relreplident = 'f' or c.relreplident in ('d', 'i') and exists (
			select from pg_index i where i.indrelid = c.oid and case c.relreplident when 'i' then i.indisreplident else i.indisprimary end)
		from pg_class c
		where c.relnamespace = $1::regnamespace and c.relkind = 'r' and c.relpersistence = 'p' -- no others are published`, pg.Config.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	tables := 0
	for ; rows.Next(); tables++ {
		var table string
		var has bool
		if err := rows.Scan(&table, &has); err != nil {
			t.Fatal(err)
		}
		if !has {
			t.Errorf("%s has no replica identity", table)
		}
	}
	if err := rows.Err(); err != nil || tables < 15 {
		t.Errorf("%d tables, %v", tables, err)
	}
}
