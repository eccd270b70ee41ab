package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/inboxstore"
)

// Purged is what [PurgeAll] has removed of a consumer.
type Purged struct {
	Consumer string
	IDs      int64
	Failures int64 // records of failed attempts
}

// PurgeAll removes the ids of all consumers that are older than retention, as [Inbox.Run] does for
// its own, for services that do not call it. Ids of dead letters stay. It returns what it has
// removed, also with an error. The command oncemill purge calls it.
//
// retention must be at least the Config.Retention of every consumer: a message whose id is gone
// takes effect again if it comes again. It is at least 1 s.
func PurgeAll(ctx context.Context, db *sql.DB, cfg oncemill.Config, retention time.Duration) ([]Purged, error) {
	where, err := database.Resolve(db, cfg)
	if retention < time.Second {
		err = errors.Join(err, &oncemill.ConfigError{Field: "inbox.PurgeAll retention", Value: retention.String(), Problem: "must be at least 1s"})
	}
	if err == nil {
		err = oncemill.CheckMigrated(ctx, db, where.Config(), Migrations)
	}
	if err != nil {
		return nil, err
	}
	open := func(consumer string) inboxstore.Store {
		stored := inboxstore.Config{Consumer: consumer}.Resolve(where.Dialect, func(string, string, string) {}) // defaults are good
		return inboxstore.Open(db, where, stored)
	}
	consumers, err := open("").Consumers(ctx)
	if err != nil {
		return nil, fmt.Errorf("inbox: list consumers: %w", err)
	}
	var all []Purged
	for _, consumer := range consumers {
		p := Purged{Consumer: consumer}
		store := open(consumer)
		for more := true; more; {
			ids, failures, err := store.Purge(ctx, retention, purgeBatch)
			p.IDs, p.Failures = p.IDs+ids, p.Failures+failures
			if err != nil {
				return append(all, p), fmt.Errorf("inbox: purge %q: %w", consumer, err)
			}
			more = ids == purgeBatch || failures >= purgeWorthwhile
		}
		all = append(all, p)
	}
	return all, nil
}
