package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/sleep"
)

type purge struct {
	db      *sql.DB
	cfg     oncemill.Config
	inbox   time.Duration // 0: ids stay
	letters time.Duration // 0: dead letters stay
	audit   time.Duration // 0: its entries stay
	archive archiveDir    // empty: what is deleted is not kept
	calls   *bounded.Calls
	out     io.Writer
}

const (
	// purgeLimit bounds a step.
	purgeLimit = 10 * time.Second

	// purgeAbandoned is how many steps that have not returned may exist. Each holds a
	// connection.
	purgeAbandoned = 8

	// purgeBatch is how many keys one transaction deletes at most.
	purgeBatch = 1000
)

func newPurge(opts *options) *cobra.Command {
	var every time.Duration
	var p purge
	cmd := &cobra.Command{
		Use:   "purge",
		Short: "Delete what has expired: idempotency keys, and on request ids of inboxes, closed dead letters and old entries of the audit",
		Long: `Delete what has expired, once or with --every until it is stopped. Services that call
Run of their inboxes and engines, and relays, do this themselves; use the command where
nothing does.

Idempotency keys are stored with their expiry. For the rest, say how long it is needed;
without a flag it stays:

  --inbox-retention   the ids of every consumer, at least the longest
                      inbox.Config.Retention. A message whose id is gone takes effect
                      again if it comes again.
  --letter-retention  replayed and discarded dead letters. A relay deletes them; set this
                      only where no relay runs on the database.
  --audit-retention   the entries of oncemill audit. Nothing else deletes them.

With --archive-dir, idempotency keys (without their responses) and ids of inboxes are first
appended to files there, as lines of JSON: idempotency-keys-2006-01-02.jsonl and
inbox-ids-2006-01-02.jsonl, by the day (UTC) on which they are deleted. The file is synced
before anything is deleted; after a crash or a failure, lines may be there twice, or cut short.
Services on the database must not delete them by themselves: set
idempotency.Config.Expiry.ArchivedElsewhere, and do not call Run of inboxes without
Config.Archive.

A step that has no answer from the database within ten seconds fails. With --every the
failure is logged, and the next round tries again.`,
		Example: `  oncemill purge
  oncemill purge --inbox-retention 168h --every 1m
  oncemill purge --inbox-retention 168h --archive-dir /var/lib/oncemill/archive`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case every != 0 && every < time.Second:
				return &usageError{fmt.Errorf("--every %s: must be at least 1s, or 0 for once", every)}
			case p.inbox != 0 && p.inbox < time.Hour:
				return &usageError{fmt.Errorf("--inbox-retention %s: must be at least 1h, or 0 to keep all ids", p.inbox)}
			case p.letters != 0 && p.letters < time.Hour:
				return &usageError{fmt.Errorf("--letter-retention %s: must be at least 1h, or 0 to keep all dead letters", p.letters)}
			case p.audit != 0 && p.audit < 24*time.Hour:
				return &usageError{fmt.Errorf("--audit-retention %s: must be at least 24h, or 0 to keep all entries", p.audit)}
			}
			if err := noneEmpty(cmd, "archive-dir"); err != nil {
				return err
			}
			if err := p.archive.check(); err != nil {
				return err
			}
			log, err := opts.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return opts.database.with(func(db *sql.DB, cfg oncemill.Config) error {
				p.db, p.cfg, p.calls, p.out = db, cfg, bounded.New(purgeAbandoned), cmd.OutOrStdout()
				for {
					err := p.once(cmd.Context())
					switch {
					case every == 0:
						return err
					case err != nil && cmd.Context().Err() == nil:
						log.WarnContext(cmd.Context(), "purge failed, trying again", "error", err)
					}
					if !sleep.For(cmd.Context(), every) {
						return nil
					}
				}
			})
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&every, "every", 0, "purge again and again, with this pause, until stopped; 0 purges once")
	flags.DurationVar(&p.inbox, "inbox-retention", 0, "how long ids of inboxes are kept, at least the longest inbox.Config.Retention; at least 1h, 0 keeps all")
	flags.DurationVar(&p.letters, "letter-retention", 0, "how long replayed and discarded dead letters are kept, where no relay deletes them; at least 1h, 0 keeps all")
	flags.StringVar((*string)(&p.archive), "archive-dir", "", "existing directory where idempotency keys and ids of inboxes are kept as lines of JSON before they are deleted")
	flags.DurationVar(&p.audit, "audit-retention", 0, "how long entries of the audit are kept; at least 24h, 0 keeps all")
	return cmd
}

// once purges every part whose tables exist.
func (p *purge) once(ctx context.Context) error {
	var errs []error
	for _, part := range []struct {
		name string
		set  oncemill.Migrations
		do   func(context.Context) error
	}{
		{"idempotency keys", idempotency.Migrations, p.keys},
		{"counts of quotas", idempotency.QuotaMigrations, p.usage},
		{"ids of inboxes", inbox.Migrations, p.ids},
		{"dead letters", dlq.Migrations, p.deadLetters},
		{"audit", audit.Migrations, p.entries},
	} {
		status, err := bounded.Do(ctx, p.calls, purgeLimit, func(ctx context.Context) ([]oncemill.Status, error) {
			return oncemill.MigrationStatus(ctx, p.db, p.cfg, part.set)
		})
		if err == nil && status[0].Version > 0 {
			err = part.do(ctx)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", part.name, err))
		}
		if errors.Is(err, bounded.ErrAbandoned) {
			break // the server is silent
		}
	}
	return errors.Join(errs...)
}

func (p *purge) keys(ctx context.Context) error {
	store, err := idempotency.NewSQLStore(p.db, idempotency.StoreConfig{Database: p.cfg})
	if err != nil {
		return err
	}
	remove := store.Purge // both bound themselves
	if p.archive != "" {
		remove = func(ctx context.Context, limit int) (int, error) {
			return store.PurgeArchived(ctx, limit, func(ctx context.Context, keys []idempotency.ArchivedKey) error {
				return write(ctx, p.archive, "idempotency-keys", keys)
			})
		}
	}
	total := 0
	for {
		n, err := remove(ctx, purgeBatch)
		total += n
		if err != nil || n == 0 {
			p.say(total, "idempotency keys and responses")
			return err
		}
	}
}

func (p *purge) usage(ctx context.Context) error {
	store, err := idempotency.NewSQLStore(p.db, idempotency.StoreConfig{Database: p.cfg})
	if err != nil {
		return err
	}
	for {
		if n, err := store.PurgeUsage(ctx, purgeBatch); err != nil || n == 0 { // bounds itself
			return err
		}
	}
}

func (p *purge) ids(ctx context.Context) error {
	if p.inbox == 0 {
		return nil
	}
	var archive func(context.Context, []inbox.ArchivedID) error
	if p.archive != "" {
		archive = func(ctx context.Context, ids []inbox.ArchivedID) error {
			return write(ctx, p.archive, "inbox-ids", ids)
		}
	}
	all, err := inbox.PurgeAllArchived(ctx, p.db, p.cfg, p.inbox, archive) // bounds itself
	for _, of := range all {
		p.say(int(of.IDs+of.Failures), "ids and failure records of "+oneLine(of.Consumer))
	}
	return err
}

func (p *purge) deadLetters(ctx context.Context) error {
	if p.letters == 0 {
		return nil
	}
	letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg, Retention: p.letters})
	if err != nil {
		return err
	}
	return p.repeat(ctx, letters.Purge, "closed dead letters")
}

func (p *purge) entries(ctx context.Context) error {
	if p.audit == 0 {
		return nil
	}
	log, err := audit.New(p.db, audit.Config{Database: p.cfg, Retention: p.audit})
	if err != nil {
		return err
	}
	return p.repeat(ctx, log.Purge, "entries of the audit")
}

// repeat calls a purge until it ends within the limit.
func (p *purge) repeat(ctx context.Context, do func(context.Context) (int64, error), what string) error {
	total := int64(0)
	for {
		n, err := bounded.Do(ctx, p.calls, purgeLimit, do)
		total += n
		if err == nil || n == 0 { // after some, there was no time for the rest
			p.say(int(total), what)
			return err
		}
	}
}

func (p *purge) say(n int, what string) {
	if n > 0 {
		fmt.Fprintf(p.out, "%d %s deleted\n", n, what)
	}
}
