package keystore

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/statements"
	"github.com/oncemill/oncemill/internal/turn"
)

// Phase is the state of a record as operators see it, as one bit.
type Phase int

// The numbers are those of the statements.
const (
	PhaseRunning       Phase = 1  // started, and its lease has not ended
	PhaseInterrupted   Phase = 2  // started, and its lease has ended
	PhaseCompleted     Phase = 4  // the response is stored
	PhaseNotReplayable Phase = 8  // it ran, and the response is not stored
	PhaseExpired       Phase = 16 // its retention has ended

	PhaseAny = PhaseRunning | PhaseInterrupted | PhaseCompleted | PhaseNotReplayable | PhaseExpired
)

// Summary is a record without its response.
type Summary struct {
	Record
	Size     int64         // of the stored response, in bytes
	ForgetIn time.Duration // until the record may be purged
}

// Filter selects records.
type Filter struct {
	Phases Phase // a set
	Caller *[16]byte
	// Endpoint is all of an endpoint; empty: any.
	Endpoint     string
	Since, Until time.Time // of the claim; zero: any
	Limit        int
}

// Seen is a record as an operator has seen it. An act on it changes nothing if the record
// has changed since.
type Seen struct {
	ID    ID
	Owner Owner
	State State
}

// Act says who acts and why.
type Act struct{ By, Reason, Details string }

// The acts, as they are in the audit.
const (
	actSettle  = "idempotency_key.settle"
	actRelease = "idempotency_key.release"
	actErase   = "idempotency_scope.erase"
)

// Operators are the acts of operators on the keys of a database. Each act and its entry in
// the audit are one transaction. It is safe for concurrent use.
type Operators struct {
	db    *sql.DB
	text  *operatorTexts
	audit auditstore.Store
	act   func(ctx context.Context, do func(tx *sql.Tx) error) error // for which a person waits
	slice func(ctx context.Context, do func(tx *sql.Tx) error) error // one of many
}

// operatorTexts are the statements. They take the same arguments on all databases.
type operatorTexts struct {
	KeysEnd, KeysBetween, OpenKeys, OpenKeysOf string
	MoreOpen, MoreOpenOf                       string
	Settle, StoreBody, ForgetKey               string
	EraseBetween, EraseBodies, KeysOf          string
}

// OpenOperators does no I/O.
func OpenOperators(db *sql.DB, where database.Database) *Operators {
	o := &Operators{db: db, audit: auditstore.Open(db, where)}
	if where.Dialect == oncemill.SQLite {
		q := &sqliteTexts{}
		statements.Load(q, files, "sqlite", where.Names)
		o.text = &q.operatorTexts
		write := func(kind turn.Kind) func(context.Context, func(*sql.Tx) error) error {
			return func(ctx context.Context, do func(*sql.Tx) error) error { return sqlitetx.Write(ctx, db, kind, do) }
		}
		o.act, o.slice = write(turn.Caller), write(turn.Background)
		return o
	}
	q := &postgresTexts{}
	statements.Load(q, files, "postgresql", where.Names)
	o.text = &q.operatorTexts
	o.act = func(ctx context.Context, do func(*sql.Tx) error) error {
		return shorttx.Run(ctx, db, shorttx.Within(ctx), do)
	}
	o.slice = o.act
	return o
}

// last is greater than all hashes.
var last = bytes.Repeat([]byte{0xff}, len(ID{})+1)

// Slice returns the end of the slice of size keys after from (exclusive). The last slice
// has no end; then more is false.
func (o *Operators) Slice(ctx context.Context, from []byte, size int) (end []byte, more bool, err error) {
	err = o.db.QueryRowContext(ctx, o.text.KeysEnd, notNil(from), size-1).Scan(&end)
	if errors.Is(err, sql.ErrNoRows) {
		return last, false, nil
	}
	return end, err == nil, err
}

// Between lists records after from, up to and with end, ordered by their ids.
func (o *Operators) Between(ctx context.Context, from, end []byte, f Filter) ([]Summary, error) {
	var caller []byte
	if f.Caller != nil {
		caller = f.Caller[:]
	}
	return summaries(ctx, o.db, o.text.KeysBetween, append(f.args(), notNil(from), end, caller)...)
}

// Open lists started records, the oldest first, from at most look of them.
func (o *Operators) Open(ctx context.Context, look int, f Filter) ([]Summary, error) {
	if f.Caller != nil {
		return summaries(ctx, o.db, o.text.OpenKeysOf, append(f.args(), look, f.Caller[:])...)
	}
	return summaries(ctx, o.db, o.text.OpenKeys, append(f.args(), look)...)
}

// MoreOpen reports whether there are more started records, of a caller unless it is nil, than
// look.
func (o *Operators) MoreOpen(ctx context.Context, look int, caller *[16]byte) (more bool, err error) {
	if caller != nil {
		err = o.db.QueryRowContext(ctx, o.text.MoreOpenOf, look, caller[:]).Scan(&more)
	} else {
		err = o.db.QueryRowContext(ctx, o.text.MoreOpen, look).Scan(&more)
	}
	return more, err
}

// Prefixed returns up to limit records whose ids begin with a prefix.
func (o *Operators) Prefixed(ctx context.Context, prefix []byte, limit int) ([]Summary, error) {
	end := append(bytes.Clone(prefix), last[:len(last)-len(prefix)]...)
	f := Filter{Phases: PhaseAny, Limit: limit}
	return o.Between(ctx, before(prefix), end, f)
}

// before returns a value that is less than prefix and what begins with it, and greater than
// every other id that is.
func before(prefix []byte) []byte {
	b := bytes.Clone(prefix)
	for i := len(b) - 1; i >= 0; i-- {
		if b[i] > 0 {
			b[i]--
			return append(b[:i+1], last...)
		}
	}
	return nil // nothing is less
}

func (f *Filter) args() []any {
	return []any{f.Endpoint, microsOr(f.Since, firstMicros), microsOr(f.Until, lastMicros), int(f.Phases), f.Limit}
}

// The years 1 and 9999, in microseconds since 1970.
const (
	firstMicros = -62135596800000000
	lastMicros  = 253402300799999999
)

func microsOr(t time.Time, otherwise int64) int64 {
	if t.IsZero() {
		return otherwise
	}
	return t.UnixMicro()
}

// notNil keeps an empty value from being NULL.
func notNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// Settle completes a started record whose lease has ended. done is false, and nothing was
// changed, if the record is not as it was seen, or another transaction is changing it.
func (o *Operators) Settle(ctx context.Context, seen Seen, token [16]byte, c Completion, act Act) (done bool, err error) {
	return o.one(ctx, seen, actSettle, act, func(tx *sql.Tx) (bool, error) {
		done, err := changed(ctx, tx, o.text.Settle, seen.ID[:], seen.Owner.Token[:], seen.Owner.Fence, token[:], int(c.State), c.Status,
			c.Response, c.Large, c.Location, c.Retention.Microseconds(), (c.Retention + c.Refuse).Microseconds())
		if err != nil || !done || !c.Large {
			return done, err
		}
		_, err = tx.ExecContext(ctx, o.text.StoreBody, seen.ID[:], c.Response)
		return err == nil, err
	})
}

// Release deletes a record that is not running. done is as for Settle.
func (o *Operators) Release(ctx context.Context, seen Seen, act Act) (done bool, err error) {
	return o.one(ctx, seen, actRelease, act, func(tx *sql.Tx) (bool, error) {
		return changed(ctx, tx, o.text.ForgetKey, seen.ID[:], seen.Owner.Token[:], seen.Owner.Fence, int(seen.State))
	})
}

// one changes one record, and writes that into the audit.
func (o *Operators) one(ctx context.Context, seen Seen, action string, act Act, do func(tx *sql.Tx) (bool, error)) (done bool, err error) {
	err = o.act(ctx, func(tx *sql.Tx) (err error) {
		if done, err = do(tx); err != nil || !done {
			return err
		}
		return o.audit.Record(ctx, tx, auditstore.Act{
			Action: action, By: act.By, Reason: act.Reason, Details: act.Details,
			Subjects: []string{"idempotency_key " + hex.EncodeToString(seen.ID[:])},
		})
	})
	return done && err == nil, err
}

// KeysOf counts the records of a caller in a slice.
func (o *Operators) KeysOf(ctx context.Context, caller [16]byte, from, end []byte) (n int, err error) {
	err = o.db.QueryRowContext(ctx, o.text.KeysOf, notNil(from), end, caller[:]).Scan(&n)
	return n, err
}

// Erase deletes the records of a caller in a slice that are not running, except those that
// other transactions have locked. It writes the number into the audit, and not the caller.
func (o *Operators) Erase(ctx context.Context, caller [16]byte, from, end []byte, act Act) (erased []ID, err error) {
	err = o.slice(ctx, func(tx *sql.Tx) error {
		if erased, err = ids(ctx, tx, o.text.EraseBetween, notNil(from), end, caller[:]); err != nil || len(erased) == 0 {
			return err
		}
		if _, err = tx.ExecContext(ctx, o.text.EraseBodies, notNil(from), end); err != nil {
			return err
		}
		act.Details = fmt.Sprintf("%d keys", len(erased))
		return o.recordErasure(ctx, tx, act)
	})
	if err != nil {
		return nil, err
	}
	return erased, nil
}

// Erased writes the end of an erasure into the audit.
func (o *Operators) Erased(ctx context.Context, act Act) error {
	return o.slice(ctx, func(tx *sql.Tx) error { return o.recordErasure(ctx, tx, act) })
}

func (o *Operators) recordErasure(ctx context.Context, tx *sql.Tx, act Act) error {
	return o.audit.Record(ctx, tx, auditstore.Act{Action: actErase, By: act.By, Reason: act.Reason, Details: act.Details, Subjects: []string{"idempotency_scope"}})
}

func ids(ctx context.Context, tx *sql.Tx, text string, args ...any) (all []ID, err error) {
	rows, err := tx.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var key []byte
		if err := rows.Scan(&key); err != nil {
			return nil, err
		}
		var id ID
		copy(id[:], key)
		all = append(all, id)
	}
	return all, rows.Err()
}

func summaries(ctx context.Context, db *sql.DB, text string, args ...any) (all []Summary, err error) {
	rows, err := db.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var s Summary
		var id, caller, token, fingerprint []byte
		var lease, expires, forget, created, completed int64
		err := rows.Scan(&id, &caller, &s.State, &token, &s.Owner.Fence, &s.Endpoint, &s.Status, &s.Size, &s.Location, &s.ResourceID,
			&s.CorrelationID, &s.TraceID, &lease, &expires, &forget, &created, &completed, &fingerprint)
		if err != nil {
			return nil, err
		}
		copy(s.ID[:], id)
		copy(s.Caller[:], caller)
		copy(s.Owner.Token[:], token)
		copy(s.Fingerprint[:], fingerprint)
		s.LeaseLeft, s.ExpiresIn = time.Duration(lease)*time.Microsecond, time.Duration(expires)*time.Microsecond
		s.ForgetIn, s.CreatedAt = time.Duration(forget)*time.Microsecond, time.UnixMicro(created).UTC()
		if completed != 0 {
			s.CompletedAt = time.UnixMicro(completed).UTC()
		}
		all = append(all, s)
	}
	return all, rows.Err()
}

// Phase returns the state as operators see it.
func (s *Summary) Phase() Phase {
	switch {
	case s.State == StateStarted && s.LeaseLeft > 0:
		return PhaseRunning
	case s.State == StateStarted:
		return PhaseInterrupted
	case s.ExpiresIn <= 0 || s.State == StateExpired:
		return PhaseExpired
	case s.State == StateCompleted:
		return PhaseCompleted
	}
	return PhaseNotReplayable
}
