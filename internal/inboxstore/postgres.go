package inboxstore

import (
	"context"
	"database/sql"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/statements"
	"github.com/oncemill/oncemill/internal/turn"
)

type postgres struct {
	store
	text    postgresTexts
	options sql.TxOptions
	claim   lockLimit
	group   lockLimit
	idle    string // idle_in_transaction_session_timeout, if there is none
}

type postgresTexts struct {
	texts
	Claim, ClaimGroup, LimitLockWait, Seal, Ping string
}

// lockLimit is how long a claim may wait.
type lockLimit struct {
	setting string        // lock_timeout, as PostgreSQL reads it
	most    time.Duration // for the claim as a whole
}

// claimGrace is how much longer than its lock timeout a claim may take. The table lock is
// taken before the statement sets the timeout, so this limit bounds the wait for a
// migration that holds the table.
const claimGrace = 5 * time.Second

func newPostgres(db *sql.DB, where database.Database, cfg Config) *postgres {
	s := &postgres{
		options: sql.TxOptions{Isolation: cfg.Isolation},
		claim:   lockLimit{milliseconds(cfg.LockTimeout), cfg.LockTimeout + claimGrace},
		group:   lockLimit{milliseconds(cfg.GroupLockTimeout), cfg.GroupLockTimeout + claimGrace},
		idle:    milliseconds(cfg.Timeout + boundtx.CommitLimit + claimGrace),
	}
	statements.Load(&s.text, files, "postgresql", where.Names)
	s.store = store{
		db: db, consumer: cfg.Consumer, text: &s.text.texts,
		write: func(_ context.Context, _ turn.Kind, do func(session) error) error { return do(db) },
		// The server ends it when its client falls silent, since the message could not be
		// handled while it is open.
		inTx: func(ctx context.Context, do func(*sql.Tx) error) error {
			return shorttx.Run(ctx, db, shorttx.Within(ctx), do)
		},
		list: func(list []string) any { return pq.Array(list) },
	}
	return s
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) + "ms" }

// The isolation level is explicit, since the database's default may differ.
func (s *postgres) Begin(ctx context.Context, calls *bounded.Calls) (*boundtx.Tx, error) {
	return boundtx.Begin(ctx, s.db, oncemill.PostgreSQL, calls, &s.options)
}

func (s *postgres) Claim(ctx context.Context, tx *sql.Tx, id string, fingerprint []byte) (bool, error) {
	limited, cancel := context.WithTimeout(ctx, s.claim.most)
	defer cancel()
	inserted, err := database.Affected(tx.ExecContext(limited, s.text.Claim, s.consumer, id, s.claim.setting, fingerprint, s.idle))
	if err != nil {
		return false, claimError(ctx, limited, err)
	}
	return inserted == 1, nil
}

// claimError marks the error of a claim that another transaction holds up.
func claimError(ctx, limited context.Context, err error) error {
	if limited.Err() != nil && ctx.Err() == nil || sqlerr.Contended(err) {
		return fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return fmt.Errorf("claim: %w", err)
}

func (s *postgres) ClaimGroup(ctx context.Context, tx *sql.Tx, sorted []Claim) (map[string]bool, error) {
	limited, cancel := context.WithTimeout(ctx, s.group.most)
	defer cancel()
	claimed, err := s.claimGroup(limited, tx, sorted)
	if err != nil {
		return nil, claimError(ctx, limited, err)
	}
	return claimed, nil
}

func (s *postgres) claimGroup(ctx context.Context, tx *sql.Tx, sorted []Claim) (map[string]bool, error) {
	ids, fingerprints := make([]string, len(sorted)), make([]string, len(sorted))
	for i, c := range sorted {
		ids[i] = c.ID
		if c.Fingerprint != nil { // an empty one is one
			fingerprints[i] = `\x` + hex.EncodeToString(c.Fingerprint)
		}
	}
	rows, err := tx.QueryContext(ctx, s.text.ClaimGroup, s.consumer, pq.Array(ids), s.group.setting, pq.Array(fingerprints), s.idle)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	claimed := make(map[string]bool, len(ids))
	for rows.Next() {
		var id string
		var setting sql.RawBytes
		if err := rows.Scan(&id, &setting); err != nil {
			return nil, err
		}
		claimed[id] = true
	}
	return claimed, rows.Err()
}

func (s *postgres) Seal(ctx context.Context, tx *sql.Tx, _ string) error {
	return seal(tx.ExecContext(ctx, s.text.Seal))
}

func (s *postgres) SealGroup(ctx context.Context, tx *sql.Tx, _ map[string]bool) error {
	return seal(tx.ExecContext(ctx, s.text.Seal))
}

func (s *postgres) LimitLockWait(ctx context.Context, tx *sql.Tx) error {
	return s.exec(ctx, tx, s.text.LimitLockWait, s.claim.setting, s.idle)
}

// sealState is the SQLSTATE that the seal raises.
const sealState = "OMI01"

// PostgreSQL never ends a transaction on its own, and refuses everything after an error.
// Only the seal reports an attempt to commit.
func (s *postgres) EndedBy(_ context.Context, _ *sql.Tx, _ string, err error) error {
	if sqlerr.State(err) == sealState {
		return fmt.Errorf("%w: %w", oncemill.ErrTxOwned, err)
	}
	return nil
}

func (s *postgres) ConnectionLost(ctx context.Context, tx *sql.Tx) bool {
	return sqlerr.Connection(s.exec(context.WithoutCancel(ctx), tx, s.text.Ping))
}

// Writers is 0: any number of transactions write at the same time.
func (s *postgres) Writers() int { return 0 }
