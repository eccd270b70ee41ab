package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/status"
)

func newOutbox(opts *options) *cobra.Command {
	cmd := newOutboxList(opts, "outbox")
	cmd.AddCommand(newOutboxList(opts, "list"), newOutboxShow(opts))
	return cmd
}

// newOutboxList returns a command that lists messages: "outbox" and "outbox list".
func newOutboxList(opts *options, use string) *cobra.Command {
	var filter outbox.WaitingFilter
	var asJSON bool
	cmd := &cobra.Command{
		Use:   use,
		Short: "List messages in the outbox, which the broker has not confirmed yet",
		Long: `List messages in the outbox, in the order of their ids: those in flight, and those before
their first attempt. Messages that were refused or set aside are listed by oncemill retrying.
Contents are not read; oncemill outbox show prints them.

It looks at the first 10,000 rows of each lane, or of that of --key (SQLite: of all), so that it
costs little on a large backlog. --after goes on from an id.`,
		Example: "  oncemill outbox --key customer-7\n  oncemill outbox list --topic orders --after 1700 --json\n  oncemill outbox show 1700",
		Args:    wrongUse(noCommand),
		RunE: func(cmd *cobra.Command, _ []string) error {
			filter.Brief = true
			return opts.readOutbox(cmd, func(ctx context.Context, box *outbox.Outbox) error {
				rows, err := box.Waiting(ctx, filter)
				if err != nil {
					return err
				}
				if asJSON {
					lines := make([]historyLine, len(rows))
					for i, r := range rows {
						lines[i] = historyLine{ID: r.ID, Lane: r.Lane, Topic: r.Topic, MessageID: r.MessageID, Key: r.Key, Size: r.Size, CreatedAt: r.CreatedAt}
					}
					return printJSON(cmd.OutOrStdout(), lines, "")
				}
				table := newTable("ID", "LANE", "TOPIC", "KEY", "MESSAGE", "SIZE", "WRITTEN", "AGE")
				for _, r := range rows {
					table.row(r.ID, r.Lane, r.Topic, r.Key, r.MessageID, r.Size, r.CreatedAt, status.Age(time.Since(r.CreatedAt)))
				}
				return table.print(cmd.OutOrStdout())
			})
		},
	}
	flags := cmd.Flags()
	flags.Int64Var(&filter.ID, "id", 0, "only the row with this id")
	flags.StringVar(&filter.MessageID, "message-id", "", "only this message")
	flags.StringVar(&filter.Topic, "topic", "", "only this topic")
	flags.StringVar(&filter.Key, "key", "", "only this ordering key")
	flags.Int64Var(&filter.After, "after", 0, "only rows behind this id")
	flags.IntVar(&filter.Limit, "limit", 100, "maximum number of messages to list, at most 10000")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newOutboxShow(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show a message in the outbox with its contents",
		Long: `Show a message in the outbox with its contents and its way so far. A payload that is JSON is
indented, other text is printed as it is, and the rest in hexadecimal.`,
		Example: "  oncemill outbox show 1700",
		Args:    wrongUse(oneRow),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, _ := strconv.ParseInt(args[0], 10, 64) // oneRow has checked it
			var found []outbox.WaitingRow
			err := opts.readOutbox(cmd, func(ctx context.Context, box *outbox.Outbox) (err error) {
				found, err = box.Waiting(ctx, outbox.WaitingFilter{ID: id, Limit: 1})
				return err
			})
			if err != nil {
				return err
			}
			if len(found) == 0 {
				return fmt.Errorf("the outbox has no message %d; it may be delivered (oncemill history show), retrying (oncemill retrying) or dead (oncemill dlq)", id)
			}
			r := found[0]
			return opts.show(cmd, shown{
				ID: r.ID, Lane: r.Lane, Topic: r.Topic, MessageID: r.MessageID, Key: r.Key, WrittenAt: r.CreatedAt, payload: r.Payload, metadata: r.Metadata,
			}, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON; the payload is in base64")
	return cmd
}
