package auditstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/statements"
)

type sqlite struct{ store }

func newSQLite(db *sql.DB, where database.Database) *sqlite {
	s := &sqlite{store{db: db, list: func(list []string) any {
		encoded, _ := json.Marshal(list) // strings cannot fail
		return string(encoded)
	}}}
	statements.Load(&s.text, files, "sqlite", where.Names)
	return s
}

func (s *sqlite) Purge(ctx context.Context, retention time.Duration) (int64, error) {
	const some = 100
	return sqlitetx.DeleteSlices(ctx, s.db, some, func(tx *sql.Tx) (int64, error) {
		return database.Affected(tx.ExecContext(ctx, s.text.Purge, retention.Microseconds(), some))
	})
}
