package oncemill_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func openSQLite(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// Whoever opens the database in another way is told what is wrong, all at once, before
// anything is written.
func TestCheckSQLite_NamesEachSettingThatIsWrong(t *testing.T) {
	t.Parallel()
	var wrong *oncemill.ConfigError
	if err := oncemill.CheckSQLite(t.Context(), nil); !errors.As(err, &wrong) {
		t.Errorf("without a database: %v", err)
	}
	without := func(setting, instead string) func(string) string {
		return func(dsn string) string {
			changed := strings.Replace(dsn, setting, instead, 1)
			if changed == dsn {
				t.Fatalf("no %s in %s", setting, dsn)
			}
			return changed
		}
	}
	same := func(dsn string) string { return dsn }
	for name, c := range map[string]struct {
		change      func(dsn string) string
		memory      bool
		connections int
		wrong       []string
	}{
		"as it should be":             {change: same},
		"in memory, one connection":   {change: same, memory: true, connections: 1},
		"in memory, many connections": {change: same, memory: true, wrong: []string{"SQLite connections"}},
		"no log":                      {change: without("journal_mode%28WAL%29", "journal_mode%28DELETE%29"), wrong: []string{"SQLite journal_mode"}},
		"asynchronous":                {change: without("synchronous%28FULL%29", "synchronous%28NORMAL%29"), wrong: []string{"SQLite synchronous"}},
		"no foreign keys":             {change: without("foreign_keys%281%29", "foreign_keys%280%29"), wrong: []string{"SQLite foreign_keys"}},
		"impatient":                   {change: without("busy_timeout%2810000%29", "busy_timeout%28999%29"), wrong: []string{"SQLite busy_timeout"}},
		"begins as a reader":          {change: without("_txlock=immediate", "_txlock=deferred"), wrong: []string{"SQLite _txlock"}},
		"plain": {
			change: func(dsn string) string { return dsn[:strings.Index(dsn, "?")] },
			wrong:  []string{"SQLite journal_mode", "SQLite foreign_keys", "SQLite busy_timeout", "SQLite _txlock"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "test.db")
			if c.memory {
				path = ":memory:"
			}
			db := openSQLite(t, c.change(oncemill.SQLiteDSN(path)))
			db.SetMaxOpenConns(c.connections)
			for call, err := range map[string]error{
				"CheckSQLite":   oncemill.CheckSQLite(t.Context(), db),
				"Migrate":       oncemill.Migrate(t.Context(), db, oncemill.Config{}, outbox.Migrations),
				"CheckMigrated": oncemill.CheckMigrated(t.Context(), db, oncemill.Config{}, outbox.Migrations),
			} {
				if got := strings.Join(wrongSettings(err), ", "); got != strings.Join(c.wrong, ", ") {
					t.Errorf("%s: got %q (%v), want %q", call, got, err, c.wrong)
				}
			}
			// It has left the connection as it was.
			if _, err := db.ExecContext(t.Context(), `create table if not exists mine (n integer)`); err != nil {
				t.Error(err)
			}
		})
	}
}

// wrongSettings returns the settings that an error names.
func wrongSettings(err error) (names []string) {
	var one *oncemill.ConfigError
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		if inner := errors.Unwrap(err); inner != nil {
			return wrongSettings(inner)
		}
		if errors.As(err, &one) {
			return []string{one.Field}
		}
		return nil
	}
	for _, err := range joined.Unwrap() {
		names = append(names, wrongSettings(err)...)
	}
	return names
}

// A reader keeps the write-ahead log long. It shrinks when the reader has ended.
func TestSQLiteDSN_TheLogShrinks(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "test.db")
	db := testserver.OpenSQLite(t, path)
	execute := func(text string, args ...any) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), text, args...); err != nil {
			t.Fatal(err)
		}
	}
	size := func() int64 {
		info, err := os.Stat(path + "-wal")
		if err != nil {
			t.Fatal(err)
		}
		return info.Size()
	}
	execute(`create table blobs (b blob)`)
	reader, err := db.BeginTx(t.Context(), &sql.TxOptions{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	var n int
	if err := reader.QueryRowContext(t.Context(), `select count(*) from blobs`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		execute(`insert into blobs values (zeroblob(10 << 20))`)
	}
	long := size()
	if err := reader.Rollback(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		execute(`insert into blobs values (zeroblob(1))`)
	}
	if short := size(); long < 100<<20 || short > 64<<20 {
		t.Errorf("%d bytes while it was read, %d afterwards", long, short)
	}
}

// A migration waits for the turn, and then for the lock, as long as its context allows.
func TestMigrate_ReportsALockOnSQLite(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "test.db")
	tx, err := testserver.OpenSQLite(t, path).BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var locked *oncemill.MigrationLockError
	if err := oncemill.Migrate(ctx, testserver.OpenSQLite(t, path), oncemill.Config{}, outbox.Migrations); !errors.As(err, &locked) {
		t.Errorf("got %v", err)
	}
}
