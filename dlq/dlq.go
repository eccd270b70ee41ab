package dlq

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

//go:embed migrations
var migrationFiles embed.FS

// Migrations makes the table dead_letters.
var Migrations = oncemill.Migrations{Name: "dlq", FS: migrationsFS()}

func migrationsFS() fs.FS {
	files, err := fs.Sub(migrationFiles, "migrations")
	if err != nil {
		panic(err) // only for a malformed constant path
	}
	return files
}

// Config configures a Store. The zero value is right for most services.
type Config struct {
	// Database says where the table is.
	Database oncemill.Config

	// Retention is how long letters are kept once they are replayed or
	// discarded. Letters in other states are kept until somebody acts on them.
	// It is for Forget. A relay forgets letters by relay.Config.LetterRetention;
	// where there is no relay, call Forget. Default: 30 days. At least 1 h. A
	// longer one costs the space of their messages.
	Retention time.Duration
}

// Store is the operators' side of the dead letters. It holds no connection and
// no goroutine; it may be used by many goroutines.
type Store struct {
	db        *sql.DB
	dialect   oncemill.Dialect
	retention time.Duration
	texts     texts
}

// New returns a store on db. It does no I/O; the table is made by
// oncemill.Migrate with [Migrations]. All bad values of cfg are reported at
// once, each as an [*oncemill.ConfigError]. The caller keeps owning db.
func New(db *sql.DB, cfg Config) (*Store, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "dlq.New db", Value: "nil", Problem: "a database is needed"}
	}
	var errs []error
	database, err := cfg.Database.Resolve(db)
	if err != nil {
		errs = append(errs, err)
	}
	switch {
	case cfg.Retention == 0:
		cfg.Retention = 30 * 24 * time.Hour
	case cfg.Retention < time.Hour:
		errs = append(errs, &oncemill.ConfigError{Field: "dlq.Config.Retention", Value: cfg.Retention.String(), Problem: "must be at least 1h, or 0 for 30 days"})
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Store{db: db, dialect: database.Dialect, retention: cfg.Retention, texts: newTexts(database)}, nil
}

// Get returns a letter with its message, or [ErrNotFound].
func (s *Store) Get(ctx context.Context, id int64) (*Letter, error) {
	l, err := scanLetter(s.db.QueryRowContext(ctx, s.texts.get, id), true)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("dlq: letter %d: %w", id, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("dlq: read letter: %w", err)
	}
	return l, nil
}

// Act says who wants something done, and why. It is kept with the letter.
type Act struct {
	By     string // who; required
	Reason string // why; required to discard
}

// Replay asks for the delivery of the messages of letters that are dead or held.
// It returns the ids of those that it has given the command: of all calls on one
// letter, at once or one after the other, exactly one gets its id.
//
// The others are reported in the error, joined: a [*StateError] for a letter that
// somebody has acted on already, and [ErrNotFound]. [ErrNoActor] comes alone, and
// nothing was done. After an error of the database the outcome is open; calling
// again is safe.
//
// A relay's message comes back in its place among those of its key that are
// parked; those that were delivered meanwhile stay before it.
func (s *Store) Replay(ctx context.Context, ids []int64, act Act) (accepted []int64, err error) {
	if strings.TrimSpace(act.By) == "" {
		return nil, ErrNoActor
	}
	return s.act(ctx, s.texts.replay, "replayed", ids, act)
}

// Discard ends a letter that is dead or held, or a consumer's that is being replayed:
// its message will not be delivered, and a held one stops holding its successors. It is discarded at once, or, if it
// is held, when the worker that holds its lane has removed the message. The
// errors are those of Replay, and [ErrNoReason].
func (s *Store) Discard(ctx context.Context, id int64, act Act) error {
	switch {
	case strings.TrimSpace(act.By) == "":
		return ErrNoActor
	case strings.TrimSpace(act.Reason) == "":
		return ErrNoReason
	}
	_, err := s.act(ctx, s.texts.discard, "discarded", []int64{id}, act)
	return err
}

// actBatch is the number of letters in one statement.
const actBatch = 500

func (s *Store) act(ctx context.Context, text, deed string, ids []int64, act Act) (accepted []int64, err error) {
	ids = slices.Compact(slices.Sorted(slices.Values(ids))) // one order of locks for all
	var errs []error
	for batch := range slices.Chunk(ids, actBatch) {
		did, err := s.command(ctx, text, batch, act)
		if err != nil {
			return accepted, fmt.Errorf("dlq: write command: %w", err)
		}
		accepted = append(accepted, did...)
		if len(did) < len(batch) {
			refused, err := s.refusals(ctx, deed, batch, did)
			if err != nil {
				return accepted, err
			}
			errs = append(errs, refused...)
		}
	}
	slices.Sort(accepted)
	return accepted, errors.Join(errs...)
}

// command gives a batch its command. Under a higher isolation level than READ
// COMMITTED the second of two at once fails, and has to look again.
func (s *Store) command(ctx context.Context, text string, ids []int64, act Act) (did []int64, err error) {
	for range 10 {
		err = s.write(ctx, turn.Caller, func(via session) error {
			did, err = scanIDs(via.QueryContext(ctx, text, s.texts.int64s(ids), clean(act.By), clean(act.Reason)))
			return err
		})
		if !sqlerr.Retryable(err) {
			break
		}
	}
	return did, err
}

// session is the pool, or a transaction.
type session interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// write lets do execute one statement that writes: on SQLite when it is its turn.
func (s *Store) write(ctx context.Context, kind turn.Kind, do func(session) error) error {
	if s.dialect == oncemill.SQLite {
		return sqlitetx.Write(ctx, s.db, kind, func(tx *sql.Tx) error { return do(tx) })
	}
	return do(s.db)
}

// refusals says why letters were left alone.
func (s *Store) refusals(ctx context.Context, deed string, ids, did []int64) ([]error, error) {
	states, err := scanStates(s.db.QueryContext(ctx, s.texts.states, s.texts.int64s(ids)))
	if err != nil {
		return nil, fmt.Errorf("dlq: read states: %w", err)
	}
	var errs []error
	for _, id := range ids {
		if slices.Contains(did, id) {
			continue
		}
		if state, ok := states[id]; ok {
			errs = append(errs, &StateError{ID: id, State: state, Deed: deed})
		} else {
			errs = append(errs, fmt.Errorf("dlq: letter %d: %w", id, ErrNotFound))
		}
	}
	return errs, nil
}

// forgetBatch bounds a statement, so that it holds its locks for a moment only.
const forgetBatch = 500

// Forget deletes letters that were replayed or discarded longer ago than
// Config.Retention, in small batches, and returns how many. It is to be called
// from time to time; calling it from several places at once is safe.
func (s *Store) Forget(ctx context.Context) (forgotten int64, err error) {
	if s.dialect == oncemill.SQLite {
		return s.forgetInTurn(ctx)
	}
	for {
		n, err := s.forget(ctx)
		if err != nil {
			return forgotten, fmt.Errorf("dlq: forget: %w", err)
		}
		forgotten += n
		if n < forgetBatch {
			return forgotten, nil
		}
	}
}

// forget deletes a batch. What somebody has locked is waited for a little.
func (s *Store) forget(ctx context.Context) (forgotten int64, err error) {
	err = shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) error {
		forgotten, err = affected(tx.ExecContext(ctx, s.texts.forget, s.retention.Microseconds(), forgetBatch))
		return err
	})
	return forgotten, err
}

// forgetInTurn deletes some at a time, on SQLite: a letter may be of any size, so only the
// time tells how many are few.
func (s *Store) forgetInTurn(ctx context.Context) (forgotten int64, err error) {
	const some = 10
	slice := int64(0) // what the last transaction has deleted
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		forgotten, slice = forgotten+slice, 0
		for {
			n, err := affected(tx.ExecContext(ctx, s.texts.forget, s.retention.Microseconds(), some))
			slice += n
			if err != nil || n < some || over() {
				return n == some, err
			}
		}
	})
	if err != nil {
		return forgotten, fmt.Errorf("dlq: forget: %w", err)
	}
	return forgotten + slice, nil
}

func affected(result sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// clean makes text fit for every database.
func clean(s string) string {
	const limit = 4 << 10
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "�"), "\x00", "�")
}
