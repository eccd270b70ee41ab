package steerstore

import (
	"context"
	"database/sql"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/statements"
)

func newPostgres(db *sql.DB, where database.Database) *store {
	s := &store{
		db: db, audit: auditstore.Open(db, where),
		write: func(ctx context.Context, do func(*sql.Tx) error) error {
			return shorttx.Run(ctx, db, shorttx.Within(ctx), do)
		},
		ints: func(list []int) any { return pq.Array(list) },
	}
	statements.Load(&s.text, files, "postgresql", where.Names)
	return s
}
