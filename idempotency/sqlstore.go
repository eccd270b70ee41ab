package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

// StoreConfig configures a SQLStore. The zero value is right for most services.
type StoreConfig struct {
	// Database describes where the tables are.
	Database oncemill.Config

	// Prepare prepares the statements that every request needs, on each connection, which
	// saves parsing them. Do not use it with a pooler in transaction mode that does not
	// support prepared statements (PgBouncer before 1.21). Default: false.
	Prepare bool
}

// SQLStore is a [Store] in PostgreSQL or SQLite. It owns no connection and no goroutine,
// and is safe for concurrent use, by any number of engines. It is the only Store that
// supports transactional requests.
type SQLStore struct {
	db      *sql.DB
	cfg     database.Database
	q       queries
	prepare bool
	calls   *bounded.Calls

	mu       sync.Mutex
	prepared map[string]*sql.Stmt // by text; they live as long as db
}

// NewSQLStore returns a store on db. It does no I/O; oncemill.Migrate with [Migrations]
// creates the tables. Bad values of cfg are reported at once, each as an
// [*oncemill.ConfigError]. The caller keeps ownership of db.
func NewSQLStore(db *sql.DB, cfg StoreConfig) (*SQLStore, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "idempotency.NewSQLStore db", Value: "nil", Problem: "a database is needed"}
	}
	resolved, err := database.Resolve(db, cfg.Database)
	if err != nil {
		return nil, err
	}
	s := &SQLStore{db: db, cfg: resolved, q: postgresQueries, prepare: cfg.Prepare, calls: bounded.New(mostAbandoned)}
	if resolved.Dialect == oncemill.SQLite {
		s.q = sqliteQueries
	}
	s.q = s.q.expand(resolved)
	return s, nil
}

// prepareAll prepares the statements of a request, if configured. It needs a connection,
// so do not call it while holding one.
func (s *SQLStore) prepareAll(ctx context.Context) error {
	if !s.prepare {
		return nil
	}
	if s.stmt(s.q.claim) != nil {
		return nil
	}
	prepared := map[string]*sql.Stmt{}
	defer func() { // those that are not needed
		for _, stmt := range prepared {
			_ = stmt.Close() // nobody has used it
		}
	}()
	for _, text := range []string{s.q.claim, s.q.claimGroup, s.q.find, s.q.open, s.q.completeTx, s.q.completeGroup} {
		if text == "" {
			continue // of another dialect
		}
		stmt, err := s.db.PrepareContext(ctx, text) //nolint:sqlclosecheck // it lives as long as db, or is closed above
		if err != nil {
			return fmt.Errorf("prepare: %w", err)
		}
		prepared[text] = stmt
	}
	s.mu.Lock() // not before, since a server may not answer
	defer s.mu.Unlock()
	if s.prepared == nil {
		s.prepared, prepared = prepared, nil
	}
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

// queries are the statements of a dialect. Statements of the same name take the same
// arguments, except for open, claim, takeOver, purge and strip.
type queries struct {
	claim, claimGroup                                    string
	forget, outstanding, find, takeOver, extend, release string
	complete, completeBody, completeTx, completeGroup    string
	open, lost                                           string
	forgettable, purge, expired, strip                   string
}

func (q queries) expand(cfg database.Database) queries {
	for _, text := range []*string{
		&q.claim, &q.claimGroup, &q.forget, &q.outstanding, &q.find, &q.takeOver, &q.extend, &q.release,
		&q.complete, &q.completeBody, &q.completeTx, &q.completeGroup, &q.open, &q.lost,
		&q.forgettable, &q.purge, &q.expired, &q.strip,
	} {
		*text = cfg.Expand(*text)
	}
	return q
}

// session is the pool or a transaction.
type session interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// ask runs do for a single statement outside any other transaction. A serialization
// failure only means that PostgreSQL's default is a higher isolation level; do then runs
// again at READ COMMITTED, where each statement here is a reliable compare-and-set.
func (s *SQLStore) ask(ctx context.Context, do func(session) error) error {
	err := do(s.db)
	if s.cfg.Dialect == oncemill.SQLite || !sqlerr.Retryable(err) {
		return err
	}
	return shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) error { return do(tx) })
}

// record queries a record by a text.
func (s *SQLStore) record(ctx context.Context, id ID, text string, args ...any) (r Record, found bool, err error) {
	err = s.ask(ctx, func(via session) (err error) {
		row := via.QueryRowContext
		if stmt := s.stmt(text); stmt != nil && via == session(s.db) {
			row = func(ctx context.Context, _ string, args ...any) *sql.Row { return stmt.QueryRowContext(ctx, args...) }
		}
		r, found, err = scanRecord(id, row(ctx, text, args...))
		return err
	})
	return r, found, err
}

// change executes a statement, and returns how many rows it has changed. On SQLite it
// waits for its turn ahead of others.
func (s *SQLStore) change(ctx context.Context, text string, args ...any) (n int64, err error) {
	do := func(via session) error {
		result, err := via.ExecContext(ctx, text, args...)
		if err != nil {
			return err
		}
		n, err = result.RowsAffected()
		return err
	}
	if s.cfg.Dialect == oncemill.SQLite {
		err = sqlitetx.Write(ctx, s.db, turn.Heartbeat, func(tx *sql.Tx) error { return do(tx) })
	} else {
		err = s.ask(ctx, do)
	}
	return n, err
}

// set is a change of a claim by its owner. On SQLite it goes first: others wait for its
// result, or it renews a lease.
func (s *SQLStore) set(ctx context.Context, text string, args ...any) error {
	n, err := within(ctx, s, func(ctx context.Context) (int64, error) { return s.change(ctx, text, args...) })
	switch {
	case err != nil:
		return fmt.Errorf("change claim: %w", err)
	case n != 1:
		return ErrStaleOwner
	}
	return nil
}

// claimTries is how often a claim is retried when the record that prevented it is gone.
const claimTries = 5

func (s *SQLStore) claim(ctx context.Context, claim Claim) (Record, bool, error) {
	if err := s.prepareAll(ctx); err != nil {
		return Record{}, false, err
	}
	for range claimTries {
		record, found, err := s.tryClaim(ctx, claim)
		switch {
		case err != nil:
			return Record{}, false, fmt.Errorf("claim key: %w", err)
		case found:
			return record, grants(record, claim), nil
		}
	}
	return Record{}, false, errors.New("claim key: its record comes and goes")
}

// grants reports whether a record was made by the claim.
func grants(r Record, c Claim) bool {
	return r.State == StateStarted && r.Owner == Owner{Token: c.Token, Fence: 1}
}

// tryClaim returns the record that exists after an attempt to claim the key.
func (s *SQLStore) tryClaim(ctx context.Context, c Claim) (Record, bool, error) {
	if s.cfg.Dialect == oncemill.PostgreSQL {
		return s.record(ctx, c.ID, s.q.claim, append(claimValues(c), c.Durable)...)
	}
	if record, found, err := s.find(ctx, c.ID); err != nil || found {
		return record, found, err
	}
	return s.claimInTurn(ctx, c)
}

func claimValues(c Claim) []any {
	return []any{
		c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:], c.Endpoint,
		c.Lease.Microseconds(), c.Retention.Microseconds(), c.CorrelationID, c.TraceID,
	}
}

func (s *SQLStore) takeOver(ctx context.Context, c Claim, from Owner) (Record, bool, error) {
	record, found, err := s.tryTakeOver(ctx, c, from)
	if err != nil {
		return Record{}, false, fmt.Errorf("take key over: %w", err)
	}
	return record, found && record.Owner == Owner{Token: c.Token, Fence: from.Fence + 1}, nil
}

func (s *SQLStore) tryTakeOver(ctx context.Context, c Claim, from Owner) (Record, bool, error) {
	args := []any{c.ID[:], from.Token[:], from.Fence, c.Token[:], c.Lease.Microseconds(), c.Retention.Microseconds()}
	if s.cfg.Dialect == oncemill.PostgreSQL {
		return s.record(ctx, c.ID, s.q.takeOver, append(args, c.Durable)...)
	}
	return s.writeAndFind(ctx, c.ID, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, s.q.takeOver, args...)
		return err
	})
}

func (s *SQLStore) find(ctx context.Context, id ID) (Record, bool, error) {
	record, found, err := s.record(ctx, id, s.q.find, id[:])
	if err != nil {
		return Record{}, false, fmt.Errorf("find key: %w", err)
	}
	return record, found, nil
}

func scanRecord(id ID, row *sql.Row) (Record, bool, error) {
	r, err := scan(id, row)
	if errors.Is(err, sql.ErrNoRows) {
		return Record{}, false, nil
	}
	return r, err == nil, err
}

// scan scans a record, after columns that go into before.
func scan(id ID, row interface{ Scan(dest ...any) error }, before ...any) (Record, error) {
	r := Record{ID: id}
	var caller, fingerprint, token []byte
	var lease, expires, created, completed int64
	err := row.Scan(append(before, &caller, &fingerprint, &r.State, &token, &r.Owner.Fence,
		&r.Endpoint, &r.Status, &r.Response, &r.Location, &r.ResourceID, &r.CorrelationID, &r.TraceID,
		&lease, &expires, &created, &completed)...)
	if err != nil {
		return Record{}, err
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
	if r.State != StateStarted && r.ExpiresIn <= 0 {
		r.State, r.Response = StateExpired, nil
	}
	return r, nil
}

func (s *SQLStore) outstanding(ctx context.Context, caller Caller, limit int) (n int, err error) {
	err = s.ask(ctx, func(via session) error { return via.QueryRowContext(ctx, s.q.outstanding, caller[:], limit).Scan(&n) })
	if err != nil {
		return 0, fmt.Errorf("count outstanding keys: %w", err)
	}
	return n, nil
}

func (s *SQLStore) complete(ctx context.Context, id ID, owner Owner, c Completion) error {
	if s.cfg.Dialect == oncemill.PostgreSQL {
		var completed bool
		err := s.ask(ctx, func(via session) error {
			return via.QueryRowContext(ctx, s.q.complete, completionArgs(id, owner, c)...).Scan(&completed)
		})
		switch {
		case err != nil:
			return fmt.Errorf("complete key: %w", err)
		case !completed:
			return ErrStaleOwner
		}
		return nil
	}
	return sqlitetx.Write(ctx, s.db, turn.Heartbeat, func(tx *sql.Tx) error { return s.update(ctx, tx, s.q.complete, id, owner, c) })
}

// update completes the claim on SQLite by text, and stores a large body.
func (s *SQLStore) update(ctx context.Context, tx *sql.Tx, text string, id ID, owner Owner, c Completion) error {
	result, err := tx.ExecContext(ctx, text, completionArgs(id, owner, c)...)
	if err != nil {
		return fmt.Errorf("complete key: %w", err)
	}
	switch n, err := result.RowsAffected(); {
	case err != nil:
		return fmt.Errorf("complete key: %w", err)
	case n != 1:
		return ErrStaleOwner
	}
	if !c.Large {
		return nil
	}
	if _, err := tx.ExecContext(ctx, s.q.completeBody, id[:], c.Response); err != nil {
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

func (s *SQLStore) purge(ctx context.Context, limit int) (total int, err error) {
	for _, part := range []struct{ due, text string }{{s.q.forgettable, s.q.purge}, {s.q.expired, s.q.strip}} {
		var n int64
		if s.cfg.Dialect == oncemill.SQLite {
			n, err = s.purgeInTurn(ctx, part.due, part.text, limit)
		} else {
			n, err = s.change(ctx, part.text, limit)
		}
		total += int(n)
		if err != nil {
			return total, fmt.Errorf("purge: %w", err)
		}
	}
	return total, nil
}

func fromMicros(us int64) time.Time { return time.UnixMicro(us).UTC() }
