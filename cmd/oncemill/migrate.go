package main

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// sets are all tables that oncemill has.
var sets = []oncemill.Migrations{outbox.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations, idempotency.Migrations}

func newMigrate(opts *options) *cobra.Command {
	migrate := &cobra.Command{
		Use:   "migrate",
		Short: "Make or upgrade the tables; idempotent and safe to run at once from several places",
		Example: `  oncemill migrate --database postgres://app@localhost/shop
  oncemill migrate status --database sqlite:shop.db --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.database.with(func(db *sql.DB, cfg oncemill.Config) error {
				if err := oncemill.Migrate(cmd.Context(), db, cfg, sets...); err != nil {
					return err
				}
				return printStatus(cmd, db, cfg, false)
			})
		},
	}
	var asJSON bool
	status := &cobra.Command{
		Use:   "status",
		Short: "Show the version of each set of tables; exit code 1 unless all are up to date",
		Args:  wrongUse(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.database.with(func(db *sql.DB, cfg oncemill.Config) error {
				if err := printStatus(cmd, db, cfg, asJSON); err != nil {
					return err
				}
				return oncemill.CheckMigrated(cmd.Context(), db, cfg, sets...)
			})
		},
	}
	status.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	migrate.AddCommand(status)
	return migrate
}

func printStatus(cmd *cobra.Command, db *sql.DB, cfg oncemill.Config, asJSON bool) error {
	list, err := oncemill.MigrationStatus(cmd.Context(), db, cfg, sets...)
	if err != nil {
		return err
	}
	if asJSON {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(list)
	}
	table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "TABLES\tVERSION\tLATEST")
	for _, s := range list {
		fmt.Fprintf(table, "%s\t%d\t%d\n", s.Set, s.Version, s.Latest)
	}
	return table.Flush()
}

func newRepairSequence(opts *options) *cobra.Command {
	return &cobra.Command{
		Use:   "repair-sequence",
		Short: "Set the outbox's id sequence above every id in use, with writers locked out",
		Long: `After a logical replication or a partial restore the sequence of ids can lie
below ids that are in use. A relay refuses to publish then. This command locks
writers of the outbox out for a moment and sets the sequence.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.database.with(func(db *sql.DB, cfg oncemill.Config) error {
				box, err := outbox.New(db, outbox.Config{Database: cfg})
				if err != nil {
					return err
				}
				if err := oncemill.CheckMigrated(cmd.Context(), db, cfg, outbox.Migrations, relay.Migrations, dlq.Migrations); err != nil {
					return err
				}
				last, err := relay.RepairSequence(cmd.Context(), box)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "the next id is above %d\n", last)
				return err
			})
		},
	}
}
