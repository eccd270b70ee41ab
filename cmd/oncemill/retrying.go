package main

import (
	"context"
	"database/sql"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/status"
)

func newRetrying(opts *options) *cobra.Command {
	var filter status.RetryingFilter
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "retrying",
		Short: "List messages that were refused or set aside and will be tried again",
		Long: `List messages that were refused or set aside and will be tried again, those with the
earliest next attempt first. TRIES counts the attempts that are used up; with 0 the message
was only set aside: its topic is unavailable, or nobody takes it. NEXT is the time until its
next attempt, "due" once it is over. BEHIND is how many messages of its key wait behind it in
the table parked; more may wait in the outbox. DELIVERED is "maybe" if an attempt had no answer.

Messages behind a dead letter that holds their key are not retrying; oncemill dlq --state held
lists those dead letters. Of more than 10,000 messages without a filter, some are looked at.`,
		Example: `  oncemill retrying --topic orders
  oncemill retrying --key customer-7 --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.readStatus(cmd, func(ctx context.Context, reader *status.Reader) error {
				messages, err := reader.Retrying(ctx, filter)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), messages, "")
				}
				table := newTable("NEXT", "TRIES", "TOPIC", "KEY", "MESSAGE", "AGE", "BEHIND", "DELIVERED", "ERROR")
				for _, m := range messages {
					table.row(nextTry(m), m.Attempts, m.Topic, m.Key, m.MessageID, status.Age(time.Since(m.CreatedAt)), m.Behind, maybe(m.MayHaveBeenDelivered), lastError(m))
				}
				return table.print(cmd.OutOrStdout())
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&filter.Topic, "topic", "", "only messages of this topic")
	flags.StringVar(&filter.Key, "key", "", "only the message of this ordering key")
	flags.IntVar(&filter.Limit, "limit", 100, "maximum number of messages to list, at most 1000")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// readStatus opens the database for reads of its status.
func (o *options) readStatus(cmd *cobra.Command, fn func(context.Context, *status.Reader) error) error {
	return o.reading(cmd, func(ctx context.Context, db *sql.DB, cfg oncemill.Config) error {
		reader, err := status.New(db, status.Config{Database: cfg})
		if err != nil {
			return err
		}
		return fn(ctx, reader)
	})
}

func nextTry(m status.Retrying) string {
	if m.Due <= 0 {
		return "due"
	}
	return m.Due.String()
}

func lastError(m status.Retrying) string {
	if len(m.Errors) == 0 {
		return ""
	}
	return m.Errors[len(m.Errors)-1].Error
}

func maybe(delivered bool) string {
	if delivered {
		return "maybe"
	}
	return "no"
}
