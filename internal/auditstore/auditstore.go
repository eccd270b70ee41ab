// Package auditstore stores the audit: what people did, by whom and why.
package auditstore

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

//go:embed migrations postgresql sqlite
var files embed.FS

// Migrations create the table audit.
var Migrations = statements.Migrations(files)

// ErrNotMigrated is returned by Record if the table does not exist. The act fails, since
// it would not be audited.
var ErrNotMigrated = errors.New("the table of the audit does not exist; pass audit.Migrations to oncemill.Migrate")

// Act is what somebody did to one or several subjects. Texts that a database does not
// accept are cleaned, and cut at 4 KiB with a mark.
type Act struct {
	Action   string // a constant such as "dead_letter.replay"
	By       string // who; required
	Reason   string
	Subjects []string // such as "dead_letter 17"; one entry each
	Details  string   // of each of them, or empty
}

// Entry is an entry of the audit; see audit.Entry for its fields.
type Entry struct {
	ID                                         int64
	At                                         time.Time
	Role, By, Reason, Action, Subject, Details string
}

// Filter selects entries. Empty fields match everything.
type Filter struct {
	By, Action, Subject string

	Since time.Time // at or after; zero: any
	Until time.Time // before; zero: any

	OldestFirst bool
	Limit       int
	AfterAt     time.Time // with AfterID, the entry after which the list begins; both zero: at its start
	AfterID     int64
}

// Store holds the audit of a database. It is safe for concurrent use.
type Store interface {
	// Record writes the entries of an act in the transaction of the act.
	Record(ctx context.Context, tx oncemill.Tx, act Act) error

	// List returns the entries that f selects.
	List(ctx context.Context, f Filter) ([]Entry, error)

	// Purge deletes the entries that are older than retention, in short transactions.
	Purge(ctx context.Context, retention time.Duration) (deleted int64, err error)
}

// Open returns the store of a database.
func Open(db *sql.DB, where database.Database) Store {
	if where.Dialect == oncemill.SQLite {
		return newSQLite(db, where)
	}
	return newPostgres(db, where)
}

// texts are the statements. Those of the same name take the same arguments on all
// databases; times are in microseconds since 1970.
type texts struct {
	Record, Purge                    string
	NewestByTime, OldestByTime       string
	NewestByActor, OldestByActor     string
	NewestByAction, OldestByAction   string
	NewestBySubject, OldestBySubject string
}
