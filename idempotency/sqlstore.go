package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/keystore"
	"github.com/oncemill/oncemill/internal/usagestore"
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
	db    *sql.DB
	where database.Database
	keys  keystore.Store
	usage *usagestore.Store
	calls *bounded.Calls // of the database

	archiving *bounded.Calls // of an archive
}

// Limits on the store's database calls. While a server is silent, a driver may not return
// although its context has ended; requests are answered without it.
const (
	// storeLimit bounds one call of the store, if its context allows as much. It includes
	// the wait for a connection, or on SQLite for the turn to write.
	storeLimit = 30 * time.Second

	// stepLimit bounds the statements before and after a handler, and a batch of a purge.
	stepLimit = 10 * time.Second

	// mostAbandoned is how many calls that have not returned may exist. Each holds a
	// connection.
	mostAbandoned = 64

	// claimTries is how often a key is claimed again after the record that prevented it was
	// deleted.
	claimTries = 5
)

// NewSQLStore returns a store on db. It does no I/O; oncemill.Migrate with [Migrations]
// creates the tables. Bad values of cfg are reported at once, each as an
// [*oncemill.ConfigError]. The caller keeps ownership of db.
func NewSQLStore(db *sql.DB, cfg StoreConfig) (*SQLStore, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "idempotency.NewSQLStore db", Value: "nil", Problem: "a database is needed"}
	}
	where, err := database.Resolve(db, cfg.Database)
	if err != nil {
		return nil, err
	}
	calls := bounded.Over(db, mostAbandoned)
	return &SQLStore{db: db, where: where, keys: keystore.Open(db, where, calls, cfg.Prepare), usage: usagestore.Open(db, where), calls: calls, archiving: bounded.New(archiveAbandoned)}, nil
}

// Claim implements [Store.Claim]. On SQLite it reads first, so that a duplicate does not
// wait for the writer. On PostgreSQL it always takes one round trip.
func (s *SQLStore) Claim(ctx context.Context, claim Claim) (Record, bool, error) {
	record, found, err := s.one(ctx, func(ctx context.Context) (record keystore.Record, found bool, err error) {
		for range claimTries {
			record, found, err = s.keys.Claim(ctx, claim.asKey())
			if err != nil || found {
				return record, found, err
			}
		}
		return record, false, errors.New("gave up after 5 tries: the record keeps changing")
	})
	if err != nil {
		return Record{}, false, fmt.Errorf("claim key: %w", err)
	}
	return record, found && grants(record, claim), nil
}

// grants reports whether a record was made by the claim.
func grants(r Record, c Claim) bool {
	return r.State == StateStarted && r.Owner == Owner{Token: c.Token, Fence: 1}
}

// claimAll makes claims of different, sorted keys that need not be durable, where the
// database supports it. Claims that are not found must be repeated.
func (s *SQLStore) claimAll(ctx context.Context, claims []Claim) (records []Record, found []bool, err error) {
	asked := make([]keystore.Claim, len(claims))
	for i := range claims {
		asked[i] = claims[i].asKey()
	}
	type answer struct {
		records []keystore.Record
		found   []bool
	}
	a, err := within(ctx, s, func(ctx context.Context) (a answer, err error) {
		a.records, a.found, err = s.keys.ClaimAll(ctx, asked)
		return a, err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("claim keys: %w", err)
	}
	records = make([]Record, len(a.records))
	for i := range a.records {
		records[i] = recordOf(a.records[i])
	}
	return records, a.found, nil
}

// TakeOver implements [Store.TakeOver].
func (s *SQLStore) TakeOver(ctx context.Context, c Claim, from Owner) (Record, bool, error) {
	record, found, err := s.one(ctx, func(ctx context.Context) (keystore.Record, bool, error) {
		return s.keys.TakeOver(ctx, c.asKey(), keystore.Owner(from))
	})
	if err != nil {
		return Record{}, false, fmt.Errorf("take key over: %w", err)
	}
	return record, found && record.Owner == Owner{Token: c.Token, Fence: from.Fence + 1}, nil
}

// Find implements [Store.Find].
func (s *SQLStore) Find(ctx context.Context, id ID) (Record, bool, error) {
	record, found, err := s.one(ctx, func(ctx context.Context) (keystore.Record, bool, error) {
		return s.keys.Find(ctx, keystore.ID(id))
	})
	if err != nil {
		return Record{}, false, fmt.Errorf("find key: %w", err)
	}
	return record, found, nil
}

// Outstanding implements [Store.Outstanding].
func (s *SQLStore) Outstanding(ctx context.Context, caller Caller, limit int) (int, error) {
	n, err := within(ctx, s, func(ctx context.Context) (int, error) { return s.keys.Outstanding(ctx, caller, limit) })
	if err != nil {
		return 0, fmt.Errorf("count outstanding keys: %w", err)
	}
	return n, nil
}

// Extend implements [Store.Extend].
func (s *SQLStore) Extend(ctx context.Context, id ID, owner Owner, lease time.Duration) error {
	return s.change(ctx, "extend lease", func(ctx context.Context) (bool, error) {
		return s.keys.Extend(ctx, keystore.ID(id), keystore.Owner(owner), lease)
	})
}

// Release implements [Store.Release].
func (s *SQLStore) Release(ctx context.Context, id ID, owner Owner) error {
	return s.change(ctx, "release key", func(ctx context.Context) (bool, error) {
		return s.keys.Release(ctx, keystore.ID(id), keystore.Owner(owner))
	})
}

// Complete implements [Store.Complete].
func (s *SQLStore) Complete(ctx context.Context, id ID, owner Owner, c Completion) error {
	return s.change(ctx, "complete key", func(ctx context.Context) (bool, error) {
		return s.keys.Complete(ctx, keystore.ID(id), keystore.Owner(owner), c.asKey())
	})
}

// Purge implements [Store.Purge].
func (s *SQLStore) Purge(ctx context.Context, limit int) (int, error) {
	return bounded.Do(ctx, s.calls, stepLimit, func(ctx context.Context) (int, error) { return s.keys.Purge(ctx, limit) })
}

// AddUsage implements [QuotaStore].
func (s *SQLStore) AddUsage(ctx context.Context, caller Caller, window time.Duration, keys, bytes int64) (Usage, error) {
	sum, err := within(ctx, s, func(ctx context.Context) (usagestore.Usage, error) {
		return s.usage.Add(ctx, caller, window, keys, bytes)
	})
	if err != nil {
		return Usage{}, fmt.Errorf("count usage: %w", err)
	}
	return Usage(sum), nil
}

// PurgeUsage deletes up to limit counts of windows that have ended, and returns how many.
// Engines with a Quota do so in Run.
func (s *SQLStore) PurgeUsage(ctx context.Context, limit int) (int, error) {
	n, err := bounded.Do(ctx, s.calls, stepLimit, func(ctx context.Context) (int, error) { return s.usage.Purge(ctx, limit) })
	if err != nil {
		return 0, fmt.Errorf("purge usage: %w", err)
	}
	return n, nil
}

// within runs a call of the store. do must return everything through its result.
func within[T any](ctx context.Context, s *SQLStore, do func(ctx context.Context) (T, error)) (T, error) {
	return bounded.Do(ctx, s.calls, storeLimit, do)
}

// one asks for one record.
func (s *SQLStore) one(ctx context.Context, do func(context.Context) (keystore.Record, bool, error)) (Record, bool, error) {
	type answer struct {
		record keystore.Record
		found  bool
	}
	a, err := within(ctx, s, func(ctx context.Context) (a answer, err error) {
		a.record, a.found, err = do(ctx)
		return a, err
	})
	if err != nil || !a.found {
		return Record{}, false, err
	}
	return recordOf(a.record), true, nil
}

// change is a change of a claim by its owner.
func (s *SQLStore) change(ctx context.Context, what string, do func(context.Context) (owned bool, err error)) error {
	owned, err := within(ctx, s, do)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", what, err)
	case !owned:
		return ErrStaleOwner
	}
	return nil
}

func (c *Claim) asKey() keystore.Claim {
	return keystore.Claim{
		ID: keystore.ID(c.ID), Caller: c.Caller, Fingerprint: c.Fingerprint, Token: c.Token, Endpoint: c.Endpoint,
		Lease: c.Lease, Retention: c.Retention, Durable: c.Durable, CorrelationID: c.CorrelationID, TraceID: c.TraceID,
	}
}

func (c *Completion) asKey() keystore.Completion {
	return keystore.Completion{
		State: keystore.State(c.State), Status: c.Status, Response: c.Response, Large: c.Large,
		Retention: c.Retention, Refuse: c.Refuse, Location: c.Location, ResourceID: c.ResourceID,
	}
}

func recordOf(r keystore.Record) Record {
	return Record{
		ID: ID(r.ID), Caller: r.Caller, Fingerprint: r.Fingerprint, State: State(r.State), Owner: Owner(r.Owner),
		Endpoint: r.Endpoint, Status: r.Status, Response: r.Response, Location: r.Location, ResourceID: r.ResourceID,
		CorrelationID: r.CorrelationID, TraceID: r.TraceID, LeaseLeft: r.LeaseLeft, ExpiresIn: r.ExpiresIn,
		CreatedAt: r.CreatedAt, CompletedAt: r.CompletedAt,
	}
}

// Migrations creates the tables idempotency and idempotency_body, the seal, and on
// PostgreSQL the functions that requests call.
var Migrations = oncemill.Migrations{Name: "idempotency", FS: keystore.Migrations}

// QuotaMigrations creates the table idempotency_usage, which Config.Keys.Quota needs.
var QuotaMigrations = oncemill.Migrations{Name: "idempotency_usage", FS: usagestore.Migrations}
