package doctorstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

// sqlite has no server: its settings are those of each connection, which the library checks when
// it opens a database.
type sqlite struct {
	tables
	where database.Database
	q     sqliteText
}

type sqliteText struct {
	OverdueKey, OldestID, OldestHistory, OldestClosed string
	Indexes, Now                                      string
}

func newSQLite(db *sql.DB, where database.Database) *sqlite {
	s := &sqlite{where: where}
	statements.Load(&s.q, files, "sqlite", where.Names)
	s.db = db
	s.text.OverdueKey, s.text.OldestID, s.text.OldestHistory, s.text.OldestClosed = s.q.OverdueKey, s.q.OldestID, s.q.OldestHistory, s.q.OldestClosed
	return s
}

func (s *sqlite) Server(ctx context.Context) (Server, error) {
	var now int64
	err := s.db.QueryRowContext(ctx, s.q.Now).Scan(&now)
	return Server{
		Now: time.UnixMicro(now), SynchronousCommit: "on",
		Autovacuum: true, TrackCounts: true, Fsync: true, FullPageWrites: true,
	}, err
}

func (s *sqlite) ForgetfulRoles(context.Context) ([]Setting, error)            { return nil, nil }
func (s *sqlite) Snapshots(context.Context, time.Duration) ([]Snapshot, error) { return nil, nil }
func (s *sqlite) IdleSlots(context.Context) ([]string, error)                  { return nil, nil }
func (s *sqlite) CachedSequences(context.Context) ([]Sequence, error)          { return nil, nil }
func (s *sqlite) WithoutAutovacuum(context.Context) ([]string, error)          { return nil, nil }
func (s *sqlite) Subscribed(context.Context) ([]string, error)                 { return nil, nil }
func (s *sqlite) Hidden(context.Context) ([]string, error)                     { return nil, nil }
func (s *sqlite) Pooled(context.Context) (bool, error)                         { return false, nil }

func (s *sqlite) MissingIndexes(ctx context.Context, sets []oncemill.Migrations) ([]Index, error) {
	all, err := indexesOf(s.where, sets)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(namesOf(all))
	if err != nil {
		return nil, err
	}
	there, err := list(ctx, s.db, name, s.q.Indexes, string(text))
	return without(all, there), err
}
