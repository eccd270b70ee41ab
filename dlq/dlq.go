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
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

//go:embed migrations
var migrationFiles embed.FS

// Migrations creates the table dead_letters.
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
	// Database describes the database and the location of the table.
	Database oncemill.Config

	// Retention is how long dead letters are kept once they are replayed or discarded.
	// Dead letters in other states are kept until somebody acts on them. Forget uses
	// it. A relay purges dead letters by relay.Config.LetterRetention; call Forget
	// where there is no relay. Default: 30 days. At least 1 h. A longer retention costs
	// the space of the messages.
	Retention time.Duration
}

// Store is the operators' side of the dead letters. It holds no connection and no
// goroutine. It is safe for concurrent use.
type Store struct {
	db        *sql.DB
	dialect   oncemill.Dialect
	retention time.Duration
	texts     texts
}

// New returns a store on db. It does no I/O; oncemill.Migrate creates the table with
// [Migrations]. All bad values of cfg are reported at once, each as an
// [*oncemill.ConfigError]. The caller keeps owning db.
func New(db *sql.DB, cfg Config) (*Store, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "dlq.New db", Value: "nil", Problem: "a database is needed"}
	}
	var errs []error
	resolved, err := database.Resolve(db, cfg.Database)
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
	return &Store{db: db, dialect: resolved.Dialect, retention: cfg.Retention, texts: newTexts(resolved)}, nil
}

// Get returns a dead letter with its message, or [ErrNotFound].
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

// Act records who acts on a dead letter, and why. It is stored with the dead letter.
type Act struct {
	By     string // who; required
	Reason string // why; required to discard
}

// Replay requests delivery of the messages of dead letters that are dead or held. It
// returns the ids it accepted. Of all calls for one dead letter, concurrent or not,
// exactly one gets its id.
//
// The other ids are reported in the error, joined: a [*StateError] for a dead letter
// that somebody has already acted on, and [ErrNotFound]. [ErrNoActor] is returned
// alone, and nothing was done. After a database error the outcome is unknown; calling
// again is safe.
//
// A relay's message returns to its position among the parked messages of its key.
// Messages of the key that were delivered meanwhile stay before it.
func (s *Store) Replay(ctx context.Context, ids []int64, act Act) (accepted []int64, err error) {
	if strings.TrimSpace(act.By) == "" {
		return nil, ErrNoActor
	}
	return s.act(ctx, s.texts.replay, "replayed", ids, act)
}

// Discard closes a dead letter that is dead or held, or a consumer's that is replaying.
// Its message will not be delivered, and a held message stops holding its successors.
// The dead letter is discarded at once, or, if it is held, when the worker that holds
// its lane has removed the message. The errors are those of Replay, and [ErrNoReason].
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

// actBatch is the number of dead letters in one statement.
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

// command writes the command for a batch. Under an isolation level above READ
// COMMITTED, the second of two concurrent calls fails and has to retry.
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

// write runs do, which executes one writing statement. On SQLite it waits for its turn
// first.
func (s *Store) write(ctx context.Context, kind turn.Kind, do func(session) error) error {
	if s.dialect == oncemill.SQLite {
		return sqlitetx.Write(ctx, s.db, kind, func(tx *sql.Tx) error { return do(tx) })
	}
	return do(s.db)
}

// refusals returns why dead letters were left alone.
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

// forgetBatch bounds a statement, so that it holds its locks only briefly.
const forgetBatch = 500

// Forget deletes dead letters that were replayed or discarded longer ago than
// Config.Retention, in small batches, and returns how many. Call it from time to time;
// concurrent calls are safe.
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

// forget deletes a batch. It waits briefly for locked rows.
func (s *Store) forget(ctx context.Context) (forgotten int64, err error) {
	err = shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) error {
		forgotten, err = affected(tx.ExecContext(ctx, s.texts.forget, s.retention.Microseconds(), forgetBatch))
		return err
	})
	return forgotten, err
}

// forgetInTurn deletes a few at a time, on SQLite. A dead letter may be of any size, so
// the elapsed time decides when to stop.
func (s *Store) forgetInTurn(ctx context.Context) (forgotten int64, err error) {
	const some = 10
	slice := int64(0) // deleted by the last transaction
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		forgotten, slice = forgotten+slice, 0
		for !over() {
			n, err := affected(tx.ExecContext(ctx, s.texts.forget, s.retention.Microseconds(), some))
			slice += n
			if err != nil || n < some {
				return false, err
			}
		}
		return true, nil
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

// clean makes text acceptable to every database.
func clean(s string) string {
	const limit = 4 << 10
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "�"), "\x00", "�")
}
