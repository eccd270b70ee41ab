package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/internal/sleep"
)

// Purged is what [PurgeAll] has removed of a consumer.
type Purged struct {
	Consumer string
	IDs      int64
	Failures int64 // records of failed attempts
}

// PurgeAll removes the ids of all consumers that are older than retention, as [Inbox.Run] does for
// its own, for services that do not call it. Ids of dead letters stay. Like Run, it pauses between
// batches, and waits for the database at most ten seconds at a time. The command oncemill purge
// calls it.
//
// If a consumer fails, it goes on with the next, unless the server does not answer at all. It
// returns what it has removed, also with an error.
//
// retention must be at least the Config.Retention of every consumer: a message whose id is gone
// takes effect again if it comes again. It is at least 1 s.
func PurgeAll(ctx context.Context, db *sql.DB, cfg oncemill.Config, retention time.Duration) ([]Purged, error) {
	return PurgeAllArchived(ctx, db, cfg, retention, nil)
}

// PurgeAllArchived is [PurgeAll] with an archive, as in Config.Archive. An inbox that runs
// without Archive removes ids of its consumer that were not archived.
func PurgeAllArchived(ctx context.Context, db *sql.DB, cfg oncemill.Config, retention time.Duration, archive func(ctx context.Context, ids []ArchivedID) error) ([]Purged, error) {
	where, err := database.Resolve(db, cfg)
	if retention < time.Second {
		err = errors.Join(err, &oncemill.ConfigError{Field: "inbox.PurgeAll retention", Value: retention.String(), Problem: "must be at least 1s"})
	}
	if err != nil {
		return nil, err
	}
	open := func(consumer string) inboxstore.Store {
		stored := inboxstore.Config{Consumer: consumer}.Resolve(where.Dialect, func(string, string, string) {}) // defaults are good
		return inboxstore.Open(db, where, stored)
	}
	calls, archiving := bounded.New(mostAbandoned), bounded.New(archiveAbandoned)
	consumers, err := bounded.Do(ctx, calls, callLimit, func(ctx context.Context) ([]string, error) {
		if err := oncemill.CheckMigrated(ctx, db, where.Config(), Migrations); err != nil {
			return nil, err
		}
		return open("").Consumers(ctx)
	})
	if err != nil {
		return nil, fmt.Errorf("inbox: list consumers: %w", err)
	}
	var all []Purged
	var errs []error
	for _, consumer := range consumers {
		p := Purged{Consumer: consumer}
		err := p.remove(ctx, calls, open(consumer), retention, archiveOf(consumer, archiving, archive))
		all = append(all, p)
		if err != nil {
			errs = append(errs, fmt.Errorf("inbox: purge %q: %w", consumer, err))
		}
		if ctx.Err() != nil || errors.Is(err, bounded.ErrAbandoned) { // so would the others
			break
		}
	}
	return all, errors.Join(errs...)
}

// remove removes everything that is past retention, and counts it.
func (p *Purged) remove(ctx context.Context, calls *bounded.Calls, store inboxstore.Store, retention time.Duration, archive archive) error {
	for {
		removed, err := removeBatch(ctx, calls, store, retention, archive)
		p.IDs, p.Failures = p.IDs+removed.ids, p.Failures+removed.failures
		if err != nil || !removed.full() {
			return err
		}
		if !sleep.For(ctx, jitter(purgePause)) {
			return ctx.Err()
		}
	}
}
