package oncemill

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/turn"
)

// migrator migrates on one connection.
type migrator struct {
	conn *sql.Conn
	resolved
	turn *turn.Turn // the turn to write, on SQLite
}

// newMigrator returns a migrator. The caller must call done.
func newMigrator(ctx context.Context, db *sql.DB, to resolved) (m migrator, done func(), err error) {
	m.resolved = to
	if to.dialect == SQLite {
		if err := CheckSQLite(ctx, db); err != nil {
			return m, nil, err
		}
		if m.turn, err = takeTurn(ctx, db); err != nil {
			return m, nil, err
		}
	}
	giveTurn := func() {
		if m.turn != nil {
			m.turn.Give()
		}
	}
	if m.conn, err = connect(ctx, db); err != nil {
		giveTurn()
		return m, nil, fmt.Errorf("connect: %w", err)
	}
	return m, func() {
		_ = m.conn.Close() // only returns it to the pool
		giveTurn()
	}, nil
}

// takeTurn waits for the turn to write on SQLite.
func takeTurn(ctx context.Context, db *sql.DB) (*turn.Turn, error) {
	wait := lockWait(ctx)
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	taken, err := turn.Of(db).Take(limited, turn.Caller)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		return nil, &MigrationLockError{Waited: wait, Err: err}
	}
	return taken, err
}

// begin begins the transaction, after other migrators.
func (m migrator) begin(ctx context.Context, wait time.Duration) error {
	begin := func(ctx context.Context) error {
		for _, text := range dialectSQL[m.dialect].begin {
			if err := m.exec(ctx, strings.ReplaceAll(text, "WAIT", strconv.FormatInt(wait.Milliseconds(), 10))); err != nil {
				return fmt.Errorf("begin: %w", err)
			}
		}
		return nil
	}
	if m.turn == nil {
		return begin(ctx)
	}
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	err := m.turn.Begin(limited, m.conn, begin)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		return &MigrationLockError{Waited: wait, Err: err}
	}
	return err
}

// inTx runs fn in a transaction that excludes other migrators.
func (m migrator) inTx(ctx context.Context, fn func() error) (err error) {
	wait, begun := lockWait(ctx), false
	defer func() {
		if err != nil {
			// The transaction may already be over, or the connection lost; the first
			// error is the one to report. ctx may have ended.
			_, _ = m.conn.ExecContext(context.WithoutCancel(ctx), `rollback`)
			if sqlerr.State(err) == "55P03" {
				err = m.lockError(ctx, err, wait, !begun)
			}
		}
	}()
	if err := m.begin(ctx, wait); err != nil {
		return err
	}
	begun = true
	for _, text := range dialectSQL[m.dialect].prepare {
		if err := m.exec(ctx, text); err != nil {
			return fmt.Errorf("create table of versions: %w", err)
		}
	}
	if err := m.upgradeVersions(ctx); err != nil {
		return fmt.Errorf("upgrade table of versions: %w", err)
	}
	if err := fn(); err != nil {
		return err
	}
	if err := m.exec(ctx, `commit`); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// upgradeVersions adds the column that the table of an older library lacks. It checks
// first, because the statement itself waits for all readers of the table.
func (m migrator) upgradeVersions(ctx context.Context) error {
	var columns int
	err := m.conn.QueryRowContext(ctx, m.Expand(dialectSQL[m.dialect].columns)).Scan(&columns)
	if err != nil || columns >= migrationsColumns {
		return err
	}
	return m.exec(ctx, addCompatible)
}

func (m migrator) exec(ctx context.Context, text string, args ...any) error {
	_, err := m.conn.ExecContext(ctx, m.Expand(text), args...)
	return err
}

func (m migrator) status(ctx context.Context, s set) (Status, error) {
	have := Status{Set: s.name, Latest: len(s.steps)}
	err := m.conn.QueryRowContext(ctx, m.Expand(selectVersion), s.name, have.Latest).Scan(&have.Version, &have.Oldest)
	if err != nil {
		return have, fmt.Errorf("read version: %w", err)
	}
	return have, nil
}

func (m migrator) up(ctx context.Context, s set) error {
	have, err := m.status(ctx, s)
	if err != nil {
		return err
	}
	if have.tooNew() {
		return have.schemaError()
	}
	for i := have.Version; i < len(s.steps); i++ {
		step := s.steps[i]
		if err := m.exec(ctx, step.up); err != nil {
			return fmt.Errorf("step %d %s: %w", i+1, step.name, err)
		}
		if err := m.exec(ctx, insertVersion, s.name, i+1, step.name, step.compatible); err != nil {
			return fmt.Errorf("record step %d: %w", i+1, err)
		}
	}
	return nil
}

// connect retries while the database is busy. The connection that switches a new SQLite
// file to a write-ahead log needs exclusive access, and SQLite's busy timeout does not
// apply to connections that open at that moment.
func connect(ctx context.Context, db *sql.DB) (*sql.Conn, error) {
	for end := time.Now().Add(busyTimeout); ; {
		conn, err := db.Conn(ctx)
		if err == nil || !sqlerr.Retryable(err) || time.Now().After(end) {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(10 * time.Millisecond):
		}
	}
}
