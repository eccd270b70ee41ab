package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/lent"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// SQLStore is a [Store] in PostgreSQL or SQLite. It holds no connection and no
// goroutine; it may be used by many goroutines and engines. Only with it are
// there transactional requests.
type SQLStore struct {
	db  *sql.DB
	cfg oncemill.Config
	q   queries

	// turn is held by the one of this store who writes, on SQLite; nil elsewhere.
	// SQLite lets the rest try again and again, and some try in vain.
	turn chan struct{}
}

// NewSQLStore returns a store on db. It does no I/O; the tables are made by
// oncemill.Migrate with [Migrations]. Bad values of cfg are reported at once, each
// as an [*oncemill.ConfigError]. The caller keeps owning db.
func NewSQLStore(db *sql.DB, cfg oncemill.Config) (*SQLStore, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "idempotency.NewSQLStore db", Value: "nil", Problem: "a database is needed"}
	}
	cfg, err := cfg.Resolve(db)
	if err != nil {
		return nil, err
	}
	s := &SQLStore{db: db, cfg: cfg, q: postgresQueries}
	if cfg.Dialect == oncemill.SQLite {
		s.q, s.turn = sqliteQueries, make(chan struct{}, 1)
	}
	s.q = s.q.expand(cfg)
	return s, nil
}

// wait waits for the turn to write and returns what gives it back.
func (s *SQLStore) wait(ctx context.Context) (done func(), err error) {
	if s.turn == nil {
		return func() {}, nil
	}
	select {
	case s.turn <- struct{}{}:
		return func() { <-s.turn }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the writer: %w", ctx.Err())
	}
}

// queries are the statements of a dialect. Those of the same name take the same
// arguments.
type queries struct {
	claim, forget, outstanding, find, takeOver, extend, release string
	complete, completeBody, completeTx, open, lost              string
	purge, strip                                                string
}

func (q queries) expand(cfg oncemill.Config) queries {
	for _, text := range []*string{
		&q.claim, &q.forget, &q.outstanding, &q.find, &q.takeOver, &q.extend, &q.release,
		&q.complete, &q.completeBody, &q.completeTx, &q.open, &q.lost,
		&q.purge, &q.strip,
	} {
		*text = cfg.Expand(*text)
	}
	return q
}

// claimTries is how often a claim looks again when the record that stood in its
// way has gone meanwhile.
const claimTries = 5

// Claim is [Store.Claim]. On SQLite it reads first, so that a duplicate does not
// wait for the writer. On PostgreSQL it inserts first; where there is a record that
// is a read, too.
func (s *SQLStore) Claim(ctx context.Context, claim Claim) (Record, bool, error) {
	if s.cfg.Dialect == oncemill.SQLite {
		record, found, err := s.Find(ctx, claim.ID)
		if err != nil || found {
			return record, false, err
		}
	}
	for range claimTries {
		record, granted, err := s.insert(ctx, claim)
		if err != nil || granted {
			return record, granted, err
		}
		record, found, err := s.Find(ctx, claim.ID)
		if err != nil || found {
			return record, false, err
		}
		if claim.Most > 0 {
			var n int
			if err := s.db.QueryRowContext(ctx, s.q.outstanding, claim.Caller[:], claim.Most).Scan(&n); err != nil {
				return Record{}, false, fmt.Errorf("count outstanding keys: %w", err)
			}
			if n >= claim.Most {
				return Record{}, false, ErrTooManyOutstanding
			}
		}
		if err := s.deleteForgotten(ctx, claim.ID); err != nil {
			return Record{}, false, err
		}
	}
	return Record{}, false, errors.New("claim key: its record comes and goes")
}

func (s *SQLStore) insert(ctx context.Context, c Claim) (Record, bool, error) {
	done, err := s.wait(ctx)
	if err != nil {
		return Record{}, false, err
	}
	defer done()
	var created int64
	err = s.db.QueryRowContext(ctx, s.q.claim, c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:], c.Endpoint,
		c.Lease.Microseconds(), c.Retention.Microseconds(), c.CorrelationID, c.TraceID, c.Most, durability(c.Durable)).Scan(&created)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return Record{}, false, nil
	case err != nil && s.cfg.Dialect == oncemill.PostgreSQL && sqlerr.Retryable(err):
		// Under REPEATABLE READ as the default: somebody has just claimed it.
		return Record{}, false, nil
	case err != nil:
		return Record{}, false, fmt.Errorf("claim key: %w", err)
	}
	return Record{
		ID: c.ID, Caller: c.Caller, Fingerprint: c.Fingerprint, State: Started,
		Owner: Owner{Token: c.Token, Fence: 1}, Endpoint: c.Endpoint, CorrelationID: c.CorrelationID, TraceID: c.TraceID,
		LeaseLeft: c.Lease, ExpiresIn: c.Retention, CreatedAt: fromMicros(created),
	}, true, nil
}

// durability is a value of synchronous_commit; empty leaves it as it is.
func durability(durable bool) string {
	if durable {
		return ""
	}
	return "off"
}

func (s *SQLStore) deleteForgotten(ctx context.Context, id ID) error {
	done, err := s.wait(ctx)
	if err != nil {
		return err
	}
	defer done()
	if _, err := s.db.ExecContext(ctx, s.q.forget, id[:]); err != nil && !sqlerr.Retryable(err) {
		return fmt.Errorf("forget key: %w", err)
	}
	return nil
}

// TakeOver is [Store.TakeOver].
func (s *SQLStore) TakeOver(ctx context.Context, c Claim, from Owner) (Record, bool, error) {
	done, err := s.wait(ctx)
	if err != nil {
		return Record{}, false, err
	}
	defer done()
	var fence, created int64
	err = s.db.QueryRowContext(ctx, s.q.takeOver, c.ID[:], from.Token[:], from.Fence, c.Token[:],
		c.Lease.Microseconds(), c.Retention.Microseconds(), durability(c.Durable)).Scan(&fence, &created)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return Record{}, false, nil
	case err != nil && s.cfg.Dialect == oncemill.PostgreSQL && sqlerr.Retryable(err):
		return Record{}, false, nil
	case err != nil:
		return Record{}, false, fmt.Errorf("take key over: %w", err)
	}
	return Record{
		ID: c.ID, Caller: c.Caller, Fingerprint: c.Fingerprint, State: Started,
		Owner: Owner{Token: c.Token, Fence: fence}, Endpoint: c.Endpoint,
		LeaseLeft: c.Lease, ExpiresIn: c.Retention, CreatedAt: fromMicros(created),
	}, true, nil
}

// Find is [Store.Find].
func (s *SQLStore) Find(ctx context.Context, id ID) (Record, bool, error) {
	r := Record{ID: id}
	var caller, fingerprint, token []byte
	var lease, expires, created, completed int64
	err := s.db.QueryRowContext(ctx, s.q.find, id[:]).Scan(&caller, &fingerprint, &r.State, &token, &r.Owner.Fence,
		&r.Endpoint, &r.Status, &r.Response, &r.Location, &r.ResourceID, &r.CorrelationID, &r.TraceID,
		&lease, &expires, &created, &completed)
	if errors.Is(err, sql.ErrNoRows) {
		return Record{}, false, nil
	}
	if err != nil {
		return Record{}, false, fmt.Errorf("find key: %w", err)
	}
	copy(r.Caller[:], caller)
	copy(r.Fingerprint[:], fingerprint)
	copy(r.Owner.Token[:], token)
	r.LeaseLeft = time.Duration(lease) * time.Microsecond
	r.ExpiresIn = time.Duration(expires) * time.Microsecond
	r.CreatedAt = fromMicros(created)
	if completed != 0 {
		r.CompletedAt = fromMicros(completed)
	}
	if r.State != Started && r.ExpiresIn <= 0 {
		r.State, r.Response = Expired, nil
	}
	return r, true, nil
}

// Extend is [Store.Extend].
func (s *SQLStore) Extend(ctx context.Context, id ID, owner Owner, lease time.Duration) error {
	done, err := s.wait(ctx)
	if err != nil {
		return err
	}
	defer done()
	return expectOne(s.db.ExecContext(ctx, s.q.extend, id[:], owner.Token[:], owner.Fence, lease.Microseconds()))
}

// Release is [Store.Release].
func (s *SQLStore) Release(ctx context.Context, id ID, owner Owner) error {
	done, err := s.wait(ctx)
	if err != nil {
		return err
	}
	defer done()
	return expectOne(s.db.ExecContext(ctx, s.q.release, id[:], owner.Token[:], owner.Fence))
}

// Complete is [Store.Complete].
func (s *SQLStore) Complete(ctx context.Context, id ID, owner Owner, c Completion) error {
	done, err := s.wait(ctx)
	if err != nil {
		return err
	}
	defer done()
	if s.cfg.Dialect == oncemill.PostgreSQL || !c.Large {
		return s.update(ctx, s.db, s.q.complete, id, owner, c)
	}
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("complete key: begin: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit; before it the first error matters
	if err := s.update(ctx, tx, s.q.complete, id, owner, c); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("complete key: commit: %w", err)
	}
	return nil
}

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// update completes the claim by text, and stores a large body, which on
// PostgreSQL the text does as well.
func (s *SQLStore) update(ctx context.Context, via execer, text string, id ID, owner Owner, c Completion) error {
	if err := expectOne(via.ExecContext(ctx, text, s.completionArgs(id, owner, c)...)); err != nil {
		return err
	}
	if s.q.completeBody == "" || !c.Large {
		return nil
	}
	if _, err := via.ExecContext(ctx, s.q.completeBody, id[:], c.Response); err != nil {
		return fmt.Errorf("store large response: %w", err)
	}
	return nil
}

func (s *SQLStore) completionArgs(id ID, owner Owner, c Completion) []any {
	return []any{
		id[:], owner.Token[:], owner.Fence, int(c.State), c.Status, c.Response, c.Large,
		c.Location, c.ResourceID, c.Retention.Microseconds(), (c.Retention + c.Refuse).Microseconds(),
	}
}

// expectOne turns the result of a compare-and-set into its error. A serialization
// failure means that another owner was faster.
func expectOne(result sql.Result, err error) error {
	if err != nil {
		if sqlerr.State(err) == "40001" {
			return fmt.Errorf("%w: %w", ErrStaleOwner, err)
		}
		return fmt.Errorf("change claim: %w", err)
	}
	n, err := result.RowsAffected()
	if err != nil {
		return fmt.Errorf("change claim: %w", err)
	}
	if n != 1 {
		return ErrStaleOwner
	}
	return nil
}

// Purge is [Store.Purge].
func (s *SQLStore) Purge(ctx context.Context, limit int) (int, error) {
	done, err := s.wait(ctx)
	if err != nil {
		return 0, err
	}
	defer done()
	total := 0
	for _, text := range []string{s.q.purge, s.q.strip} {
		result, err := s.db.ExecContext(ctx, text, limit)
		if err != nil {
			return total, fmt.Errorf("purge: %w", err)
		}
		n, err := result.RowsAffected()
		if err != nil {
			return total, fmt.Errorf("purge: %w", err)
		}
		total += int(n)
	}
	return total, nil
}

// sqlTx is the transaction in which a handler runs.
type sqlTx struct {
	*lent.Handle
	store *SQLStore
	tx    *sql.Tx
	id    ID
	owner Owner
	place string // of the seal's row, on PostgreSQL

	beaten atomic.Bool // a statement lost against another transaction
	done   func()      // gives the turn to write back
}

func (s *SQLStore) begin(ctx context.Context, id ID, owner Owner, isolation sql.IsolationLevel, idle time.Duration) (*sqlTx, error) {
	t, err := s.beginPlain(ctx, isolation)
	if err != nil {
		return nil, err
	}
	t.id, t.owner = id, owner
	t.Handle = lent.New(t.tx, s.cfg.Dialect, ErrTxEnded, t.lost)
	if err := t.open(ctx, idle); err != nil {
		t.rollback()
		return nil, err
	}
	return t, nil
}

// beginPlain begins a transaction that belongs to no claim and has no seal.
func (s *SQLStore) beginPlain(ctx context.Context, isolation sql.IsolationLevel) (*sqlTx, error) {
	var options *sql.TxOptions
	if s.cfg.Dialect == oncemill.PostgreSQL {
		options = &sql.TxOptions{Isolation: isolation}
	}
	done, err := s.wait(ctx)
	if err != nil {
		return nil, err
	}
	tx, err := s.db.BeginTx(ctx, options)
	if err != nil {
		done()
		return nil, fmt.Errorf("begin: %w", err)
	}
	t := &sqlTx{store: s, tx: tx, done: sync.OnceFunc(done)}
	t.Handle = lent.New(tx, s.cfg.Dialect, ErrTxEnded, func(context.Context, error) error { return nil })
	return t, nil
}

func (t *sqlTx) open(ctx context.Context, idle time.Duration) error {
	if t.store.cfg.Dialect == oncemill.PostgreSQL {
		if err := t.tx.QueryRowContext(ctx, t.store.q.open, fmt.Sprintf("%dms", idle.Milliseconds())).Scan(&t.place); err != nil {
			return fmt.Errorf("begin: open the seal: %w", err)
		}
		return nil
	}
	var sealable bool
	err := t.tx.QueryRowContext(ctx, t.store.q.open, t.id[:], t.owner.Token[:], t.owner.Fence).Scan(&sealable)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return ErrStaleOwner
	case err != nil:
		return fmt.Errorf("begin: open the seal: %w", err)
	case !sealable:
		return ErrUnsealed
	}
	return nil
}

// complete is the last statement: it marks the claim and lets the database
// commit. ErrStaleOwner: the claim is another's. ErrTxEnded: the handler has ended
// the transaction.
func (t *sqlTx) complete(ctx context.Context, c Completion) error {
	s := t.store
	if s.cfg.Dialect == oncemill.SQLite {
		return s.update(ctx, t.tx, s.q.completeTx, t.id, t.owner, c)
	}
	var done int
	var open bool
	var seal sql.NullString
	err := t.tx.QueryRowContext(ctx, s.q.completeTx, append(s.completionArgs(t.id, t.owner, c), t.place)...).Scan(&done, &open, &seal)
	switch {
	case err != nil: // with 40001 for a claim that was taken over under the higher isolation levels
		return fmt.Errorf("complete key: %w", err)
	case !open:
		return ErrTxEnded
	case done != 1:
		return ErrStaleOwner
	}
	return nil
}

func (t *sqlTx) commit() error {
	defer t.done()
	return t.tx.Commit()
}

// rollback is a no-op after the commit. Its own error adds nothing: the database
// rolls back what it lost the connection of.
func (t *sqlTx) rollback() {
	defer t.done()
	_ = t.tx.Rollback()
}

// postgresSealState is the SQLSTATE that the seal raises.
const postgresSealState = "OMD01"

// lost tells whether a failed statement took the transaction with it. PostgreSQL
// ends none on its own and refuses everything after an error; only the seal
// speaks of an attempt to commit. SQLite rolls back when a writing statement is
// interrupted or the disk is full; what follows would then commit statement by
// statement. An unsealed row is never committed, so one that is seen is ours.
func (t *sqlTx) lost(ctx context.Context, err error) error {
	if sqlerr.Retryable(err) {
		t.beaten.Store(true)
	}
	if t.store.cfg.Dialect == oncemill.PostgreSQL {
		if sqlerr.State(err) == postgresSealState {
			return fmt.Errorf("%w: %w", oncemill.ErrTxOwned, err)
		}
		return nil
	}
	var open int
	check := t.tx.QueryRowContext(context.WithoutCancel(ctx), t.store.q.lost, t.id[:]).Scan(&open)
	if check != nil || open != 1 {
		return fmt.Errorf("%w: %w", ErrTxEnded, err)
	}
	return nil
}

func fromMicros(us int64) time.Time { return time.UnixMicro(us).UTC() }
