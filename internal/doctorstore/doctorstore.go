// Package doctorstore reads what package doctor judges: settings of the server, and the oldest rows
// of tables. It changes nothing.
package doctorstore

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
)

//go:embed postgresql/*.sql sqlite/*.sql
var files embed.FS

// Most is how many rows of a kind are read at most.
const Most = 20

// Server is how a server is set.
type Server struct {
	Now time.Time // of its clock

	// SynchronousCommit and Isolation are the settings of this session: "on", "read committed".
	// Isolation is empty if there is no choice.
	SynchronousCommit, Isolation string

	Autovacuum, TrackCounts, Fsync, FullPageWrites bool
	Standby                                        bool // it accepts no writes
	Standbys                                       int  // that follow it
	Synchronous                                    bool // a commit waits for a standby
}

// Setting is a setting of a role; Role is empty for all roles. Reset is the statement that removes
// it.
type Setting struct{ Role, Value, Reset string }

// Snapshot is a transaction that keeps deleted rows.
type Snapshot struct {
	Kind, Name string // "session" with its application_name, or "prepared transaction" with its name
	PID        int    // of a session
	Age        time.Duration
}

// Sequence is a sequence from which each session takes several numbers.
type Sequence struct {
	Name  string
	Cache int64
}

// Index is an index that the migrations have made, with the statement that makes it.
type Index struct{ Name, Create string }

// Store reads one database. What a database does not have is never found in it. Methods that read
// a table need it to exist.
type Store interface {
	Server(ctx context.Context) (Server, error)
	ForgetfulRoles(ctx context.Context) ([]Setting, error)
	Snapshots(ctx context.Context, olderThan time.Duration) ([]Snapshot, error)
	IdleSlots(ctx context.Context) ([]string, error)
	CachedSequences(ctx context.Context) ([]Sequence, error)
	WithoutAutovacuum(ctx context.Context) ([]string, error)
	Subscribed(ctx context.Context) ([]string, error)

	// Hidden returns tables of which row-level security hides rows from this role.
	Hidden(ctx context.Context) ([]string, error)

	// MissingIndexes returns the indexes of sets that do not exist, or cannot be used.
	MissingIndexes(ctx context.Context, sets []oncemill.Migrations) ([]Index, error)

	// Pooled reports whether a session of a client moves between sessions of the server. It needs
	// several connections, and returns false if the pool gives it none.
	Pooled(ctx context.Context) (bool, error)

	// These return an age, 0 if there is no row.
	OverdueKey(ctx context.Context) (time.Duration, error) // since it should have been deleted
	OldestID(ctx context.Context, consumer string) (time.Duration, error)
	OldestHistory(ctx context.Context) (time.Duration, error)
	OldestClosed(ctx context.Context) (time.Duration, error)
}

// Open returns the Store of a database.
func Open(db *sql.DB, where database.Database) Store {
	if where.Dialect == oncemill.SQLite {
		return newSQLite(db, where)
	}
	return newPostgres(db, where)
}

// tables is what both databases have.
type tables struct {
	db   *sql.DB
	text struct{ OverdueKey, OldestID, OldestHistory, OldestClosed string }
}

func (t *tables) OverdueKey(ctx context.Context) (time.Duration, error) {
	return t.age(ctx, t.text.OverdueKey)
}

func (t *tables) OldestID(ctx context.Context, consumer string) (time.Duration, error) {
	return t.age(ctx, t.text.OldestID, consumer)
}

func (t *tables) OldestHistory(ctx context.Context) (time.Duration, error) {
	return t.age(ctx, t.text.OldestHistory)
}

func (t *tables) OldestClosed(ctx context.Context) (time.Duration, error) {
	return t.age(ctx, t.text.OldestClosed)
}

func (t *tables) age(ctx context.Context, text string, args ...any) (time.Duration, error) {
	var micros int64
	err := t.db.QueryRowContext(ctx, text, args...).Scan(&micros)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil
	}
	return time.Duration(micros) * time.Microsecond, err
}

// list returns a value for each row.
func list[T any](ctx context.Context, db *sql.DB, scan func(*sql.Rows, *T) error, text string, args ...any) (all []T, err error) {
	rows, err := db.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var value T
		if err := scan(rows, &value); err != nil {
			return nil, err
		}
		all = append(all, value)
	}
	return all, rows.Err()
}

func name(rows *sql.Rows, into *string) error { return rows.Scan(into) }
