package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/status"
)

// consumer is a line of oncemill inbox.
type consumer struct {
	status.Consumer

	// Conflicts are the open dead letters of messages whose id was known with other content;
	// nil: there are no tables of dead letters.
	Conflicts *int64
}

func newInbox(opts *options) *cobra.Command {
	cmd := newInboxList(opts, "inbox")
	cmd.AddCommand(newInboxList(opts, "list"))
	return cmd
}

// newInboxList returns a command that lists consumers: "inbox" and "inbox list".
func newInboxList(opts *options, use string) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   use,
		Short: "List what consumers have handled, and what fails",
		Long: `List what consumers have handled, and what fails, from the inbox of this database.

HANDLED is the number of ids that are kept, KEPT how long ago the oldest was handled: at most
the retention, if something purges them. FAILING are messages that have failed and were not
handled yet. CONFLICTS are open dead letters of ids that came again with other content, of the
newest 10,000. REFUSED are messages with a bad signature or encoding, since the beginning.

A number that ends with + is where counting ended. Duplicates are not written down; the metric
oncemill.inbox.duplicates counts them.`,
		Example: "  oncemill inbox\n  oncemill inbox --json",
		Args:    wrongUse(noCommand),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var all []consumer
			err := opts.readStatus(cmd, func(ctx context.Context, reader *status.Reader) error {
				consumers, err := reader.Consumers(ctx)
				for _, c := range consumers {
					all = append(all, consumer{Consumer: c})
				}
				return err
			})
			if err != nil {
				return err
			}
			conflicts, err := opts.conflicts(cmd)
			if err != nil {
				return err
			}
			for i, c := range all {
				if conflicts != nil {
					n := conflicts[c.Name]
					all[i].Conflicts = &n
				}
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), all, "")
			}
			table := newTable("CONSUMER", "HANDLED", "KEPT", "NEWEST", "FAILING", "CONFLICTS", "REFUSED")
			for _, c := range all {
				var conflicts any = "-"
				if c.Conflicts != nil {
					conflicts = *c.Conflicts
				}
				kept, newest := c.Oldest.String(), c.Newest.String()
				if c.Handled.N == 0 {
					kept, newest = "-", "-"
				}
				table.row(c.Name, c.Handled, kept, newest, c.Failing, conflicts, c.Refused)
			}
			return table.print(cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// conflicts counts the open dead letters of conflicts by consumer; nil without their tables.
func (o *options) conflicts(cmd *cobra.Command) (map[string]int64, error) {
	var counts map[string]int64
	err := o.readLetters(cmd, func(ctx context.Context, letters *dlq.Store) error {
		groups, err := letters.Groups(ctx)
		counts = map[string]int64{}
		for _, g := range groups {
			if g.Source == dlq.FromConsumer && g.Reason == string(inbox.ReasonConflict) {
				counts[g.Consumer] += g.Count
			}
		}
		return err
	})
	var schema *oncemill.SchemaError
	if errors.As(err, &schema) && schema.Have == 0 {
		return nil, nil //nolint:nilnil // there are no dead letters to count
	}
	return counts, err
}
