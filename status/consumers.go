package status

import (
	"context"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/inboxstore"
)

// Consumer is what the inbox has of a consumer.
type Consumer struct {
	Name string

	// Handled are the ids of handled messages. The oldest is as old as the retention, once the
	// consumer has run for that long; an older one means that nobody purges.
	Handled        Count
	Oldest, Newest Age // of the ids

	Failing Count // messages that have failed and were not handled yet
	Refused int64 // messages refused for their signature or encoding, since the beginning
}

// Handled is what the inbox knows of a message and a consumer.
type Handled struct {
	Consumer string
	At       time.Time

	// Dead means that the consumer gave the message up at that time, and did not handle it.
	Dead bool `json:",omitempty"`
}

// mostConsumers is how many consumers are looked at. More are strange: a consumer is a part of a
// program.
const mostConsumers = 1000

// Consumers returns the consumers that have ids or failure records, at most 1000, in the order of
// their names. Each count ends at Config.Limit.
func (r *Reader) Consumers(ctx context.Context) ([]Consumer, error) {
	all := []Consumer{}
	err := r.eachConsumer(ctx, func(ctx context.Context, name string, store inboxstore.Store) error {
		c, err := bounded.Do(ctx, r.calls, partLimit, func(ctx context.Context) (inboxstore.ConsumerCount, error) {
			return store.CountConsumer(ctx, r.most)
		})
		all = append(all, Consumer{
			Name: name, Handled: r.count(c.Handled), Oldest: Age(c.Oldest), Newest: Age(c.Newest), Failing: r.count(c.Failing), Refused: c.Refused,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// HandledBy returns which consumers of this database have handled a message, or given it up.
func (r *Reader) HandledBy(ctx context.Context, messageID string) ([]Handled, error) {
	type answer struct {
		at          time.Time
		dead, found bool
	}
	all := []Handled{}
	err := r.eachConsumer(ctx, func(ctx context.Context, name string, store inboxstore.Store) error {
		a, err := bounded.Do(ctx, r.calls, partLimit, func(ctx context.Context) (a answer, err error) {
			a.at, a.dead, a.found, err = store.HandledAt(ctx, messageID)
			return a, err
		})
		if a.found {
			all = append(all, Handled{Consumer: name, At: a.at, Dead: a.dead})
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// eachConsumer calls f for each consumer, if the inbox has tables.
func (r *Reader) eachConsumer(ctx context.Context, f func(context.Context, string, inboxstore.Store) error) error {
	names, err := bounded.Do(ctx, r.calls, partLimit, func(ctx context.Context) (names []string, err error) {
		err = r.part(ctx, inbox.Migrations, func(ctx context.Context) (err error) {
			names, err = openInbox(r, "").Consumers(ctx)
			return err
		})
		return names, err
	})
	if err != nil {
		return fmt.Errorf("status: read consumers: %w", err)
	}
	for _, name := range names[:min(len(names), mostConsumers)] {
		if err := f(ctx, name, openInbox(r, name)); err != nil {
			return fmt.Errorf("status: read consumer %s: %w", quoted(name), err)
		}
	}
	return nil
}

func openInbox(r *Reader, consumer string) inboxstore.Store {
	stored := inboxstore.Config{Consumer: consumer}.Resolve(r.where.Dialect, func(string, string, string) {}) // defaults are good
	return inboxstore.Open(r.db, r.where, stored)
}
