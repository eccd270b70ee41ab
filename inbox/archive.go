package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/inboxstore"
)

// ArchivedID is the id of a message that is past its retention.
type ArchivedID struct {
	Consumer   string    `json:"consumer"`
	MessageID  string    `json:"message_id"`
	ReceivedAt time.Time `json:"received_at"` // when it was claimed, by the clock of the database
}

// archive takes old ids of one consumer.
type archive func(ctx context.Context, old []inboxstore.OldID) error

// archive returns what Config.Archive makes of ids; nil: nothing is archived.
func (in *Inbox) archive() archive { return archiveOf(in.cfg.Consumer, in.archiving, in.cfg.Archive) }

const (
	// archiveLimit is how long an archive may take for a batch: others are purged after it.
	archiveLimit = time.Minute
	// archiveAbandoned is how many calls of an archive that have not returned are usual; see
	// [bounded.New].
	archiveAbandoned = 2
)

func archiveOf(consumer string, calls *bounded.Calls, to func(ctx context.Context, ids []ArchivedID) error) archive {
	if to == nil {
		return nil
	}
	return func(ctx context.Context, old []inboxstore.OldID) error {
		ids := make([]ArchivedID, len(old))
		for i, id := range old {
			ids[i] = ArchivedID{Consumer: consumer, MessageID: id.MessageID, ReceivedAt: id.ReceivedAt}
		}
		err := bounded.Call(ctx, calls, archiveLimit, func(ctx context.Context) error { return to(ctx, ids) })
		if err != nil {
			return fmt.Errorf("archive ids: %w", err)
		}
		return nil
	}
}

// archiveBatch archives one batch of ids and then removes it.
func archiveBatch(ctx context.Context, calls *bounded.Calls, store inboxstore.Store, retention time.Duration, archive archive) (removed removal, err error) {
	old, err := bounded.Do(ctx, calls, callLimit, func(ctx context.Context) ([]inboxstore.OldID, error) {
		return store.OldIDs(ctx, retention, purgeBatch)
	})
	if err != nil {
		return removal{}, err
	}
	var failed error
	removed.found = int64(len(old))
	if len(old) > 0 {
		failed = archive(ctx, old)
	}
	if len(old) > 0 && failed == nil {
		removed.ids, err = bounded.Do(ctx, calls, callLimit, func(ctx context.Context) (int64, error) { return store.DeleteIDs(ctx, retention, old) })
		if err != nil {
			return removal{}, err
		}
	}
	removed.failures, err = bounded.Do(ctx, calls, callLimit, func(ctx context.Context) (int64, error) {
		return store.PurgeFailures(ctx, retention, purgeBatch)
	})
	return removed, errors.Join(failed, err)
}
