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

func (s *sqlite) Purge(ctx context.Context, retention time.Duration) (deleted int64, err error) {
	const some = 100
	slice := int64(0) // deleted by the last transaction
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		deleted, slice = deleted+slice, 0
		for !over() {
			n, err := database.Affected(tx.ExecContext(ctx, s.text.Purge, retention.Microseconds(), some))
			slice += n
			if err != nil || n < some {
				return false, err
			}
		}
		return true, nil
	})
	if err != nil {
		return deleted, err
	}
	return deleted + slice, nil
}
