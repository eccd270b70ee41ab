package plantest_test

import (
	"database/sql"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements/plantest"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

const texts = `-- name: find
-- index: words_word
select id from {{words}} w where word = $1;

-- name: change
-- By the index on word.
update {{words}} set seen = seen + 1 where id in (select id from {{words}} where word = $1 limit $2);

-- name: permitted
-- Nobody is in a hurry.
-- scans: words: it counts all
select sum(seen) from {{words}};

-- name: lock
-- It has no plan.
vacuum;
`

func folder(dialect oncemill.Dialect, more string) fstest.MapFS {
	return fstest.MapFS{dialect.String() + "/words.sql": {Data: []byte(texts + more)}}
}

// newWords returns a database with a filled table, and how to drop its index.
func newWords(t *testing.T, db *sql.DB, cfg oncemill.Config) (database.Database, func(text string)) {
	t.Helper()
	where, err := database.Resolve(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	exec := func(text string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), where.Expand(text)); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	if where.Dialect == oncemill.PostgreSQL {
		exec(`create schema if not exists {{schema}}`)
	}
	exec(`create table {{words}} (id integer primary key, word text not null, seen integer not null default 0)`)
	exec(`create index {{name:words_word}} on {{words}} (word)`)
	exec(`insert into {{words}} (id, word) with recursive n (i) as (select 1 union all select i + 1 from n where i < 5000) select i, 'word ' || i from n`)
	exec(`analyze {{words}}`)
	return where, exec
}

func TestFaults_AreThoseOfADroppedIndex(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	for _, c := range []struct {
		db     *sql.DB
		cfg    oncemill.Config
		drop   string
		faults []string
	}{
		{pg.Open(t), pg.Config, `drop index {{words_word}}`, []string{"find: does not use words_word but []", "find: Seq Scan of words", "change: Seq Scan of words"}},
		{testserver.SQLite(t), oncemill.Config{}, `drop index {{name:words_word}}`, []string{"find: does not use words_word but []", "find: SCAN w of words", "change: SCAN oncemill_words of words"}},
	} {
		where, exec := newWords(t, c.db, c.cfg)
		if faults := plantest.Faults(t, c.db, where, folder(where.Dialect, "")); len(faults) > 0 {
			t.Errorf("%s: %q", where.Dialect, faults)
		}
		exec(c.drop)
		if faults := plantest.Faults(t, c.db, where, folder(where.Dialect, "")); !slices.Equal(faults, c.faults) {
			t.Errorf("%s without the index: %q", where.Dialect, faults)
		}
	}
}

func TestFaults_NameScansUselessPermissionsAndEmptyTables(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	for _, c := range []struct {
		db   *sql.DB
		cfg  oncemill.Config
		step string
	}{
		{pg.Open(t), pg.Config, "Seq Scan"},
		{testserver.SQLite(t), oncemill.Config{}, "SCAN oncemill_words"},
	} {
		where, exec := newWords(t, c.db, c.cfg)
		exec(`create table {{empty}} (id integer primary key)`)
		const more = `
-- name: scanned
-- No index has seen.
delete from {{words}} where seen = $1;

-- name: needless
-- By primary key.
-- scans: words: it did once
select * from {{words}} where id = $1;

-- name: broken
-- Its table is another's.
select nothing from {{words}} where id = $1;

-- name: nothing
-- By primary key.
select * from {{empty}} where id = $1;
`
		want := []string{
			"empty is empty: fill it before its statements are explained",
			fmt.Sprintf("scanned: %s of words", c.step),
			"needless: permits a scan of words, which its plan does not need",
		}
		faults := plantest.Faults(t, c.db, where, folder(where.Dialect, more))
		if n := len(faults) - 1; n > 0 && strings.HasPrefix(faults[n], "broken: cannot be explained: ") {
			faults = faults[:n]
		} else {
			t.Errorf("%s: %q", where.Dialect, faults)
		}
		if !slices.Equal(faults, want) {
			t.Errorf("%s: %q", where.Dialect, faults)
		}
	}
}

// An order may choose an index that the condition does not use: that reads it all.
func TestFaults_OnPostgreSQLNameAWholeIndex(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	db := pg.Open(t, "enable_seqscan=off")
	where, _ := newWords(t, db, pg.Config)
	const more = `
-- name: sorted
-- The order of the index spares a sort.
select id from {{words}} order by word;

-- name: first
-- index: words_word, from its start
select id from {{words}} order by word limit 10;
`
	faults := plantest.Faults(t, db, where, folder(where.Dialect, more))
	want := []string{"sorted: Index Scan without condition by words_word of words"}
	if !slices.Equal(faults, want) {
		t.Errorf("got %q", faults)
	}
}

// The order of the index spares a sort, and the limit is reached if enough rows are old.
func TestFaults_OnPostgreSQLNameAComparisonThatNoIndexServes(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	where, exec := newWords(t, pg.DB, pg.Config)
	exec(`alter table {{words}} add column at timestamptz not null default now()`)
	exec(`create index {{name:words_at}} on {{words}} (at)`)
	exec(`analyze {{words}}`)
	const more = `
-- name: slow
-- index: words_at
select id from {{words}} where at < clock_timestamp() order by at limit 10;

-- name: quick
-- index: words_at
select id from {{words}} where at < statement_timestamp() order by at limit 10;
`
	faults := plantest.Faults(t, pg.DB, where, folder(where.Dialect, more))
	want := []string{"slow: Index Scan that compares each row with clock_timestamp() of words"}
	if !slices.Equal(faults, want) {
		t.Errorf("got %q", faults)
	}
}
