package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
)

func newMigrateSQL(opts *options) *cobra.Command {
	var all bool
	var dialect string
	var from []string
	cmd := &cobra.Command{
		Use:   "sql",
		Short: "Print what migrate would do as a script, to review and run with psql or sqlite3",
		Long: `Print what migrate would do as a script of SQL, to review and run with psql or sqlite3 (3.42 or
newer) as the role that is to own the tables. The script is one transaction and records the
versions: afterwards migrate finds nothing to do. It fails, and changes nothing, on a database
with other versions than it was made for.

By default the versions are read from --database, and the steps that are due are printed. With
--all the script is for a database without these tables, with --from for one with the versions
that migrate status shows: nothing is connected to, and --dialect may take the place of
--database.`,
		Example: `  oncemill migrate sql --database postgres://app@localhost/shop > oncemill.sql
  oncemill migrate sql --all --dialect postgresql --schema shop > oncemill.sql
  oncemill migrate sql --from outbox=4,dlq=5 --dialect sqlite
  psql -X -f oncemill.sql postgres://shop_owner@localhost/shop`,
		Args: wrongUse(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case all && len(from) > 0:
				return &usageError{errors.New("give --all or --from, not both")}
			case dialect != "" && !all && len(from) == 0:
				return &usageError{errors.New("--dialect needs --all or --from; without them the database is asked")}
			case !all && len(from) == 0:
				return opts.reading(cmd, func(ctx context.Context, db *sql.DB, cfg oncemill.Config) error {
					have, err := oncemill.MigrationStatus(ctx, db, cfg, sets...)
					if err != nil {
						return err
					}
					return printScript(cmd.OutOrStdout(), cfg, have)
				})
			}
			have, err := versionsOf(from)
			if err != nil {
				return &usageError{err}
			}
			cfg := oncemill.Config{Schema: opts.database.schema, Prefix: opts.database.prefix}
			if cfg.Dialect, err = dialectOf(dialect, opts.database.url); err != nil {
				return &usageError{err}
			}
			return printScript(cmd.OutOrStdout(), cfg, have)
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&all, "all", false, "print all steps, for a database without these tables; does not connect")
	flags.StringSliceVar(&from, "from", nil, "print the steps from these versions, as SET=VERSION; a set that is not named has none; may be repeated; does not connect. Sets: "+setNames())
	flags.StringVar(&dialect, "dialect", "", "with --all or --from: postgresql or sqlite (default: that of --database)")
	return cmd
}

func printScript(w io.Writer, cfg oncemill.Config, from []oncemill.Status) error {
	script, err := oncemill.MigrationSQL(cfg, from, sets...)
	var bad *oncemill.ConfigError
	switch {
	case errors.As(err, &bad):
		return &usageError{err}
	case err != nil:
		return err
	case script == "":
		script = "-- nothing to do: the tables have the versions of this program\n"
	}
	_, err = io.WriteString(w, script)
	return err
}

// versionsOf reads --from.
func versionsOf(from []string) (have []oncemill.Status, err error) {
	for _, text := range from {
		name, number, _ := strings.Cut(text, "=")
		version, err := strconv.Atoi(number)
		switch {
		case err != nil || version < 0:
			return nil, fmt.Errorf("--from %q: must be the name of a set, = and a version", text)
		case !slices.ContainsFunc(sets, func(m oncemill.Migrations) bool { return m.Name == name }):
			return nil, fmt.Errorf("--from %q: the set must be one of %s", text, setNames())
		case slices.ContainsFunc(have, func(s oncemill.Status) bool { return s.Set == name }):
			return nil, fmt.Errorf("--from %q: the set is named twice", text)
		}
		have = append(have, oncemill.Status{Set: name, Version: version, Oldest: version})
	}
	return have, nil
}

// dialectOf returns the dialect that --dialect names, or else that of the URL.
func dialectOf(name, url string) (oncemill.Dialect, error) {
	scheme, _, _ := strings.Cut(url, ":")
	for _, of := range []struct {
		dialect oncemill.Dialect
		names   []string
	}{
		{oncemill.PostgreSQL, []string{"postgresql", "postgres"}},
		{oncemill.SQLite, []string{"sqlite"}},
	} {
		if slices.Contains(of.names, name) || name == "" && slices.Contains(of.names, scheme) {
			return of.dialect, nil
		}
	}
	if name != "" {
		return 0, fmt.Errorf("--dialect %q: must be postgresql or sqlite", name)
	}
	return 0, errors.New("give --dialect postgresql or sqlite, or --database")
}
