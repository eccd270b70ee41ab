package keystore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

// sqlite is the Store on SQLite.
type sqlite struct {
	common
	q sqliteTexts
}

// sqliteTexts are the statements.
type sqliteTexts struct {
	Claim, Purge, Find, TakeOver, Outstanding, Extend, Release, Complete string
	Purgeable, Expired, Expire                                           string
	Seal, Finish, Sealed                                                 string
	CountStarted, CountStored                                            string
	operatorTexts
	archiveTexts
}

// Traits implements [Store].
func (*sqlite) Traits() Traits { return Traits{OneWriter: true, SealsClaims: true} }

// ClaimAll implements [Store].
func (*sqlite) ClaimAll(context.Context, []Claim) ([]Record, []bool, error) {
	return nil, nil, errors.ErrUnsupported
}

// TakeOver implements [Store].
func (s *sqlite) TakeOver(ctx context.Context, c Claim, from Owner) (Record, bool, error) {
	return s.writeAndFind(ctx, c.ID, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, s.q.TakeOver, takeOverArgs(c, from)...)
		return err
	})
}

// Find implements [Store].
func (s *sqlite) Find(ctx context.Context, id ID) (Record, bool, error) {
	return scanRow(id, s.prepared.row(ctx, s.q.Find, id[:]))
}

// Outstanding implements [Store].
func (s *sqlite) Outstanding(ctx context.Context, caller [16]byte, limit int) (n int, err error) {
	err = s.db.QueryRowContext(ctx, s.q.Outstanding, caller[:], limit).Scan(&n)
	return n, err
}

// Extend implements [Store].
func (s *sqlite) Extend(ctx context.Context, id ID, owner Owner, lease time.Duration) (bool, error) {
	return s.first(ctx, func(tx *sql.Tx) (bool, error) {
		return changed(ctx, tx, s.q.Extend, id[:], owner.Token[:], owner.Fence, lease.Microseconds())
	})
}

// Release implements [Store].
func (s *sqlite) Release(ctx context.Context, id ID, owner Owner) (bool, error) {
	return s.first(ctx, func(tx *sql.Tx) (bool, error) {
		return changed(ctx, tx, s.q.Release, id[:], owner.Token[:], owner.Fence)
	})
}

// Complete implements [Store].
func (s *sqlite) Complete(ctx context.Context, id ID, owner Owner, c Completion) (bool, error) {
	return s.first(ctx, func(tx *sql.Tx) (bool, error) { return s.end(ctx, tx, s.q.Complete, id, owner, c) })
}

// first writes ahead of other transactions: it renews a lease, or ends a claim that others
// wait for, and is short.
func (s *sqlite) first(ctx context.Context, do func(tx *sql.Tx) (bool, error)) (owned bool, err error) {
	err = sqlitetx.Write(ctx, s.db, turn.Heartbeat, func(tx *sql.Tx) (err error) {
		owned, err = do(tx)
		return err
	})
	return owned && err == nil, err
}

// changed reports whether a statement has changed one row.
func changed(ctx context.Context, tx *sql.Tx, text string, args ...any) (bool, error) {
	n, err := database.Affected(tx.ExecContext(ctx, text, args...))
	return n == 1, err
}

// end completes a claim by complete or finish, and stores a large response.
func (s *sqlite) end(ctx context.Context, tx *sql.Tx, text string, id ID, owner Owner, c Completion) (owned bool, err error) {
	owned, err = changed(ctx, tx, text, completionArgs(id, owner, c)...)
	if err != nil || !owned || !c.Large {
		return owned, err
	}
	if _, err := tx.ExecContext(ctx, s.q.StoreBody, id[:], c.Response); err != nil {
		return false, fmt.Errorf("store large response: %w", err)
	}
	return true, nil
}

// Begin implements [Store].
func (s *sqlite) Begin(ctx context.Context, _ sql.IsolationLevel) (*boundtx.Tx, error) {
	return s.begin(ctx, nil)
}

// Seal implements [Store].
func (*sqlite) Seal(context.Context, *sql.Tx, SealLimits) error { return nil }

// SealClaim implements [Store].
func (s *sqlite) SealClaim(ctx context.Context, tx *sql.Tx, id ID, owner Owner) (owned, enforced bool, err error) {
	err = s.prepared.rowIn(ctx, tx, s.q.Seal, id[:], owner.Token[:], owner.Fence).Scan(&enforced)
	if errors.Is(err, sql.ErrNoRows) {
		return false, false, nil
	}
	return err == nil, enforced, err
}

// Finish implements [Store].
func (s *sqlite) Finish(ctx context.Context, tx *sql.Tx, id ID, owner Owner, c Completion) (bool, error) {
	return s.end(ctx, tx, s.q.Finish, id, owner, c)
}

// FinishAll implements [Store].
func (s *sqlite) FinishAll(ctx context.Context, tx *sql.Tx, all []Completed) (stale []int, err error) {
	for i, c := range all {
		owned, err := s.Finish(ctx, tx, c.ID, c.Owner, c.Completion)
		if err != nil {
			return nil, err
		}
		if !owned {
			stale = append(stale, i)
		}
	}
	return stale, nil
}

// AfterFailure implements [Store]. SQLite rolls back when a writing statement is
// interrupted or the disk is full, and later statements would commit one by one.
func (s *sqlite) AfterFailure(ctx context.Context, tx *sql.Tx, id ID, _ error) TxState {
	var sealed int
	if err := tx.QueryRowContext(context.WithoutCancel(ctx), s.q.Sealed, id[:]).Scan(&sealed); err != nil || sealed != 1 {
		return TxGone
	}
	return TxOpen
}

// Aborted implements [Store].
func (*sqlite) Aborted(context.Context, *sql.Tx) bool { return false }
