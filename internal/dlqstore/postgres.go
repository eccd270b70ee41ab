package dlqstore

import (
	"context"
	"database/sql"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/statements"
)

type postgres struct{ store }

func newPostgres(db *sql.DB, where database.Database) *postgres {
	s := &postgres{store{
		db:      db,
		audit:   auditstore.Open(db, where),
		write:   func(ctx context.Context, do func(*sql.Tx) error) error { return shorttx.Run(ctx, db, limits(ctx), do) },
		ids:     array[int64],
		strings: array[string],
	}}
	statements.Load(&s.text, files, "postgresql", where.Names)
	return s
}

// limits are those of an act, for which a person waits.
func limits(ctx context.Context) shorttx.Limits {
	if _, bounded := ctx.Deadline(); bounded {
		return shorttx.Within(ctx)
	}
	return shorttx.For(30 * time.Second)
}

func array[T any](list []T) any {
	if list == nil {
		list = []T{} // nil would be NULL
	}
	return pq.Array(list)
}

// purgeBatch bounds a statement, so that it holds its locks only briefly.
const purgeBatch = 500

func (s *postgres) Purge(ctx context.Context, retention time.Duration) (deleted int64, err error) {
	for {
		n, err := s.purge(ctx, retention)
		deleted += n
		if err != nil {
			return deleted, err
		}
		if n < purgeBatch {
			return deleted, s.purgeJobs(ctx, retention)
		}
	}
}

// purgeJobs deletes the jobs that ended longer ago than retention, in short transactions.
func (s *postgres) purgeJobs(ctx context.Context, retention time.Duration) error {
	for {
		var letters, jobs int64
		err := shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) (err error) {
			letters, jobs, err = s.purgeSomeOfAJob(ctx, tx, retention, purgeBatch)
			return err
		})
		if err != nil || letters+jobs == 0 {
			return err
		}
	}
}

// purge deletes a batch. It waits briefly for locks.
func (s *postgres) purge(ctx context.Context, retention time.Duration) (deleted int64, err error) {
	err = shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) error {
		deleted, err = database.Affected(tx.ExecContext(ctx, s.text.Purge, retention.Microseconds(), purgeBatch))
		return err
	})
	if err != nil {
		return 0, err
	}
	return deleted, nil
}
