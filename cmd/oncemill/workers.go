package main

import (
	"cmp"
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/status"
)

func newWorkers(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "workers",
		Short: "List the relays that work, or have worked within the last hour",
		Long: `List the relays that work, or have worked within the last hour. VERSION is that of the
library. BEAT is the time since the last heartbeat, "-" for a library that does not write it.
A worker that is at rest has one within a third of its lease. LANES is how many lanes it owns.`,
		Example: "  oncemill workers\n  oncemill workers --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.readStatus(cmd, func(ctx context.Context, reader *status.Reader) error {
				s, err := reader.Read(ctx)
				if err != nil {
					return err
				}
				if s.Relay == nil {
					return errors.New("the tables of the relay cannot be read; oncemill status reports why")
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), s.Relay.Workers, "")
				}
				table := newTable("NAME", "ID", "HOST", "VERSION", "UP", "BEAT", "LANES", "STATE", "PROBLEM")
				for _, w := range s.Relay.Workers {
					beat := "-"
					if w.Beat > 0 {
						beat = w.Beat.String()
					}
					table.row(w.Name, w.ID[:min(6, len(w.ID))], cmp.Or(w.Host, "-"), cmp.Or(w.Version, "-"), w.Up, beat, w.Lanes, workerState(w), w.Problem)
				}
				return table.print(cmd.OutOrStdout())
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
