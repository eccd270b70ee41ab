package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

// sets are the migrations of all tables.
var sets = []oncemill.Migrations{outbox.Migrations, audit.Migrations, steer.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations, idempotency.Migrations, idempotency.QuotaMigrations}

func newMigrate(opts *options) *cobra.Command {
	migrate := &cobra.Command{
		Use:   "migrate",
		Short: "Create or upgrade the tables; idempotent, and safe to run concurrently",
		Example: `  oncemill migrate --database postgres://app@localhost/shop
  oncemill migrate status --database sqlite:shop.db --json
  oncemill migrate sql --database postgres://app@localhost/shop > oncemill.sql`,
		Args: wrongUse(noCommand),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return acting(opts, cmd, opts.database.create, answering, func(to reached) error {
				if err := oncemill.Migrate(cmd.Context(), to.db, to.cfg, sets...); err != nil {
					return err
				}
				return printStatus(cmd.Context(), cmd, to.db, to.cfg, false)
			})
		},
	}
	var asJSON bool
	status := &cobra.Command{
		Use:   "status",
		Short: "Show the version of each set of tables; exit code 1 unless this program can work with them",
		Args:  wrongUse(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.reading(cmd, func(ctx context.Context, db *sql.DB, cfg oncemill.Config) error {
				if err := printStatus(ctx, cmd, db, cfg, asJSON); err != nil {
					return err
				}
				return oncemill.CheckMigrated(ctx, db, cfg, sets...)
			})
		},
	}
	status.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	migrate.AddCommand(status, newMigrateSQL(opts), newMigrateDown(opts))
	return migrate
}

func printStatus(ctx context.Context, cmd *cobra.Command, db *sql.DB, cfg oncemill.Config, asJSON bool) error {
	list, err := oncemill.MigrationStatus(ctx, db, cfg, sets...)
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

// reached is a database that has answered.
type reached struct {
	db  *sql.DB
	cfg oncemill.Config
}

// answering returns a database once it answers.
func answering(ctx context.Context, db *sql.DB, cfg oncemill.Config) (reached, error) {
	return reached{db, cfg}, db.PingContext(ctx)
}

func newMigrateDown(opts *options) *cobra.Command {
	var name string
	var yes bool
	var down oncemill.DownOptions
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Undo the last step of one set of tables",
		Long: `Undo the last step of one set of tables, to return to an older program. Stop all
processes that use the tables first. A step that drops tables with rows is refused
without --lose-rows. Columns that a step drops lose their contents.`,
		Example: `  oncemill migrate down --set outbox --yes`,
		Args:    wrongUse(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			i := slices.IndexFunc(sets, func(m oncemill.Migrations) bool { return m.Name == name })
			if i < 0 {
				return &usageError{fmt.Errorf("--set %q: must be one of %s", name, setNames())}
			}
			return acting(opts, cmd, opts.database.with, answering, func(to reached) error {
				if !yes {
					status, err := within(cmd.Context(), opts.readTimeout, func(ctx context.Context) ([]oncemill.Status, error) {
						return oncemill.MigrationStatus(ctx, to.db, to.cfg, sets[i])
					})
					if err != nil {
						return err
					}
					return &usageError{fmt.Errorf("this would undo version %d of %s; add --yes to do it", status[0].Version, name)}
				}
				after, err := oncemill.MigrateDown(cmd.Context(), to.db, to.cfg, sets[i], down)
				var lost *oncemill.DataLossError
				if errors.As(err, &lost) {
					return fmt.Errorf("%w; add --lose-rows to drop them", err)
				}
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s now has version %d\n", after.Set, after.Version)
				return err
			})
		},
	}
	cmd.Flags().StringVar(&name, "set", "", "the set: "+setNames()+" (required)")
	cmd.Flags().BoolVar(&yes, "yes", false, "confirm")
	cmd.Flags().BoolVar(&down.LoseRows, "lose-rows", false, "drop tables with the rows in them")
	return cmd
}

func setNames() string {
	names := make([]string, len(sets))
	for i, m := range sets {
		names[i] = m.Name
	}
	return strings.Join(names, ", ")
}

func newRepairSequence(opts *options) *cobra.Command {
	return &cobra.Command{
		Use:   "repair-sequence",
		Short: "Set the outbox's id sequence above every id in use; locks out writers",
		Long: `After logical replication or a partial restore, the sequence of ids can be below
ids that are in use. A relay then refuses to publish. This command locks out
writers of the outbox for a moment and sets the sequence.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return acting(opts, cmd, opts.database.with, func(ctx context.Context, db *sql.DB, cfg oncemill.Config) (*outbox.Outbox, error) {
				if err := oncemill.CheckMigrated(ctx, db, cfg, outbox.Migrations, relay.Migrations, dlq.Migrations); err != nil {
					return nil, err
				}
				return outbox.New(db, outbox.Config{Database: cfg})
			}, func(box *outbox.Outbox) error {
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
