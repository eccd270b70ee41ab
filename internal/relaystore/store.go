package relaystore

import (
	"context"
	"database/sql"
	"embed"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

//go:embed migrations postgresql sqlite
var files embed.FS

// Migrations holds the migrations of the tables relay_leases, relay_workers and parked.
var Migrations = statements.Migrations(files)

// Store is the database access of relays. All writes may be repeated.
type Store interface {
	Leases
	Retries
	Hasten
	Crashes
	Sequences
	Observations
}

// Sequences are the ids in use outside the outbox.
type Sequences interface {
	// HighestID returns the highest id of the outbox that is in use in parked, or in dead
	// letters whose messages can come back.
	HighestID(ctx context.Context) (int64, error)

	// DeadLettersBehind reports whether dead letters would get ids that are in use. It
	// never is on SQLite, whose sequence looks at the rows.
	DeadLettersBehind(ctx context.Context) (bool, error)

	// RepairDeadLetters sets the sequence of dead letters above every id in use, with
	// writers locked out.
	RepairDeadLetters(ctx context.Context) error
}

// Open returns the store of a database. It does no I/O.
func Open(db *sql.DB, where database.Database) Store {
	if where.Dialect == oncemill.SQLite {
		s := &sqlite{db: db}
		statements.Load(&s.q, files, "sqlite", where.Names)
		return s
	}
	s := &postgres{db: db}
	statements.Load(&s.q, files, "postgresql", where.Names)
	return s
}
