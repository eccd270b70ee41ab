package dlq

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Migrations creates the tables dead_letters, dead_letter_notes, dead_letter_jobs and
// dead_letter_job_letters. Acts also need those of
// audit.Migrations.
var Migrations = oncemill.Migrations{Name: "dlq", FS: dlqstore.Migrations}

// Config configures a Store. The zero value is right for most services.
type Config struct {
	// Database describes the database and the location of the table.
	Database oncemill.Config

	// Retention is how long dead letters are kept once they are replayed or discarded.
	// Dead letters in other states are kept until somebody acts on them. Purge uses
	// it. A relay purges dead letters by relay.Config.LetterRetention; call Purge
	// where there is no relay. Default: 30 days. At least 1 h. A longer retention costs
	// the space of the messages.
	Retention time.Duration
}

// Store reads the dead letters of a database, and acts on them: it replays, edits, discards,
// restores, annotates, exports, imports and purges them. An
// inbox that is given one (inbox.Config.DeadLetters) writes the dead letters of its
// consumer, and performs their replays. It holds no connection and no goroutine. It is
// safe for concurrent use.
type Store struct {
	db    *sql.DB
	cfg   Config // defaults filled in
	store dlqstore.Store
}

// New returns a store on db. It does no I/O; oncemill.Migrate creates the tables with
// audit.Migrations and [Migrations]. Reading needs only the latter; each act writes to the
// audit in its own transaction, and without that table is refused with [ErrNoAudit]. All bad
// values of cfg are reported at once, each as an [*oncemill.ConfigError]. The caller keeps ownership of db.
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
	cfg.Database = resolved.Config()
	return &Store{db: db, cfg: cfg, store: dlqstore.Open(db, resolved)}, nil
}

// Config returns the configuration with its defaults filled in.
func (s *Store) Config() Config { return s.cfg }

// DB returns the database passed to New.
func (s *Store) DB() *sql.DB { return s.db }

// Get returns a dead letter with its message, or [ErrNotFound].
func (s *Store) Get(ctx context.Context, id int64) (*Letter, error) {
	l, err := s.store.Get(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("dlq: read dead letter %d: %w", id, err)
	}
	return letterOf(l), nil
}

// Act is who acts on a dead letter, and why. It is stored with the dead letter and in the
// audit, each text up to 4 KiB.
type Act struct {
	By     string // who; required
	Reason string // why; required except to replay
}

// check returns nil if an act has what it needs.
func (a Act) check(needsReason bool) error {
	switch {
	case strings.TrimSpace(a.By) == "":
		return ErrNoActor
	case needsReason && strings.TrimSpace(a.Reason) == "":
		return ErrNoReason
	}
	return nil
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
// A relay's message returns to its position among the retrying messages of its key.
// Messages of the key that were delivered meanwhile stay before it.
func (s *Store) Replay(ctx context.Context, ids []int64, act Act) (accepted []int64, err error) {
	if err := act.check(false); err != nil {
		return nil, err
	}
	return s.act(ctx, s.store.Replay, "replayed", ids, act)
}

// Discard closes a dead letter that is dead or held, or a consumer's that is replaying.
// Its message will not be delivered, and a held message stops holding its successors.
// The dead letter is discarded at once, or, if it is held, when the worker that holds
// its lane has removed the message. The errors are those of Replay, and [ErrNoReason].
func (s *Store) Discard(ctx context.Context, id int64, act Act) error {
	return s.actOn(ctx, s.store.Discard, "discarded", id, act)
}

// Restore undoes a discard, as long as the dead letter is not purged: it is dead again, or
// held again. A held one can be restored only until its relay has removed its message and
// released its successors, which takes a relay one or two seconds; after that the error is
// a [*StateError]. A dead letter that was discarded while it was replaying is dead again.
// The errors are those of Discard.
func (s *Store) Restore(ctx context.Context, id int64, act Act) error {
	return s.actOn(ctx, s.store.Restore, restored, id, act)
}

// actOn runs a command that requires a reason on one dead letter.
func (s *Store) actOn(ctx context.Context, do command, action string, id int64, act Act) error {
	if err := act.check(true); err != nil {
		return err
	}
	_, err := s.act(ctx, do, action, []int64{id}, act)
	return err
}

// command is a change of the state of dead letters.
type command func(ctx context.Context, ids []int64, by, reason string) (accepted []int64, err error)

// actBatch is the number of dead letters in one statement.
const actBatch = 500

func (s *Store) act(ctx context.Context, do command, action string, ids []int64, act Act) (accepted []int64, err error) {
	ids = slices.Compact(slices.Sorted(slices.Values(ids))) // one order of locks for all
	var errs []error
	for batch := range slices.Chunk(ids, actBatch) {
		did, err := repeat(ctx, do, batch, act)
		if err != nil {
			return accepted, fmt.Errorf("dlq: write command: %w", err)
		}
		accepted = append(accepted, did...)
		if len(did) < len(batch) {
			refused, err := s.refusals(ctx, action, batch, did)
			if err != nil {
				return accepted, err
			}
			errs = append(errs, refused...)
		}
	}
	slices.Sort(accepted)
	return accepted, errors.Join(errs...)
}

// repeat runs a command again if it can succeed then. Under an isolation level above READ
// COMMITTED, the second of two concurrent commands fails.
func repeat(ctx context.Context, do command, ids []int64, act Act) (accepted []int64, err error) {
	for range 10 {
		accepted, err = do(ctx, ids, act.By, act.Reason)
		if !sqlerr.Retryable(err) {
			break
		}
	}
	return accepted, err
}

// refusals returns why dead letters were left alone.
func (s *Store) refusals(ctx context.Context, action string, ids, did []int64) ([]error, error) {
	states, err := s.store.States(ctx, ids)
	if err != nil {
		return nil, fmt.Errorf("dlq: read states: %w", err)
	}
	var errs []error
	for _, id := range ids {
		if slices.Contains(did, id) {
			continue
		}
		if state, ok := states[id]; ok {
			errs = append(errs, &StateError{ID: id, State: State(state), Action: action})
		} else {
			errs = append(errs, fmt.Errorf("dlq: dead letter %d: %w", id, ErrNotFound))
		}
	}
	return errs, nil
}

// Purge deletes dead letters that were replayed or discarded longer ago than
// Config.Retention, with their edits and notes, in small batches, and returns how many. Call
// it from time to time; concurrent calls are safe.
func (s *Store) Purge(ctx context.Context) (deleted int64, err error) {
	deleted, err = s.store.Purge(ctx, s.cfg.Retention)
	if err != nil {
		err = fmt.Errorf("dlq: purge: %w", err)
	}
	return deleted, err
}
