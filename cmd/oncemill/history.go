package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
)

func newHistory(opts *options) *cobra.Command {
	cmd := newHistoryList(opts, "history")
	cmd.AddCommand(newHistoryList(opts, "list"), newHistoryShow(opts), newResend(opts))
	return cmd
}

// newHistoryList returns a command that lists messages: "history" and "history list".
func newHistoryList(opts *options, use string) *cobra.Command {
	var filter outbox.HistoryFilter
	var id int64
	var messageIDs []string
	var since, until, after string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   use,
		Short: "List messages that were delivered",
		Long: `List messages that the broker has confirmed, in the order of their ids, as far as the
history is kept. Contents are not read; oncemill history show prints them.

Ids and times are indexed. A search by message, key or topic alone reads the whole history:
give --since too if that is large. The next page starts behind --after with the last line's
ID and CONFIRMED.`,
		Args: wrongUse(noCommand),
		Example: `  oncemill history --since 1h --topic orders
  oncemill history list --message-id order-17 --json
  oncemill history list --after 1700,2026-03-01T10:00:00.123456Z
  oncemill history show 1700
  oncemill history resend --from 30m --topic orders --dry-run`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if filter.From, filter.To, err = span(since, until, time.Now()); err != nil {
				return err
			}
			if filter.After, err = positionOf(after); err != nil {
				return err
			}
			filter.Brief, filter.MessageIDs = true, messageIDs
			if id != 0 {
				filter.IDs = []int64{id}
			}
			return opts.readOutbox(cmd, func(ctx context.Context, box *outbox.Outbox) error {
				rows, err := box.History().List(ctx, filter)
				if err != nil {
					return err
				}
				if asJSON {
					lines := make([]historyLine, len(rows))
					for i, r := range rows {
						lines[i] = historyLine{ID: r.ID, Lane: r.Lane, Topic: r.Topic, MessageID: r.MessageID, Key: r.Key, Size: r.Size, CreatedAt: r.CreatedAt, ConfirmedAt: &r.RelayedAt}
					}
					return printJSON(cmd.OutOrStdout(), lines, "")
				}
				table := newTable("ID", "CONFIRMED", "TOPIC", "KEY", "MESSAGE", "SIZE", "WRITTEN")
				for _, r := range rows {
					table.row(r.ID, r.RelayedAt.Format(time.RFC3339Nano), r.Topic, r.Key, r.MessageID, r.Size, r.CreatedAt)
				}
				return table.print(cmd.OutOrStdout())
			})
		},
	}
	flags := cmd.Flags()
	flags.Int64Var(&id, "id", 0, "only the row with this id")
	flags.StringSliceVar(&messageIDs, "message-id", nil, "only this message; may be repeated")
	flags.StringVar(&filter.Topic, "topic", "", "only this topic")
	flags.StringVar(&filter.Key, "key", "", "only this ordering key")
	flags.StringVar(&since, "since", "", "only what was confirmed at or after a time such as 2006-01-02T15:04:05Z, or within a duration such as 30m")
	flags.StringVar(&until, "until", "", "only what was confirmed before a time, or longer ago than a duration")
	flags.StringVar(&after, "after", "", "only rows behind this one, as ID,CONFIRMED")
	flags.IntVar(&filter.Limit, "limit", 100, "maximum number of messages to list, at most 10000")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// historyLine is a message of a list, without its contents.
type historyLine struct {
	ID          int64
	Lane        int
	Topic       string
	MessageID   string
	Key         string `json:",omitempty"`
	Size        int
	CreatedAt   time.Time
	ConfirmedAt *time.Time `json:",omitempty"` // nil in the outbox
}

// positionOf reads --after.
func positionOf(text string) (at outbox.HistoryPosition, err error) {
	if text == "" {
		return at, nil
	}
	id, when, _ := strings.Cut(text, ",")
	if at.ID, err = strconv.ParseInt(id, 10, 64); err == nil {
		at.RelayedAt, err = time.Parse(time.RFC3339Nano, when)
	}
	if err != nil {
		return at, &usageError{fmt.Errorf("--after %q: must be the ID and CONFIRMED of a row, separated by a comma", text)}
	}
	return at, nil
}

func newHistoryShow(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show a delivered message with its contents and its way",
		Long: `Show a delivered message with its contents and its way: when it was written, when the broker
confirmed it, and which consumers of this database have handled it. A payload that is JSON is
indented, other text is printed as it is, and the rest in hexadecimal.`,
		Example: "  oncemill history show 1700",
		Args:    wrongUse(oneRow),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, _ := strconv.ParseInt(args[0], 10, 64) // oneRow has checked it
			var found []outbox.HistoryRow
			err := opts.readOutbox(cmd, func(ctx context.Context, box *outbox.Outbox) (err error) {
				// A server that has lost commits gives ids out again.
				found, err = box.History().List(ctx, outbox.HistoryFilter{IDs: []int64{id}, Limit: 10})
				return err
			})
			if err != nil {
				return err
			}
			if len(found) == 0 {
				return fmt.Errorf("the history has no message %d; it may still be in the outbox, retrying, dead, or past its retention", id)
			}
			for _, r := range found {
				m := shown{
					ID: r.ID, Lane: r.Lane, Topic: r.Topic, MessageID: r.MessageID, Key: r.Key, WrittenAt: r.CreatedAt, ConfirmedAt: &r.RelayedAt,
					payload: r.Payload, metadata: r.Metadata,
				}
				if err := opts.show(cmd, m, asJSON); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON; the payload is in base64")
	return cmd
}

// oneRow requires the id of a row.
func oneRow(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return errors.New("give the id of one message")
	}
	if id, err := strconv.ParseInt(args[0], 10, 64); err != nil || id < 1 {
		return fmt.Errorf("%q is not the id of a row; list with --message-id finds that of a message", args[0])
	}
	return nil
}

// readOutbox opens the database for reads of the outbox and its history.
func (o *options) readOutbox(cmd *cobra.Command, fn func(context.Context, *outbox.Outbox) error) error {
	return o.reading(cmd, func(ctx context.Context, db *sql.DB, cfg oncemill.Config) error {
		if err := oncemill.CheckMigrated(ctx, db, cfg, outbox.Migrations); err != nil {
			return err
		}
		box, err := outbox.New(db, outbox.Config{Database: cfg})
		if err != nil {
			return err
		}
		return fn(ctx, box)
	})
}
