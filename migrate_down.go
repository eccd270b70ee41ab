package oncemill

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
)

// DownOptions configures [MigrateDown].
type DownOptions struct {
	// LoseRows permits a step that drops tables that have rows: messages, dead letters,
	// ids of the inbox. Default: such a step is refused.
	LoseRows bool
}

// MigrateDown undoes the last step of one set, in one transaction, and returns the
// status after it. Call it to go back to an older library, after all processes with the
// newer library have stopped and before the older one starts.
//
// A step that drops tables with rows is refused with a [*DataLossError] and changes
// nothing, unless [DownOptions] permits it. Columns that the step drops are lost with
// their contents. [ErrNothingToUndo] means that the set is not applied. A
// [*SchemaError] means that only a newer library can undo the step.
func MigrateDown(ctx context.Context, db *sql.DB, cfg Config, set Migrations, options DownOptions) (Status, error) {
	to, loaded, err := loadSets(db, cfg, []Migrations{set})
	if err != nil {
		return Status{}, err
	}
	m, done, err := newMigrator(ctx, db, to)
	if err != nil {
		return Status{}, fmt.Errorf("migrate down: %w", err)
	}
	defer done()
	s := loaded[0]
	var after Status
	err = m.inTx(ctx, func() error {
		if err := m.down(ctx, s, options); err != nil {
			return err
		}
		after, err = m.status(ctx, s)
		return err
	})
	if err != nil {
		return Status{}, fmt.Errorf("migrate %s down: %w", s.name, err)
	}
	return after, nil
}

func (m migrator) down(ctx context.Context, s set, options DownOptions) error {
	have, err := m.status(ctx, s)
	switch {
	case err != nil:
		return err
	case have.Version > have.Latest:
		return &SchemaError{Set: s.name, Have: have.Version, Want: have.Latest, Problem: "the database is newer; only a library that knows its version has the way back"}
	case have.Version == 0:
		return ErrNothingToUndo
	}
	step := s.steps[have.Version-1]
	if step.down == "" {
		return fmt.Errorf("step %d %s: there is no down file", have.Version, step.name)
	}
	if !options.LoseRows {
		lost, err := m.losses(ctx, step)
		if err != nil {
			return fmt.Errorf("step %d %s: look for what would be lost: %w", have.Version, step.name, err)
		}
		if len(lost) > 0 {
			return &DataLossError{Set: s.name, Version: have.Version, Tables: lost}
		}
	}
	if err := m.exec(ctx, step.down); err != nil {
		return fmt.Errorf("step %d %s: %w", have.Version, step.name, err)
	}
	return m.exec(ctx, deleteVersion, s.name, have.Version)
}

// losses returns the tables with rows that a step drops. It tries the step and rolls it
// back. Then it locks those tables, so that nothing is written between the check and
// the step.
func (m migrator) losses(ctx context.Context, step step) (lost []string, err error) {
	before, err := m.tables(ctx)
	if err != nil {
		return nil, err
	}
	for _, text := range []string{`savepoint oncemill_down`, step.down} {
		if err := m.exec(ctx, text); err != nil {
			return nil, err
		}
	}
	after, err := m.tables(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.exec(ctx, `rollback to savepoint oncemill_down`); err != nil {
		return nil, err
	}
	lock := dialectSQL[m.dialect].lock
	for _, table := range before {
		if slices.Contains(after, table) {
			continue
		}
		if lock != "" {
			if err := m.exec(ctx, lock+table); err != nil {
				return nil, err
			}
		}
		var rows bool
		if err := m.conn.QueryRowContext(ctx, `select exists (select 1 from `+table+`)`).Scan(&rows); err != nil {
			return nil, err
		}
		if rows {
			lost = append(lost, table)
		}
	}
	return lost, nil
}

// tables returns the quoted names of the tables, except the migrations table.
func (m migrator) tables(ctx context.Context) (names []string, err error) {
	rows, err := m.conn.QueryContext(ctx, m.Expand(dialectSQL[m.dialect].tables))
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, rows.Err()
}
