package steerstore

import (
	"context"
	"database/sql"
	"encoding/json"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/statements"
	"github.com/oncemill/oncemill/internal/turn"
)

func newSQLite(db *sql.DB, where database.Database) *store {
	s := &store{
		db: db, audit: auditstore.Open(db, where),
		write: func(ctx context.Context, do func(*sql.Tx) error) error {
			return sqlitetx.Write(ctx, db, turn.Caller, do)
		},
		ints: func(list []int) any {
			encoded, _ := json.Marshal(list) // numbers cannot fail
			return string(encoded)
		},
	}
	statements.Load(&s.text, files, "sqlite", where.Names)
	return s
}
