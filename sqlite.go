package oncemill

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/turn"
)

const (
	busyTimeout      = 10 * time.Second
	leastBusyTimeout = time.Second
	walLimit         = 64 << 20
)

// SQLiteDSN returns the data source name that oncemill's guarantees require on SQLite,
// for the driver modernc.org/sqlite (named "sqlite"):
//
//	db, err := sql.Open("sqlite", oncemill.SQLiteDSN("orders.db"))
//
// It sets:
//
//   - A write-ahead log, so that readers do not wait for the writer. The log file shrinks
//     to 64 MiB when the space is no longer needed.
//   - synchronous=FULL, so that a commit survives a power failure.
//   - Foreign keys.
//   - A busy timeout of 10 s, for transactions that you begin yourself. Those of oncemill
//     wait as long as their context allows.
//   - Transactions that begin as writers. A transaction that began as a reader fails at
//     once when it writes after another one has written.
func SQLiteDSN(path string) string {
	q := url.Values{
		"_txlock": {"immediate"},
		"_pragma": {
			fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()), "journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)",
			fmt.Sprintf("journal_size_limit(%d)", walLimit),
		},
	}
	return (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String()
}

// CheckSQLite returns a [*ConfigError] for each setting of a SQLite database that
// breaks oncemill's guarantees, joined; [SQLiteDSN] sets them all. Migrate and
// CheckMigrated call it, and so do relay, inbox and idempotency when they start
// (through CheckMigrated). The first transaction of oncemill on db calls it too.
//
// A database in memory belongs to one connection, so it needs db.SetMaxOpenConns(1).
func CheckSQLite(ctx context.Context, db *sql.DB) error {
	if db == nil {
		return &ConfigError{Field: "oncemill.CheckSQLite db", Value: "nil", Problem: "a database is needed"}
	}
	conn, err := connect(ctx, db)
	if err != nil {
		return fmt.Errorf("check SQLite: connect: %w", err)
	}
	defer conn.Close() //nolint:errcheck // returns the connection to the pool
	s, err := readSettings(ctx, conn)
	if err != nil {
		return fmt.Errorf("check SQLite: %w", err)
	}
	if err := s.check(db.Stats().MaxOpenConnections); err != nil {
		return err
	}
	turn.Of(db).Passed()
	return nil
}

// sqliteSettings are the connection settings that the guarantees depend on.
type sqliteSettings struct {
	file, journal string
	synchronous   int
	foreignKeys   bool
	busy          int64 // milliseconds
	immediate     bool  // BeginTx begins as a writer
}

func readSettings(ctx context.Context, conn *sql.Conn) (s sqliteSettings, err error) {
	err = conn.QueryRowContext(ctx, `
select d.file, j.journal_mode, s.synchronous, f.foreign_keys, b.timeout
from pragma_database_list d, pragma_journal_mode j, pragma_synchronous s, pragma_foreign_keys f, pragma_busy_timeout b
where d.name = 'main'`).Scan(&s.file, &s.journal, &s.synchronous, &s.foreignKeys, &s.busy)
	if err != nil {
		return s, err
	}
	s.immediate, err = beginsAsWriter(ctx, conn)
	return s, err
}

// beginsAsWriter begins a transaction on a connection that may only read. SQLite
// refuses that to a writer, so no lock is taken.
func beginsAsWriter(ctx context.Context, conn *sql.Conn) (yes bool, err error) {
	whole := context.WithoutCancel(ctx) // the setting must be undone
	if _, err := conn.ExecContext(whole, `pragma query_only = 1`); err != nil {
		return false, err
	}
	tx, err := conn.BeginTx(whole, nil)
	switch {
	case err == nil:
		err = tx.Rollback()
	case sqlerr.ReadOnly(err):
		yes, err = true, nil
	}
	_, back := conn.ExecContext(whole, `pragma query_only = 0`)
	return yes, errors.Join(err, back)
}

func (s sqliteSettings) check(connections int) error {
	var errs []error
	need := func(setting, value, problem string) {
		errs = append(errs, &ConfigError{Field: "SQLite " + setting, Value: value, Problem: problem + "; open the database with oncemill.SQLiteDSN"})
	}
	switch {
	case s.file == "" && connections != 1:
		errs = append(errs, &ConfigError{
			Field: "SQLite connections", Value: strconv.Itoa(connections),
			Problem: "each connection has a database in memory of its own; call db.SetMaxOpenConns(1), or use a file",
		})
	case s.file != "" && !strings.EqualFold(s.journal, "wal"):
		need("journal_mode", s.journal, "must be WAL; otherwise readers and the writer block each other")
	}
	if s.file != "" && s.synchronous < 2 {
		need("synchronous", strconv.Itoa(s.synchronous), "must be 2 (FULL); otherwise a power failure can lose commits")
	}
	if !s.foreignKeys {
		need("foreign_keys", "0", "must be 1; otherwise a handler can commit its transaction unnoticed")
	}
	if s.busy < leastBusyTimeout.Milliseconds() {
		need("busy_timeout", strconv.FormatInt(s.busy, 10), "must be at least 1000 (ms); otherwise readers, and transactions that you begin yourself, fail instead of waiting")
	}
	if !s.immediate {
		need("_txlock", "deferred", "must be immediate; otherwise a transaction that reads first fails to write after another one has written")
	}
	return errors.Join(errs...)
}
