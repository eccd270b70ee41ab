package main

import (
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// execute runs a script as a shell does that has no settings, without the shell's own first line.
func execute(t *testing.T, path, script string) error {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	_, script, _ = strings.Cut(script, "\n")
	_, err = db.ExecContext(t.Context(), script)
	return errors.Join(err, db.Close())
}

func TestMigrateSQLCommand_PrintsWhatIsDue(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	run := onFile(t, path)
	all := run(0, "migrate", "sql", "--all")
	if run(0, "migrate", "sql", "--all", "--dialect", "sqlite") != all || runner(t, nil)(0, "migrate", "sql", "--all", "--dialect", "sqlite") != all {
		t.Error("the dialect is not that of --database")
	}
	if out := run(2, "migrate", "sql"); !strings.Contains(out, "there is no file") {
		t.Error(out)
	}
	if err := execute(t, path, all); err != nil {
		t.Fatal(err)
	}
	run(0, "migrate", "status")
	if out := run(0, "migrate", "sql"); out != "-- nothing to do: the tables have the versions of this program\n" {
		t.Error(out)
	}
	if err := execute(t, path, all); err == nil || !strings.Contains(err.Error(), "versions") {
		t.Errorf("it can be run again: %v", err)
	}

	run(0, "migrate", "down", "--set", "dlq", "--yes")
	run(0, "migrate", "down", "--set", "dlq", "--yes")
	due := run(0, "migrate", "sql")
	if !strings.Contains(due, "-- dlq: from version 4 to 6\n") || strings.Contains(due, "-- outbox") {
		t.Error(due)
	}
	from := "outbox=5,audit=1,steer=1,dlq=4,relay=6,inbox=4,idempotency=2,idempotency_usage=1"
	if run(0, "migrate", "sql", "--from", from) != due {
		t.Error("the versions are not those of --from")
	}
	if err := execute(t, path, due); err != nil {
		t.Fatal(err)
	}
	run(0, "migrate", "status")
}

func TestMigrateSQLCommand_ReadsTheVersionsOfPostgreSQL(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	run := runner(t, []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema})
	script := run(0, "migrate", "sql")
	if run(0, "migrate", "sql", "--all") != script || !strings.HasPrefix(script, `\set ON_ERROR_STOP on`) {
		t.Errorf("an empty database: %.200s", script)
	}
	_, script, _ = strings.Cut(script, "\n")
	if _, err := pg.DB.ExecContext(t.Context(), script); err != nil {
		t.Fatal(err)
	}
	run(0, "migrate", "status")
	if out := run(0, "migrate", "sql"); !strings.HasPrefix(out, "-- nothing to do") {
		t.Error(out)
	}
}

func TestMigrateSQLCommand_ExplainsWrongUse(t *testing.T) {
	t.Parallel()
	run := runner(t, nil)
	for args, want := range map[string]string{
		"--all":                                  "give --dialect",
		"--all --dialect mysql":                  "must be postgresql or sqlite",
		"--all --from outbox=1 --dialect sqlite": "not both",
		"--dialect sqlite":                       "needs --all or --from",
		"--from outbox --dialect sqlite":         "must be the name of a set",
		"--from bogus=1 --dialect sqlite":        "must be one of outbox",
		"--from dlq=1,dlq=2 --dialect sqlite":    "twice",
		"--all --dialect sqlite --schema x":      "--schema",
		"":                                       "--database or ONCEMILL_DATABASE is required",
	} {
		if out := run(2, append([]string{"migrate", "sql"}, strings.Fields(args)...)...); !strings.Contains(out, want) {
			t.Errorf("%s: %s", args, out)
		}
	}
	if out := run(1, "migrate", "sql", "--from", "outbox=99", "--dialect", "sqlite"); !strings.Contains(out, "the database is newer") {
		t.Error(out)
	}
}
