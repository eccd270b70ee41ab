package auditstore

import (
	"context"
	"database/sql"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/statements"
)

type postgres struct{ store }

func newPostgres(db *sql.DB, where database.Database) *postgres {
	s := &postgres{store{db: db, list: func(list []string) any { return pq.Array(list) }}}
	statements.Load(&s.text, files, "postgresql", where.Names)
	return s
}

// purgeBatch bounds a statement, so that it holds its locks only briefly.
const purgeBatch = 1000

func (s *postgres) Purge(ctx context.Context, retention time.Duration) (deleted int64, err error) {
	for {
		var n int64
		err := shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) (err error) {
			n, err = database.Affected(tx.ExecContext(ctx, s.text.Purge, retention.Microseconds(), purgeBatch))
			return err
		})
		if err != nil {
			return deleted, err
		}
		if deleted += n; n < purgeBatch {
			return deleted, nil
		}
	}
}
