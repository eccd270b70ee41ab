package dlqstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/statements"
	"github.com/oncemill/oncemill/internal/turn"
)

type sqlite struct{ store }

func newSQLite(db *sql.DB, where database.Database) *sqlite {
	s := &sqlite{store{
		db:    db,
		audit: auditstore.Open(db, where),
		write: func(ctx context.Context, do func(*sql.Tx) error) error {
			return sqlitetx.Write(ctx, db, turn.Caller, do)
		},
		ids:     jsonArray[int64],
		strings: jsonArray[string],
	}}
	statements.Load(&s.text, files, "sqlite", where.Names)
	return s
}

func jsonArray[T int64 | string](list []T) any {
	if list == nil {
		list = []T{}
	}
	text, _ := json.Marshal(list) // integers and strings cannot fail
	return string(text)
}

// Purge deletes a few at a time. A dead letter may be of any size, so the elapsed time
// decides when a transaction ends.
func (s *sqlite) Purge(ctx context.Context, retention time.Duration) (int64, error) {
	const some = 10
	deleted, err := sqlitetx.DeleteSlices(ctx, s.db, some, func(tx *sql.Tx) (int64, error) {
		return database.Affected(tx.ExecContext(ctx, s.text.Purge, retention.Microseconds(), some))
	})
	if err != nil {
		return deleted, err
	}
	_, err = sqlitetx.DeleteSlices(ctx, s.db, 1, func(tx *sql.Tx) (int64, error) {
		letters, jobs, err := s.purgeSomeOfAJob(ctx, tx, retention, 100)
		return letters + jobs, err
	})
	return deleted, err
}
