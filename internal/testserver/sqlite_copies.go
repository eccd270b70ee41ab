package testserver

import (
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/oncemill/oncemill"
)

// SQLiteCopies returns a function that makes a file for a test, with what prepare has put into
// its database. prepare runs once, whichever test is the first: for what many tests begin with,
// such as all migrations.
//
//	var migrated = testserver.SQLiteCopies(func(db *sql.DB) error { ... })
//	db := testserver.OpenSQLite(t, migrated(t))
func SQLiteCopies(prepare func(db *sql.DB) error) func(t testing.TB) (path string) {
	original := sync.OnceValues(func() (content []byte, err error) {
		dir, err := os.MkdirTemp("", "oncemill")
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		path := filepath.Join(dir, "test.db")
		db, err := sql.Open("sqlite", oncemill.SQLiteDSN(path))
		if err != nil {
			return nil, err
		}
		// The last connection that is closed leaves all in the one file.
		if err := errors.Join(prepare(db), db.Close()); err != nil {
			return nil, err
		}
		return os.ReadFile(path)
	})
	return func(t testing.TB) string {
		t.Helper()
		content, err := original()
		if err != nil {
			t.Fatalf("testserver: %v", err)
		}
		path := filepath.Join(t.TempDir(), "test.db")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatalf("testserver: %v", err)
		}
		return path
	}
}
