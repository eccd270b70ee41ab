package outboxstore

import (
	"context"
	"database/sql"
	"embed"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

//go:embed migrations
var migrationFiles embed.FS

// Migrations holds the migrations of the tables outbox, outbox_history and scheduled.
var Migrations = statements.Migrations(migrationFiles)

// Guard locks the caller's lease in a transaction and reports whether the caller has
// it.
type Guard = func(ctx context.Context, tx *sql.Tx) (bool, error)

// Store is the database access of an outbox.
type Store interface {
	Schedule(ctx context.Context, tx oncemill.ExecTx, rows []ScheduledRow) error
	Cancel(ctx context.Context, tx oncemill.ExecTx, messageID string) (int64, error)
	NextDue(ctx context.Context) (Due, error)
	MoveDue(ctx context.Context, guard Guard, head Due) (Moved, error)
	Read(ctx context.Context, req ReadRequest) ([]Row, error)
	ReadPiece(ctx context.Context, of Ref, offset, most int) ([]byte, error)
	ReadAhead(ctx context.Context, req ReadRequest, ahead Ahead) ([]Row, error)
	Remove(ctx context.Context, rows []Ref) (Removal, error)
	ListHistory(ctx context.Context, f HistoryFilter) ([]HistoryRow, error)
	CountHistory(ctx context.Context, f HistoryFilter) (int, error)
	Resend(ctx context.Context, tx oncemill.ExecTx, f HistoryFilter) (int64, error)
	// Expired returns the oldest history rows past their retention, behind a previous
	// batch; none without the lease. Forget removes them, with the lease.
	Expired(ctx context.Context, guard Guard, behind Expired) (Expired, error)
	Forget(ctx context.Context, guard Guard, batch Expired) (bool, error)
	Held(ctx context.Context) (Held, error)
	Check(ctx context.Context) error
	LastID(ctx context.Context) (int64, error)
	RepairSequence(ctx context.Context, floor int64) (int64, error)
	Maintain(ctx context.Context, guard Guard) (Maintained, error)
}

// Config configures a Store.
type Config struct {
	History  time.Duration // 0: none is kept
	Archive  bool          // rows past History are removed by Forget only
	Truncate Truncation
	Logger   *slog.Logger
}

// Truncation is outbox.Truncation.
type Truncation uint8

// The values of Truncation.
const (
	TruncateAuto Truncation = iota
	TruncateAlways
	TruncateNever
)

// Open returns the store of a database. It does no I/O.
func Open(db *sql.DB, names database.Database, cfg Config) Store {
	if names.Dialect == oncemill.SQLite {
		return newSQLiteStore(db, names, cfg.History, cfg.Archive, cfg.Logger)
	}
	s := newPostgresStore(db, names, cfg.History, cfg.Archive, cfg.Logger)
	s.truncation = cfg.Truncate
	return s
}
