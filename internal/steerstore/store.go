package steerstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/text"
)

// store is what the databases have in common.
type store struct {
	db    *sql.DB
	text  texts
	audit auditstore.Store
	write func(ctx context.Context, do func(*sql.Tx) error) error // runs an act
	ints  func([]int) any                                         // as an argument

	found atomic.Bool // the tables exist
}

// there reports whether the tables exist.
func (s *store) there(ctx context.Context) (exists bool, err error) {
	if s.found.Load() {
		return true, nil
	}
	if err := s.db.QueryRowContext(ctx, s.text.There).Scan(&exists); err != nil {
		return false, err
	}
	return exists, nil
}

// read runs a query, unless its table does not exist.
func (s *store) read(ctx context.Context, scan func(*sql.Rows) error, query string, args ...any) error {
	if exists, err := s.there(ctx); err != nil || !exists {
		return err
	}
	err := each(ctx, s.db, scan, query, args...)
	if sqlerr.NoTable(err) {
		s.found.Store(false)
		return nil
	}
	if err == nil {
		s.found.Store(true)
	}
	return err
}

func each(ctx context.Context, db *sql.DB, scan func(*sql.Rows) error, query string, args ...any) error {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

func scanPause(scan func(...any) error) (p Pause, err error) {
	var since int64
	err = scan(&p.Kind, &p.Name, &p.By, &p.Reason, &since)
	p.Since = time.UnixMicro(since).UTC()
	return p, err
}

func (s *store) Pauses(ctx context.Context) (pauses []Pause, err error) {
	err = s.read(ctx, func(rows *sql.Rows) error {
		p, err := scanPause(rows.Scan)
		pauses = append(pauses, p)
		return err
	}, s.text.Pauses, MostPauses)
	if err != nil {
		return nil, fmt.Errorf("read pauses: %w", err)
	}
	return pauses, nil
}

func (s *store) Paused(ctx context.Context, kind string) (targets []Target, err error) {
	err = s.read(ctx, func(rows *sql.Rows) error {
		var t Target
		err := rows.Scan(&t.Kind, &t.Name)
		targets = append(targets, t)
		return err
	}, s.text.Paused, kind, MostApplied)
	if err != nil {
		return nil, fmt.Errorf("read pauses: %w", err)
	}
	return targets, nil
}

func (s *store) Pause(ctx context.Context, kind, name string, act Act) (already *Pause, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		already = nil
		if _, err := tx.ExecContext(ctx, s.text.LockPauses); err != nil {
			return err
		}
		switch p, err := scanPause(tx.QueryRowContext(ctx, s.text.PauseOf, kind, name).Scan); {
		case err == nil:
			already = &p
			return nil
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		var n int
		if err := tx.QueryRowContext(ctx, s.text.CountPauses, MostPauses).Scan(&n); err != nil {
			return err
		}
		if n >= MostPauses {
			return ErrTooMany
		}
		if _, err := tx.ExecContext(ctx, s.text.Pause, kind, name, text.Clean(act.By), text.Clean(act.Reason)); err != nil {
			return err
		}
		return s.audit.Record(ctx, tx, auditstore.Act{Action: kind + ".pause", By: act.By, Reason: act.Reason, Subjects: []string{kind + " " + name}})
	})
	return already, err
}

func (s *store) Resume(ctx context.Context, kind, name string, act Act) (ended Pause, err error) {
	err = s.write(ctx, func(tx *sql.Tx) (err error) {
		if _, err := tx.ExecContext(ctx, s.text.LockPauses); err != nil {
			return err
		}
		ended, err = scanPause(tx.QueryRowContext(ctx, s.text.PauseOf, kind, name).Scan)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return ErrNotPaused
		case err != nil:
			return err
		}
		if _, err := tx.ExecContext(ctx, s.text.Resume, kind, name); err != nil {
			return err
		}
		return s.audit.Record(ctx, tx, auditstore.Act{
			Action: kind + ".resume", By: act.By, Reason: act.Reason, Subjects: []string{kind + " " + name},
			Details: fmt.Sprintf("paused by %s at %s", text.Shorten(ended.By), ended.Since.Format(time.RFC3339)),
		})
	})
	return ended, err
}

func (s *store) Give(ctx context.Context, action string, lanes []int, topic, key, subject, details string, act Act) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, s.text.Command, action, s.ints(lanes), topic, key); err != nil {
			return err
		}
		return s.audit.Record(ctx, tx, auditstore.Act{Action: "lane." + action, By: act.By, Reason: act.Reason, Subjects: []string{subject}, Details: details})
	})
}

func (s *store) Commands(ctx context.Context) (commands []Command, err error) {
	err = s.read(ctx, func(rows *sql.Rows) error {
		var c Command
		var asked int64
		err := rows.Scan(&c.ID, &c.Action, &c.Lane, &c.Topic, &c.Key, &c.Worker, &asked)
		c.Asked = time.UnixMicro(asked).UTC()
		commands = append(commands, c)
		return err
	}, s.text.Commands, MostCommands)
	if err != nil {
		return nil, fmt.Errorf("read commands: %w", err)
	}
	return commands, nil
}

func (s *store) BeginRelease(ctx context.Context, id int64, worker string) (begun bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		n, err := database.Affected(tx.ExecContext(ctx, s.text.BeginRelease, id, worker))
		begun = n > 0
		return err
	})
	if err != nil {
		return false, fmt.Errorf("begin release: %w", err)
	}
	return begun, nil
}

func (s *store) End(ctx context.Context, id int64) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, s.text.EndCommand, id)
		return err
	})
	if err != nil {
		return fmt.Errorf("end command: %w", err)
	}
	return nil
}
