package testserver

import (
	"database/sql"
	"path/filepath"
	"testing"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/oncemill/oncemill"
)

// SQLite returns a pool on a fresh file, removed when t ends.
func SQLite(t testing.TB) *sql.DB {
	t.Helper()
	return OpenSQLite(t, filepath.Join(t.TempDir(), "test.db"))
}

// OpenSQLite returns a pool on the file at path, closed when t ends. Several pools may be open
// on one file, also in several processes.
func OpenSQLite(t testing.TB, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(path))
	if err != nil {
		t.Fatalf("testserver: %v", err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("testserver: close the pool: %v", err)
		}
	})
	return db
}
