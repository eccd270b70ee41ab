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
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// StoreConfig configures a SQLStore. The zero value is right for most services.
type StoreConfig struct {
	// Database says where the tables are.
	Database oncemill.Config

	// Prepare prepares the statements that every request needs, on each
	// connection, which saves their parsing. It does not go with a pooler in
	// transaction mode that knows nothing of prepared statements (PgBouncer
	// before 1.21). Default: false.
	Prepare bool
}

// SQLStore is a [Store] in PostgreSQL or SQLite. It holds no connection and no
// goroutine; it may be used by many goroutines and engines. Only with it are
// there transactional requests.
type SQLStore struct {
	db      *sql.DB
	cfg     oncemill.Config
	q       queries
	prepare bool

	// level is the isolation level that transactions begin with by themselves on
	// PostgreSQL, as the last one told; empty at first.
	level atomic.Pointer[string]

	mu       sync.Mutex
	prepared map[string]*sql.Stmt // by text; they live as long as db

	// turn is held by the one of this store who writes, on SQLite; nil elsewhere.
	// SQLite lets the rest try again and again, and some try in vain.
	turn chan struct{}
}

// NewSQLStore returns a store on db. It does no I/O; the tables are made by
// oncemill.Migrate with [Migrations]. Bad values of cfg are reported at once, each
// as an [*oncemill.ConfigError]. The caller keeps owning db.
func NewSQLStore(db *sql.DB, cfg StoreConfig) (*SQLStore, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "idempotency.NewSQLStore db", Value: "nil", Problem: "a database is needed"}
	}
	database, err := cfg.Database.Resolve(db)
	if err != nil {
		return nil, err
	}
	s := &SQLStore{db: db, cfg: database, q: postgresQueries, prepare: cfg.Prepare}
	if database.Dialect == oncemill.SQLite {
		s.q, s.turn = sqliteQueries, make(chan struct{}, 1)
	}
	s.q = s.q.expand(database)
	return s, nil
}

// prepareAll prepares the statements of a request, where that is wanted. It needs a
// connection, so it is not for those who hold one.
func (s *SQLStore) prepareAll(ctx context.Context) error {
	if !s.prepare {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.prepared != nil {
		return nil
	}
	prepared := map[string]*sql.Stmt{}
	for _, text := range []string{s.q.claim, s.q.find, s.q.open, s.q.completeTx} {
		stmt, err := s.db.PrepareContext(ctx, text) //nolint:sqlclosecheck // it lives as long as db
		if err != nil {
			return fmt.Errorf("prepare: %w", err)
		}
		prepared[text] = stmt
	}
	s.prepared = prepared
	return nil
}

func (s *SQLStore) stmt(text string) *sql.Stmt {
	if !s.prepare {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.prepared[text]
}

// queryRow queries on any connection.
func (s *SQLStore) queryRow(ctx context.Context, text string, args ...any) *sql.Row {
	if stmt := s.stmt(text); stmt != nil { //nolint:sqlclosecheck // it lives as long as db
		return stmt.QueryRowContext(ctx, args...)
	}
	return s.db.QueryRowContext(ctx, text, args...)
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
// arguments, but for open and claim.
type queries struct {
	claim, forget, outstanding, find, takeOver, extend, release string
	complete, completeBody, completeTx                          string
	open, lost                                                  string
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
// wait for the writer. On PostgreSQL it is one round trip, whatever comes out.
func (s *SQLStore) Claim(ctx context.Context, claim Claim) (Record, bool, error) {
	if err := s.prepareAll(ctx); err != nil {
		return Record{}, false, err
	}
	for range claimTries {
		record, found, err := s.tryClaim(ctx, claim)
		switch {
		case err != nil && s.cfg.Dialect == oncemill.PostgreSQL && sqlerr.Retryable(err):
			continue // under REPEATABLE READ as the default: somebody has just claimed it
		case err != nil:
			return Record{}, false, fmt.Errorf("claim key: %w", err)
		case found:
			return record, record.Owner == Owner{Token: claim.Token, Fence: 1}, nil
		}
	}
	return Record{}, false, errors.New("claim key: its record comes and goes")
}

// tryClaim returns the record that stands there after an attempt to claim the key.
func (s *SQLStore) tryClaim(ctx context.Context, c Claim) (Record, bool, error) {
	if s.cfg.Dialect == oncemill.PostgreSQL {
		return scanRecord(c.ID, s.queryRow(ctx, s.q.claim, c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:], c.Endpoint,
			c.Lease.Microseconds(), c.Retention.Microseconds(), c.CorrelationID, c.TraceID, c.Durable))
	}
	record, found, err := s.Find(ctx, c.ID)
	if err != nil || found {
		return record, found, err
	}
	if err := s.write(ctx, s.q.claim, c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:], c.Endpoint,
		c.Lease.Microseconds(), c.Retention.Microseconds(), c.CorrelationID, c.TraceID); err != nil {
		return Record{}, false, err
	}
	record, found, err = s.Find(ctx, c.ID)
	if err == nil && !found {
		err = s.write(ctx, s.q.forget, c.ID[:])
	}
	return record, found, err
}

// write executes a statement when it is its turn, on SQLite.
func (s *SQLStore) write(ctx context.Context, text string, args ...any) error {
	done, err := s.wait(ctx)
	if err != nil {
		return err
	}
	defer done()
	_, err = s.db.ExecContext(ctx, text, args...)
	return err
}

// durability is a value of synchronous_commit; empty leaves it as it is.
func durability(durable bool) string {
	if durable {
		return ""
	}
	return "off"
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
	record, found, err := scanRecord(id, s.queryRow(ctx, s.q.find, id[:]))
	if err != nil {
		return Record{}, false, fmt.Errorf("find key: %w", err)
	}
	return record, found, nil
}

func scanRecord(id ID, row *sql.Row) (Record, bool, error) {
	r := Record{ID: id}
	var caller, fingerprint, token []byte
	var lease, expires, created, completed int64
	err := row.Scan(&caller, &fingerprint, &r.State, &token, &r.Owner.Fence,
		&r.Endpoint, &r.Status, &r.Response, &r.Location, &r.ResourceID, &r.CorrelationID, &r.TraceID,
		&lease, &expires, &created, &completed)
	if errors.Is(err, sql.ErrNoRows) {
		return Record{}, false, nil
	}
	if err != nil {
		return Record{}, false, err
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

// Outstanding is [Store.Outstanding].
func (s *SQLStore) Outstanding(ctx context.Context, caller Caller, limit int) (n int, err error) {
	if err := s.db.QueryRowContext(ctx, s.q.outstanding, caller[:], limit).Scan(&n); err != nil {
		return 0, fmt.Errorf("count outstanding keys: %w", err)
	}
	return n, nil
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
	if s.cfg.Dialect == oncemill.PostgreSQL {
		var done bool
		switch err := s.db.QueryRowContext(ctx, s.q.complete, completionArgs(id, owner, c)...).Scan(&done); {
		case err != nil:
			return staleOr(err)
		case !done:
			return ErrStaleOwner
		}
		return nil
	}
	done, err := s.wait(ctx)
	if err != nil {
		return err
	}
	defer done()
	if !c.Large {
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

// update completes the claim on SQLite by text, and stores a large body.
func (s *SQLStore) update(ctx context.Context, via execer, text string, id ID, owner Owner, c Completion) error {
	if err := expectOne(via.ExecContext(ctx, text, completionArgs(id, owner, c)...)); err != nil {
		return err
	}
	if !c.Large {
		return nil
	}
	if _, err := via.ExecContext(ctx, s.q.completeBody, id[:], c.Response); err != nil {
		return fmt.Errorf("store large response: %w", err)
	}
	return nil
}

func completionArgs(id ID, owner Owner, c Completion) []any {
	return []any{
		id[:], owner.Token[:], owner.Fence, int(c.State), c.Status, c.Response, c.Large,
		c.Location, c.ResourceID, c.Retention.Microseconds(), (c.Retention + c.Refuse).Microseconds(),
	}
}

// staleOr returns the error of a compare-and-set. A serialization failure means that
// another owner was faster.
func staleOr(err error) error {
	if sqlerr.State(err) == "40001" {
		return fmt.Errorf("%w: %w", ErrStaleOwner, err)
	}
	return fmt.Errorf("change claim: %w", err)
}

// expectOne turns the result of a compare-and-set into its error.
func expectOne(result sql.Result, err error) error {
	if err != nil {
		return staleOr(err)
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

func fromMicros(us int64) time.Time { return time.UnixMicro(us).UTC() }
