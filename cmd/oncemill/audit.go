package main

import (
	"context"
	"database/sql"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
)

func newAudit(opts *options) *cobra.Command {
	var filter audit.Filter
	var since, until string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "List who did what to dead letters and pauses, and why",
		Long: `List the acts of people, the newest first: replays, edits, discards, undone discards,
notes and imports of dead letters, pauses, resumptions and releases. Each was written in the transaction of its act.

BY is who they said they are, ROLE the role that was logged in to the database (PostgreSQL).
Nothing deletes entries but oncemill purge --audit-retention.`,
		Example: `  oncemill audit --since 24h
  oncemill audit --subject "dead_letter 17"
  oncemill audit --by ada --action dead_letter.discard --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if filter.Since, filter.Until, err = span(since, until, time.Now()); err != nil {
				return err
			}
			return opts.reading(cmd, func(ctx context.Context, db *sql.DB, cfg oncemill.Config) error {
				if err := oncemill.CheckMigrated(ctx, db, cfg, audit.Migrations); err != nil {
					return err
				}
				log, err := audit.New(db, audit.Config{Database: cfg})
				if err != nil {
					return err
				}
				entries, err := log.List(ctx, filter)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), entries, "")
				}
				table := newTable("TIME", "BY", "ROLE", "ACTION", "SUBJECT", "REASON", "DETAILS")
				for _, e := range entries {
					table.row(e.At, e.By, e.Role, e.Action, e.Subject, e.Reason, e.Details)
				}
				return table.print(cmd.OutOrStdout())
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&since, "since", "", "only at or after a time such as 2006-01-02T15:04:05Z, or within a duration such as 30m")
	flags.StringVar(&until, "until", "", "only before a time, or longer ago than a duration")
	flags.StringVar(&filter.By, "by", "", "only what this person did")
	flags.StringVar(&filter.Action, "action", "", "only this action, such as dead_letter.replay")
	flags.StringVar(&filter.Subject, "subject", "", `only what was done to this, such as "dead_letter 17"`)
	flags.BoolVar(&filter.OldestFirst, "oldest", false, "list the oldest first")
	flags.IntVar(&filter.Limit, "limit", 100, "maximum number of entries to list, at most 1000")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
