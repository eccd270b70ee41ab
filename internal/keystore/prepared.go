package keystore

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
)

// prepared holds prepared statements, which live as long as the pool.
type prepared struct {
	db    *sql.DB
	texts []string // nil: nothing is prepared

	mu    sync.Mutex
	stmts map[string]*sql.Stmt // by text; nil until ready
}

func newPrepared(db *sql.DB, prepare bool, texts ...string) *prepared {
	if !prepare {
		texts = nil
	}
	return &prepared{db: db, texts: texts}
}

// ready prepares the statements, once. It needs a connection, so do not call it while
// holding one.
func (p *prepared) ready(ctx context.Context) error {
	if len(p.texts) == 0 || p.stmt(p.texts[0]) != nil {
		return nil
	}
	stmts := map[string]*sql.Stmt{}
	defer func() { // those that are not needed
		for _, stmt := range stmts {
			_ = stmt.Close() // it has not been used
		}
	}()
	for _, text := range p.texts {
		stmt, err := p.db.PrepareContext(ctx, text) //nolint:sqlclosecheck // it lives as long as db, or is closed above
		if err != nil {
			return fmt.Errorf("prepare: %w", err)
		}
		stmts[text] = stmt
	}
	p.mu.Lock() // not before: preparing may take long on a silent server
	defer p.mu.Unlock()
	if p.stmts == nil {
		p.stmts, stmts = stmts, nil
	}
	return nil
}

// stmt returns nil for a statement that is not prepared.
func (p *prepared) stmt(text string) *sql.Stmt {
	if len(p.texts) == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stmts[text]
}

// row queries one row on the pool.
func (p *prepared) row(ctx context.Context, text string, args ...any) *sql.Row {
	if stmt := p.stmt(text); stmt != nil { //nolint:sqlclosecheck // it lives as long as db
		return stmt.QueryRowContext(ctx, args...)
	}
	return p.db.QueryRowContext(ctx, text, args...)
}

// rows queries on the pool.
func (p *prepared) rows(ctx context.Context, text string, args ...any) (*sql.Rows, error) {
	if stmt := p.stmt(text); stmt != nil { //nolint:sqlclosecheck // it lives as long as db
		return stmt.QueryContext(ctx, args...)
	}
	return p.db.QueryContext(ctx, text, args...)
}

// rowIn queries one row in a transaction.
func (p *prepared) rowIn(ctx context.Context, tx *sql.Tx, text string, args ...any) *sql.Row {
	if stmt := p.stmt(text); stmt != nil {
		return tx.StmtContext(ctx, stmt).QueryRowContext(ctx, args...) //nolint:sqlclosecheck // the transaction closes it
	}
	return tx.QueryRowContext(ctx, text, args...)
}

// rowsIn queries in a transaction.
func (p *prepared) rowsIn(ctx context.Context, tx *sql.Tx, text string, args ...any) (*sql.Rows, error) {
	if stmt := p.stmt(text); stmt != nil {
		return tx.StmtContext(ctx, stmt).QueryContext(ctx, args...) //nolint:sqlclosecheck // the transaction closes it
	}
	return tx.QueryContext(ctx, text, args...)
}
