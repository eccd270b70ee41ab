package oncemill_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestSQLiteDSN_ConfiguresEveryConnection(t *testing.T) {
	t.Parallel()
	db := testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "test.db"))
	for range 3 {
		conn, err := db.Conn(t.Context()) // held, so the next is another one
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for pragma, want := range map[string]string{
			"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1", "busy_timeout": "10000",
		} {
			var got string
			if err := conn.QueryRowContext(t.Context(), "pragma "+pragma).Scan(&got); err != nil || got != want {
				t.Errorf("%s is %s, %v; want %s", pragma, got, err, want)
			}
		}
	}
}

// A path is a path, whatever it holds.
func TestSQLiteDSN_OpensTheFileOfThatName(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{
		"plain.db", "with space.db", "question?mode=memory.db", "hash#tag.db", "percent%41.db", "plus+and&.db", "Zoë 日本語 🚀.db", "semi;colon.db", "file:colon.db",
	} {
		path := filepath.Join(dir, name)
		db := testserver.OpenSQLite(t, path)
		if _, err := db.ExecContext(t.Context(), `create table orders (id integer primary key)`); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(path); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSQLiteDSN_TakesARelativePath(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for _, path := range []string{"test.db", "./other.db", "a:b.db"} {
		db := testserver.OpenSQLite(t, path)
		if _, err := db.ExecContext(t.Context(), `create table orders (id integer primary key)`); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		if _, err := os.Stat(filepath.Join(dir, path)); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// A transaction that has read before it writes fails at once where it did not
// begin as a writer; and readers do not wait for the writer.
func TestSQLiteDSN_WritersWaitAndReadersDoNot(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	if _, err := db.ExecContext(t.Context(), `create table counter (n integer); insert into counter values (0)`); err != nil {
		t.Fatal(err)
	}
	const writers, each = 4, 10
	var running sync.WaitGroup
	for range writers {
		running.Go(func() {
			for range each {
				if err := increment(t, db); err != nil {
					t.Error(err)
				}
			}
		})
	}
	running.Wait()
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(t.Context(), `update counter set n = -1`); err != nil {
		t.Error(err)
	}
	var n int
	if err := db.QueryRowContext(t.Context(), `select n from counter`).Scan(&n); err != nil || n != writers*each {
		t.Errorf("counted %d, %v; want %d", n, err, writers*each)
	}
}

func increment(t *testing.T, db *sql.DB) error {
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var n int
	if err := tx.QueryRowContext(t.Context(), `select n from counter`).Scan(&n); err != nil {
		return err
	}
	if _, err := tx.ExecContext(t.Context(), `update counter set n = $1`, n+1); err != nil {
		return err
	}
	return tx.Commit()
}

// knocking counts the connections that are opened.
type knocking struct {
	dsn   string
	knock chan struct{}
}

func (k *knocking) Driver() driver.Driver { return &sqlite.Driver{} }

func (k *knocking) Connect(context.Context) (driver.Conn, error) {
	select {
	case k.knock <- struct{}{}:
	default:
	}
	return k.Driver().Open(k.dsn)
}

// Somebody has the file to himself for a moment, as when several processes find it new
// and the first one gives it its write-ahead log.
func TestMigrate_WaitsForItsTurnAtANewFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "test.db")
	first, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { first.Close() })
	alone, err := first.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer alone.Close()
	if _, err := alone.ExecContext(t.Context(), `begin exclusive`); err != nil {
		t.Fatal(err)
	}
	// SQLite's own timeout, which is not always heeded there, is short.
	dsn := strings.Replace(oncemill.SQLiteDSN(path), "busy_timeout%2810000%29", "busy_timeout%281000%29", 1)
	if !strings.Contains(dsn, "%281000%29") {
		t.Fatalf("the timeout is not in %s", dsn)
	}
	k := &knocking{dsn: dsn, knock: make(chan struct{})}
	db := sql.OpenDB(k)
	t.Cleanup(func() { db.Close() })
	ended := make(chan error, 1)
	go func() {
		ended <- oncemill.Migrate(t.Context(), db, oncemill.Config{Dialect: oncemill.SQLite}, outbox.Migrations)
	}()
	for range 3 {
		select {
		case <-k.knock:
		case err := <-ended:
			t.Fatalf("it did not wait: %v", err)
		}
	}
	if _, err := alone.ExecContext(t.Context(), `rollback`); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
