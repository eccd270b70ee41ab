package idempotency

import (
	"context"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/keystore"
)

// ArchivedKey is the record of a key that is past its retention, without its response.
type ArchivedKey struct {
	ID            string     `json:"id"`     // hash of scope and key, in hexadecimal digits
	Caller        string     `json:"caller"` // hash of tenant and principal
	Endpoint      string     `json:"endpoint"`
	State         string     `json:"state"` // as State.String returns it; "started": the outcome was never known
	Status        int        `json:"status,omitempty"`
	Location      string     `json:"location,omitempty"`
	ResourceID    string     `json:"resource_id,omitempty"`
	CorrelationID string     `json:"correlation_id,omitempty"`
	TraceID       string     `json:"trace_id,omitempty"`
	CreatedAt     time.Time  `json:"created_at"`
	CompletedAt   *time.Time `json:"completed_at,omitempty"`
}

// Archive takes records before they are deleted.
type Archive func(ctx context.Context, keys []ArchivedKey) error

const (
	// archiveLimit is how long an archive may take for a batch.
	archiveLimit = time.Minute
	// archiveAbandoned is how many calls of an archive that have not returned are usual; see
	// [bounded.New].
	archiveAbandoned = 2
)

// PurgeArchived is Purge, but deletes only records that archive has taken: up to limit of
// them. An error or a panic of archive keeps them. After a crash it gets them again, so it
// must be idempotent. Its context ends after a minute, and then it gets them again. Location and ResourceID are as they are stored,
// encrypted if responses are.
//
// Engines delete records too: those of keys that come again after their retention, and in
// Run. Set Expiry.Archive or Expiry.ArchivedElsewhere of all engines on this store.
func (s *SQLStore) PurgeArchived(ctx context.Context, limit int, archive Archive) (int, error) {
	return s.purgeArchived(ctx, limit, archive, func(r Record) Record { return r })
}

func (s *SQLStore) purgeArchived(ctx context.Context, limit int, archive Archive, reveal func(Record) Record) (int, error) {
	expired, err := bounded.Do(ctx, s.calls, stepLimit, func(ctx context.Context) (int, error) { return s.keys.Expire(ctx, limit) })
	if err != nil {
		return 0, fmt.Errorf("expire responses: %w", err)
	}
	due, err := bounded.Do(ctx, s.calls, stepLimit, func(ctx context.Context) ([]keystore.Summary, error) { return s.keys.Due(ctx, limit) })
	if err != nil || len(due) == 0 {
		return expired, err
	}
	keys := make([]ArchivedKey, len(due))
	for i := range due {
		keys[i] = archivedKey(reveal(recordOf(due[i].Record)))
	}
	if err := bounded.Call(ctx, s.archiving, archiveLimit, func(ctx context.Context) error { return archive(ctx, keys) }); err != nil {
		return expired, fmt.Errorf("archive keys: %w", err)
	}
	deleted, err := bounded.Do(ctx, s.calls, stepLimit, func(ctx context.Context) (int, error) { return s.keys.DeleteDue(ctx, due) })
	return expired + deleted, err
}

func archivedKey(r Record) ArchivedKey {
	k := ArchivedKey{
		ID: hex.EncodeToString(r.ID[:]), Caller: hex.EncodeToString(r.Caller[:]), Endpoint: r.Endpoint, State: r.State.String(), Status: r.Status,
		Location: r.Location, ResourceID: r.ResourceID, CorrelationID: r.CorrelationID, TraceID: r.TraceID, CreatedAt: r.CreatedAt,
	}
	if !r.CompletedAt.IsZero() {
		k.CompletedAt = &r.CompletedAt
	}
	return k
}

// archives reports whether records must be archived before they are deleted.
func (c *ExpiryConfig) archives() bool { return c.Archive != nil || c.ArchivedElsewhere }

// claimBound is longer than a claim may take, so that a record that is not due this long
// before it is not deleted by it.
const claimBound = 2 * storeLimit

// keepingDue is claim, but does not let it delete the record of a key that is past its
// retention and may not have been archived. Such a key has expired.
func (s *SQLStore) keepingDue(claim func(context.Context, Claim) (Record, bool, error)) func(context.Context, Claim) (Record, bool, error) {
	return func(ctx context.Context, c Claim) (Record, bool, error) {
		due, err := within(ctx, s, func(ctx context.Context) (bool, error) { return s.keys.DueWithin(ctx, keystore.ID(c.ID), claimBound) })
		if err != nil {
			return Record{}, false, fmt.Errorf("look for an old record: %w", err)
		}
		if !due {
			return claim(ctx, c)
		}
		record, found, err := s.Find(ctx, c.ID)
		if err != nil || found {
			return record, false, err
		}
		return Record{ID: c.ID, State: StateExpired}, false, nil
	}
}
