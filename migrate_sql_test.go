package oncemill_test

import (
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// scriptOf returns the script for a database, without the line that only a shell knows.
func scriptOf(t *testing.T, db *sql.DB, cfg oncemill.Config) (first, rest string) {
	t.Helper()
	status, err := oncemill.MigrationStatus(t.Context(), db, cfg, allSets...)
	if err != nil {
		t.Fatal(err)
	}
	script, err := oncemill.MigrationSQL(cfg, status, allSets...)
	if err != nil {
		t.Fatal(err)
	}
	first, rest, _ = strings.Cut(script, "\n")
	return first, rest
}

// expectMigrated expects that there is nothing to do, and that the script cannot be run twice.
func expectMigrated(t *testing.T, db *sql.DB, cfg oncemill.Config, script string, dump func() string) {
	t.Helper()
	if err := oncemill.CheckMigrated(t.Context(), db, cfg, allSets...); err != nil {
		t.Error(err)
	}
	if first, rest := scriptOf(t, db, cfg); first+rest != "" {
		t.Errorf("there is something to do: %s", rest)
	}
	before := dump()
	_, err := db.ExecContext(t.Context(), script)
	if err == nil || !strings.Contains(err.Error(), "versions") {
		t.Errorf("it can be run again: %v", err)
	}
	_, _ = db.ExecContext(t.Context(), `rollback`) // as the end of a shell
	if err := oncemill.Migrate(t.Context(), db, cfg, allSets...); err != nil {
		t.Error(err)
	}
	expectAlike(t, before, dump())
}

func expectAlike(t *testing.T, want, got string) {
	t.Helper()
	if got == want {
		return
	}
	a, b := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			t.Errorf("they differ in line %d:\n%s\n%s", i+1, a[i], b[i])
			return
		}
	}
	t.Errorf("%d and %d lines", len(a), len(b))
}

var (
	// A step makes tokens for the dead letters that are being replayed.
	random = regexp.MustCompile(`\b[0-9a-f]{32}`)
	times  = regexp.MustCompile(`\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d|Z)?`)
	tokens = regexp.MustCompile(`(?m)^\\(un)?restrict .*$`) // of newer versions of pg_dump
)

// dumpOf returns the dump of a database of a private server, without times.
func dumpOf(t *testing.T, server *testserver.PostgresServer, database string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "dump")
	server.Dump(file, "--dbname="+urlOf(t, server, "postgres", database))
	content, err := os.ReadFile(file)
	if err != nil || len(content) < 10_000 {
		t.Fatalf("%d bytes, %v", len(content), err)
	}
	return tokens.ReplaceAllString(withoutChance(string(content)), "")
}

func withoutChance(text string) string {
	return random.ReplaceAllString(times.ReplaceAllString(text, "TIME"), "RANDOM")
}

func urlOf(t *testing.T, server *testserver.PostgresServer, role, database string) string {
	t.Helper()
	u, err := url.Parse(server.DSN())
	if err != nil {
		t.Fatal(err)
	}
	u.User, u.Path = url.UserPassword(role, "postgres"), "/"+database
	return u.String()
}

// load runs a script with psql.
func load(t *testing.T, server *testserver.PostgresServer, role, database, script string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "script.sql")
	if err := os.WriteFile(file, []byte(`\connect "`+urlOf(t, server, role, database)+`"`+"\n"+script), 0o600); err != nil {
		t.Fatal(err)
	}
	server.Load(file)
}

// The owner runs the script with psql, where docs/operations.md migrates. The grants of that
// document follow. The dump is that of a database that was migrated.
func TestMigrationSQL_MakesWhatMigrateMakes(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	var script string
	made := newShopBy(t, server, func(owner *sql.DB) error {
		first, rest := scriptOf(t, owner, oncemill.Config{Dialect: oncemill.PostgreSQL})
		script = rest
		load(t, server, "shop_owner", "shop", first+"\n"+rest)
		return nil
	})
	other := testserver.PrivatePostgres(t)
	newShopBy(t, other, func(owner *sql.DB) error { return oncemill.Migrate(t.Context(), owner, oncemill.Config{}, allSets...) })
	expectAlike(t, dumpOf(t, other, "shop"), dumpOf(t, server, "shop"))
	expectMigrated(t, made.owner, oncemill.Config{Dialect: oncemill.PostgreSQL}, script, func() string { return dumpOf(t, server, "shop") })
}

// What an older version has left is brought to where Migrate brings it.
func TestMigrationSQL_UpgradesAsMigrateDoes(t *testing.T) {
	t.Parallel()
	for _, dump := range []string{"outbox3", "outbox5"} {
		t.Run(dump+"/postgresql", func(t *testing.T) {
			t.Parallel()
			server := testserver.PrivatePostgres(t)
			cfg := oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "mill_upgrade_dump"}
			dbs := map[string]*sql.DB{}
			for _, name := range []string{"made", "other"} {
				if _, err := server.Open().ExecContext(t.Context(), `create database `+name); err != nil {
					t.Fatal(err)
				}
				load(t, server, "postgres", name, "set check_function_bodies = false;\n"+string(unzip(t, dump+".sql.gz")))
				dbs[name] = server.OpenAs("postgres", name)
			}
			first, script := scriptOf(t, dbs["made"], cfg)
			load(t, server, "postgres", "made", first+"\n"+script)
			if err := oncemill.Migrate(t.Context(), dbs["other"], cfg, allSets...); err != nil {
				t.Fatal(err)
			}
			expectAlike(t, dumpOf(t, server, "other"), dumpOf(t, server, "made"))
			expectMigrated(t, dbs["made"], cfg, script, func() string { return dumpOf(t, server, "made") })
		})
	}
	for _, dump := range []string{"", "outbox3", "outbox5"} {
		t.Run(dump+"/sqlite", func(t *testing.T) {
			t.Parallel()
			cfg := oncemill.Config{Dialect: oncemill.SQLite}
			dbs := map[string]*sql.DB{}
			var script string
			for _, name := range []string{"made", "other"} {
				file := filepath.Join(t.TempDir(), name)
				if dump != "" {
					if err := os.WriteFile(file, unzip(t, dump+".db.gz"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				if name == "made" {
					bare, err := sql.Open("sqlite", file) // as a shell does
					if err != nil {
						t.Fatal(err)
					}
					_, script = scriptOf(t, bare, cfg)
					_, err = bare.ExecContext(t.Context(), script)
					if err := errors.Join(err, bare.Close()); err != nil {
						t.Fatal(err)
					}
				}
				dbs[name] = testserver.OpenSQLite(t, file)
			}
			if err := oncemill.Migrate(t.Context(), dbs["other"], cfg, allSets...); err != nil {
				t.Fatal(err)
			}
			expectAlike(t, contentOf(t, dbs["other"]), contentOf(t, dbs["made"]))
			expectMigrated(t, dbs["made"], cfg, script, func() string { return contentOf(t, dbs["made"]) })
		})
	}
}

// contentOf returns all that is in a SQLite database, without times.
func contentOf(t *testing.T, db *sql.DB) string {
	t.Helper()
	rowsOf := func(query string) (lines []string) {
		t.Helper()
		rows, err := db.QueryContext(t.Context(), query)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		columns, err := rows.Columns()
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
			values, into := make([]any, len(columns)), make([]any, len(columns))
			for i := range values {
				into[i] = &values[i]
			}
			if err := rows.Scan(into...); err != nil {
				t.Fatal(err)
			}
			for i, v := range values {
				if n, ok := v.(int64); ok && strings.HasSuffix(columns[i], "_until") && n > 1e15 {
					values[i] = "TIME" // of the migration
				}
			}
			lines = append(lines, withoutChance(fmt.Sprintf("%q", values)))
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		return lines
	}
	all := rowsOf(`select * from pragma_journal_mode`)
	all = append(all, rowsOf(`select type, name, tbl_name, sql from sqlite_schema order by name`)...)
	for _, table := range rowsOf(`select name from sqlite_schema where type = 'table' order by name`) {
		all = append(all, table)
		all = append(all, rowsOf(`select * from "`+strings.Trim(table, `["]`)+`"`)...)
	}
	return strings.Join(all, "\n")
}

func TestMigrationSQL_RefusesWhatItCannotKnow(t *testing.T) {
	t.Parallel()
	var bad *oncemill.ConfigError
	if _, err := oncemill.MigrationSQL(oncemill.Config{}, nil, outbox.Migrations); !errors.As(err, &bad) {
		t.Errorf("without a dialect: %v", err)
	}
	if _, err := oncemill.MigrationSQL(oncemill.Config{Dialect: oncemill.SQLite, Schema: "x"}, nil, outbox.Migrations); !errors.As(err, &bad) {
		t.Errorf("a schema on SQLite: %v", err)
	}
	var schema *oncemill.SchemaError
	newer := []oncemill.Status{{Set: "outbox", Version: 99, Oldest: 99}}
	if _, err := oncemill.MigrationSQL(oncemill.Config{Dialect: oncemill.SQLite}, newer, outbox.Migrations); !errors.As(err, &schema) {
		t.Errorf("a newer database: %v", err)
	}
	newer[0].Oldest = 1
	if text, err := oncemill.MigrationSQL(oncemill.Config{Dialect: oncemill.SQLite}, newer, outbox.Migrations); text != "" || err != nil {
		t.Errorf("a newer database that this library can work with: %q, %v", text, err)
	}
}

// A set of a user may have steps that end with a comment, or a name with a quote.
func TestMigrationSQL_WritesAnySet(t *testing.T) {
	t.Parallel()
	set := oncemill.Migrations{Name: "it's", FS: fstest.MapFS{
		"sqlite/0001_a.up.sql": {Data: []byte("create table {{a}} (n integer);\ninsert into {{a}} values (1) -- one")},
		"sqlite/0002_b.up.sql": {Data: []byte("-- compatible: 1\ninsert into {{a}} values (2)\n")},
	}}
	db, cfg := testserver.SQLite(t), oncemill.Config{Dialect: oncemill.SQLite, Prefix: "my_"}
	script, err := oncemill.MigrationSQL(cfg, nil, set)
	if err != nil {
		t.Fatal(err)
	}
	_, script, _ = strings.Cut(script, "\n")
	if _, err := db.ExecContext(t.Context(), script); err != nil {
		t.Fatalf("%v in\n%s", err, script)
	}
	var n, compatible int
	err = db.QueryRowContext(t.Context(), `select (select sum(n) from my_a), (select compatible from my_migrations where version = 2)`).Scan(&n, &compatible)
	status, serr := oncemill.MigrationStatus(t.Context(), db, cfg, set)
	if err := errors.Join(err, serr); err != nil || n != 3 || compatible != 1 || !slices.Equal(status, []oncemill.Status{{Set: "it's", Version: 2, Latest: 2}}) {
		t.Errorf("%d, %d, %+v, %v", n, compatible, status, err)
	}
}
