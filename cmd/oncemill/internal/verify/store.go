package verify

import (
	"context"
	"database/sql"
	"embed"
	"errors"

	"github.com/oncemill/oncemill/cmd/oncemill/internal/verify/check"
	"github.com/oncemill/oncemill/internal/names"
	"github.com/oncemill/oncemill/internal/statements"
)

//go:embed sql
var files embed.FS

// texts are the statements of a run, on its own tables and to look at oncemill's.
type texts struct {
	SchemaExists, CreateSchema, DropSchema, CreateTables string
	LockAccount, AddSent, AddEffect, AddAnswer           string
	Counts, Sent, Effects, Answers, Letters              string
	Settings, TLS, Backend, EndBackends                  string
}

const accounts = 20 // rows of verify_accounts

func newTexts(schema string) *texts {
	t := new(texts)
	statements.Load(t, files, "sql", names.Names{Schema: schema})
	return t
}

// counts is how far the work in the database has come.
type counts struct{ Unsent, Sent, Effects, Letters int }

func (t *texts) count(ctx context.Context, db *sql.DB) (c counts, err error) {
	err = db.QueryRowContext(ctx, t.Counts).Scan(&c.Unsent, &c.Sent, &c.Effects, &c.Letters)
	return c, err
}

// read reads what the run has left in the database.
func (t *texts) read(ctx context.Context, db *sql.DB, h *check.History) error {
	return errors.Join(
		rows(ctx, db, t.Sent, func(s *check.Sent) []any {
			return []any{&s.Entry, &s.MessageID, &s.Topic, &s.Key, &s.Attempt, &s.Sum}
		}, &h.Sent),
		rows(ctx, db, t.Effects, func(e *check.Effect) []any {
			return []any{&e.Entry, &e.Consumer, &e.MessageID, &e.Attempt, &e.Sum}
		}, &h.Effects),
		rows(ctx, db, t.Answers, func(e *check.Execution) []any { return []any{&e.Request, &e.Attempt} }, &h.Executions),
		rows(ctx, db, t.Letters, func(l *check.Letter) []any {
			return []any{&l.Source, &l.Consumer, &l.MessageID, &l.Reason}
		}, &h.Letters),
	)
}

// rows appends the rows of a statement to all.
func rows[T any](ctx context.Context, db *sql.DB, text string, fields func(*T) []any, all *[]T) (err error) {
	found, err := db.QueryContext(ctx, text)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, found.Close()) }()
	for found.Next() {
		var row T
		if err := found.Scan(fields(&row)...); err != nil {
			return err
		}
		*all = append(*all, row)
	}
	return found.Err()
}
