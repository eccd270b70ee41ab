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
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/sleep"
)

type purge struct {
	db      *sql.DB
	cfg     oncemill.Config
	inbox   time.Duration // 0: ids stay
	letters time.Duration
	out     io.Writer
}

func newPurge(opts *options) *cobra.Command {
	var every time.Duration
	var p purge
	cmd := &cobra.Command{
		Use:   "purge",
		Short: "Delete what has expired: idempotency keys, ids of inboxes, closed dead letters",
		Long: `Delete what has expired, once or with --every until it is stopped. Services that call
Run of their inboxes and engines, and relays, do this themselves; use the command where
nothing does.

Idempotency keys have their expiry with them. Ids of inboxes do not: name with
--inbox-retention how long the ids of every consumer are needed, at least the longest
inbox.Config.Retention. A message whose id is gone takes effect again if it comes again.
Without the flag they stay.`,
		Example: `  oncemill purge
  oncemill purge --inbox-retention 168h --every 1m`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case every != 0 && every < time.Second:
				return &usageError{fmt.Errorf("--every %s: must be at least 1s, or 0 for once", every)}
			case p.inbox != 0 && p.inbox < time.Minute:
				return &usageError{fmt.Errorf("--inbox-retention %s: must be at least 1m, or 0 to keep all ids", p.inbox)}
			case p.letters < time.Hour:
				return &usageError{fmt.Errorf("--letter-retention %s: must be at least 1h", p.letters)}
			}
			log, err := opts.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return opts.database.with(func(db *sql.DB, cfg oncemill.Config) error {
				p.db, p.cfg, p.out = db, cfg, cmd.OutOrStdout()
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
	flags.DurationVar(&p.inbox, "inbox-retention", 0, "how long ids of inboxes are kept, at least the longest inbox.Config.Retention; 0 keeps all")
	flags.DurationVar(&p.letters, "letter-retention", 30*24*time.Hour, "how long replayed and discarded dead letters are kept")
	return cmd
}

// once purges every part whose tables exist.
func (p *purge) once(ctx context.Context) error {
	var errs []error
	for _, part := range []struct {
		set oncemill.Migrations
		do  func(context.Context) error
	}{{idempotency.Migrations, p.keys}, {inbox.Migrations, p.ids}, {dlq.Migrations, p.deadLetters}} {
		status, err := oncemill.MigrationStatus(ctx, p.db, p.cfg, part.set)
		if err == nil && status[0].Version > 0 {
			err = part.do(ctx)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// purgeBatch is how many keys one transaction deletes at most.
const purgeBatch = 1000

func (p *purge) keys(ctx context.Context) error {
	store, err := idempotency.NewSQLStore(p.db, idempotency.StoreConfig{Database: p.cfg})
	if err != nil {
		return err
	}
	total := 0
	for {
		n, err := store.Purge(ctx, purgeBatch)
		total += n
		if err != nil || n == 0 {
			p.say(total, "idempotency keys and responses")
			return err
		}
	}
}

func (p *purge) ids(ctx context.Context) error {
	if p.inbox == 0 {
		return nil
	}
	all, err := inbox.PurgeAll(ctx, p.db, p.cfg, p.inbox)
	for _, of := range all {
		p.say(int(of.IDs+of.Failures), "ids and failure records of "+oneLine(of.Consumer))
	}
	return err
}

func (p *purge) deadLetters(ctx context.Context) error {
	letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg, Retention: p.letters})
	if err != nil {
		return err
	}
	n, err := letters.Purge(ctx)
	p.say(int(n), "closed dead letters")
	return err
}

func (p *purge) say(n int, what string) {
	if n > 0 {
		fmt.Fprintf(p.out, "%d %s deleted\n", n, what)
	}
}
