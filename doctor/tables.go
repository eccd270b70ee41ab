package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/outbox"
)

func (e *examination) indexes(ctx context.Context) (found findings, err error) {
	missing, err := e.store.MissingIndexes(ctx, e.sets)
	if len(missing) > 0 {
		var names, create []string
		for _, i := range missing {
			names, create = append(names, i.Name), append(create, i.Create)
		}
		found.add(Error, "indexes", fmt.Sprintf("Indexes are missing, or are not valid: %s. Statements read whole tables.", strings.Join(names, ", ")),
			"Run this while little is written, since it locks out writers: "+strings.Join(create, "; ")+"; if an index exists and is not valid, run reindex index instead.")
	}
	return found, err
}

// hidden looks for tables of which purge and retention cannot judge the rows.
func (e *examination) hidden(ctx context.Context) (found findings, err error) {
	tables, err := e.store.Hidden(ctx)
	if len(tables) > 0 {
		found.add(Warning, "purge", fmt.Sprintf("Row-level security hides rows of %s from this role: it is not known whether somebody purges them.", strings.Join(tables, ", ")),
			"Run it as the owner of the tables.")
	}
	return found, err
}

// purge looks for rows that should have been removed long ago.
func (e *examination) purge(ctx context.Context) (found findings, err error) {
	if e.has(idempotency.Migrations) {
		age, err := e.store.OverdueKey(ctx)
		if err != nil {
			return nil, err
		}
		if age > e.cfg.Overdue {
			found.add(Warning, "purge", fmt.Sprintf("Nobody purges idempotency keys: the first should have been deleted %s ago.", ageText(age)),
				"Run the engine of a service (idempotency.Engine.Run), or beside the services: oncemill purge --every 1h")
		}
	}
	if e.has(inbox.Migrations) {
		consumers, err := inboxstore.Open(e.db, e.where, inboxstore.Config{}).Consumers(ctx)
		if err != nil {
			return nil, err
		}
		overdue := 0
		var oldest time.Duration
		var first string
		for _, consumer := range consumers {
			age, err := e.store.OldestID(ctx, consumer)
			if err != nil {
				return nil, err
			}
			if age > e.cfg.InboxRetention+e.cfg.Overdue {
				overdue++
				if age > oldest {
					oldest, first = age, consumer
				}
			}
		}
		if overdue > 0 {
			found.add(Warning, "purge", fmt.Sprintf("Nobody purges the ids of %d consumers: the oldest, of %s, is %s old.", overdue, quoted(first), ageText(oldest)),
				"If their retention is longer than "+ageText(e.cfg.InboxRetention)+", name it. Otherwise run their inboxes (inbox.Inbox.Run), or with the longest retention of all: oncemill purge --inbox-retention "+hours(e.cfg.InboxRetention))
		}
	}
	if e.has(dlq.Migrations) {
		age, err := e.store.OldestClosed(ctx)
		if err != nil {
			return nil, err
		}
		if age > e.cfg.LetterRetention+e.cfg.Overdue {
			found.add(Warning, "purge", fmt.Sprintf("Nobody purges dead letters: one was closed %s ago.", ageText(age)), "Relays delete them. Where none runs: oncemill purge --letter-retention "+hours(e.cfg.LetterRetention))
		}
	}
	return found, nil
}

// retention compares how long messages can be sent again with how long consumers remember them.
func (e *examination) retention(ctx context.Context) (found findings, err error) {
	if !e.has(outbox.Migrations) || !e.has(inbox.Migrations) {
		return nil, nil
	}
	age, err := e.store.OldestHistory(ctx)
	if err != nil {
		return nil, err
	}
	if age > e.cfg.InboxRetention {
		found.add(Warning, "retention", fmt.Sprintf("The history has messages that are %s old, and inboxes remember ids for %s: a message that is sent again after that is not recognized as a duplicate, and becomes a dead letter.", ageText(age), ageText(e.cfg.InboxRetention)),
			"If their retention is longer than "+ageText(e.cfg.InboxRetention)+", name it. Otherwise raise inbox.Config.Retention above outbox.Config.History, or send again only what is younger.")
	}
	return found, nil
}

// hours returns a time as a flag of the command takes it.
func hours(d time.Duration) string { return strings.TrimSuffix(d.String(), "0m0s") }

// text returns a time in units that fit it.
func ageText(d time.Duration) string {
	if d < 48*time.Hour {
		return d.Truncate(time.Minute).String()
	}
	return fmt.Sprintf("%.1f days", d.Hours()/24)
}
