package inbox

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
	"github.com/oncemill/oncemill/internal/sqlerr"
)

type postgresStore struct {
	notes
	options   sql.TxOptions
	wait      string        // lock_timeout of the claim, as PostgreSQL reads it
	idle      string        // idle_in_transaction_session_timeout, if there is none
	most      time.Duration // for the claim as a whole
	claimText string
	sealText  string

	groupPatience  string // lock_timeout of a group's transaction
	groupMost      time.Duration
	claimGroupText string
}

func newPostgresStore(db *sql.DB, cfg Config) *postgresStore {
	return &postgresStore{
		notes: notes{
			db: db, consumer: cfg.Consumer,
			text: postgresNotes.complete(database.Of(cfg.Database)),
		},
		options:   sql.TxOptions{Isolation: cfg.Isolation},
		wait:      milliseconds(cfg.LockTimeout),
		idle:      milliseconds(cfg.Timeout + boundtx.CommitLimit + claimGrace),
		most:      cfg.LockTimeout + claimGrace,
		claimText: database.Of(cfg.Database).Expand(postgresClaim),
		sealText:  postgresSeal,

		groupPatience:  milliseconds(cfg.Group.LockTimeout),
		groupMost:      cfg.Group.LockTimeout + claimGrace,
		claimGroupText: database.Of(cfg.Database).Expand(postgresClaimGroup),
	}
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) + "ms" }

// claimGrace is how much longer than its lock timeout a claim may take. The table lock is
// taken before the statement sets the timeout, so this limit bounds the wait for a
// migration that holds the table.
const claimGrace = 5 * time.Second

// postgresSealState is the SQLSTATE that the seal raises.
const postgresSealState = "OMI01"

// The isolation level is explicit, since the database's default may differ.
func (s *postgresStore) begin(ctx context.Context, calls *bounded.Calls) (*boundtx.Tx, error) {
	return boundtx.Begin(ctx, s.db, oncemill.PostgreSQL, calls, &s.options)
}

// Served by the primary key (consumer, message_id).
//
// The insert waits for a transaction that holds the same id and has not ended. If that
// commits, no row is inserted; if it rolls back, the id is ours. The wait has its own
// lock_timeout, which is set before there is a row to insert (a case evaluates its
// condition first) and restored for the handler. The setting oncemill.inbox identifies the
// transaction for the seal. All of this takes one round trip. Subqueries would be easier
// to read and cost 50 us more to plan.
//
// A transaction whose client has fallen silent keeps the id, and the handler's locks, for
// no longer than a handler and a COMMIT may take, unless the session sets its own timeout:
// the connection may be dead without the server noticing.
const postgresClaim = `
insert into {{inbox}} (consumer, message_id, fingerprint)
select $1, $2, $4::bytea
where case
	when set_config('oncemill.lock_timeout', coalesce(nullif(current_setting('oncemill.lock_timeout', true), ''), current_setting('lock_timeout')), true) is not null
		and case current_setting('idle_in_transaction_session_timeout')
			when '0' then set_config('idle_in_transaction_session_timeout', $5, true) is not null
			else true
		end
	then set_config('lock_timeout', $3, true) is not null
end
on conflict (consumer, message_id) do nothing
returning
	set_config('lock_timeout', current_setting('oncemill.lock_timeout'), true),
	set_config('oncemill.inbox', 'open ' || txid_current(), true)`

func (s *postgresStore) claim(ctx context.Context, tx *sql.Tx, id messageID, fingerprint []byte) (bool, error) {
	limited, cancel := context.WithTimeout(ctx, s.most)
	defer cancel()
	result, err := tx.ExecContext(limited, s.claimText, id.consumer, id.message, s.wait, fingerprint, s.idle)
	if err != nil {
		if limited.Err() != nil && ctx.Err() == nil || heldElsewhere(err) {
			return false, fmt.Errorf("%w: %w", ErrBeingHandled, err)
		}
		return false, fmt.Errorf("claim id: %w", err)
	}
	inserted, err := result.RowsAffected()
	if err != nil {
		return false, fmt.Errorf("claim id: %w", err)
	}
	return inserted == 1, nil
}

// Served by the primary key (consumer, message_id).
//
// Like the claim of one, for an array of ids in sorted order, so that two groups with
// common ids wait for each other and do not deadlock. The lock_timeout stays in effect for
// the handlers of the group. The sub-select is evaluated once, before there is a row to
// insert.
const postgresClaimGroup = `
insert into {{inbox}} (consumer, message_id, fingerprint)
select $1, ids.id, decode(nullif(ids.fingerprint, ''), 'hex')
from unnest($2::text[], $4::text[]) as ids (id, fingerprint)
where (select set_config('lock_timeout', $3, true)) is not null
	and (select case current_setting('idle_in_transaction_session_timeout')
		when '0' then set_config('idle_in_transaction_session_timeout', $5, true) is not null
		else true
	end)
on conflict (consumer, message_id) do nothing
returning message_id, set_config('oncemill.inbox', 'open ' || txid_current(), true)`

func (s *postgresStore) claimGroup(ctx context.Context, tx *sql.Tx, sorted []*member) (map[string]bool, error) {
	limited, cancel := context.WithTimeout(ctx, s.groupMost)
	defer cancel()
	claimed, err := s.claimIDs(limited, tx, sorted)
	switch {
	case err == nil:
		return claimed, nil
	case limited.Err() != nil && ctx.Err() == nil || heldElsewhere(err):
		return nil, fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return nil, fmt.Errorf("claim ids: %w", err)
}

func (s *postgresStore) claimIDs(ctx context.Context, tx *sql.Tx, sorted []*member) (map[string]bool, error) {
	ids, fingerprints := make([]string, len(sorted)), make([]string, len(sorted))
	for i, m := range sorted {
		ids[i], fingerprints[i] = m.ID, hex.EncodeToString(m.Work.fingerprint)
	}
	rows, err := tx.QueryContext(ctx, s.claimGroupText, s.consumer, pq.Array(ids), s.groupPatience, pq.Array(fingerprints), s.idle)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // Err has told
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

func (s *postgresStore) sealGroup(ctx context.Context, tx *sql.Tx, _ map[string]bool) error {
	return expectOne(tx.ExecContext(ctx, s.sealText))
}

func heldElsewhere(err error) bool {
	switch sqlerr.State(err) {
	case "55P03", // lock_timeout: the other transaction is still running
		"40001", // it has committed, and our snapshot is older
		"40P01": // it waits for us
		return true
	}
	return false
}

// Without parameters, so that every driver needs one round trip for it. If the handler has
// ended the transaction, a new one does not have the setting.
const postgresSeal = `
select set_config('oncemill.inbox', 'sealed ' || txid_current(), true)
where current_setting('oncemill.inbox', true) = 'open ' || txid_current()`

func (s *postgresStore) seal(ctx context.Context, tx *sql.Tx, _ messageID) error {
	return expectOne(tx.ExecContext(ctx, s.sealText))
}

// PostgreSQL never ends a transaction on its own, and refuses everything after an error.
// Only the seal reports an attempt to commit.
func (s *postgresStore) lost(_ context.Context, _ *sql.Tx, _ messageID, err error) error {
	if sqlerr.State(err) == postgresSealState {
		return fmt.Errorf("%w: %w", oncemill.ErrTxOwned, err)
	}
	return nil
}
