package main

import (
	"database/sql"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/doctor"
)

var errFindings = errors.New("errors were found; see above")

func newDoctor(opts *options) *cobra.Command {
	var asJSON bool
	var cfg doctor.Config
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look for settings that lose messages silently, and for tables that nobody purges",
		Long: `Look for what makes others lose messages silently: settings of the database and of its
server, missing indexes, and tables that nobody purges. Each finding has what to do.

It changes nothing and reads little. It sees what its role may see: give it a role with
pg_monitor, and once the role of your producers, whose settings may differ. It exits with
1 if there are errors; warnings alone are a success.`,
		Example: `  oncemill doctor
  oncemill doctor --json | jq .`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.database.with(func(db *sql.DB, where oncemill.Config) error {
				cfg.Database = where
				d, err := doctor.New(db, cfg)
				if err != nil {
					return &usageError{err}
				}
				findings, err := d.Check(cmd.Context())
				if err != nil {
					return err
				}
				return report(cmd.OutOrStdout(), findings, asJSON)
			})
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&asJSON, "json", false, "print a JSON array of findings")
	flags.DurationVar(&cfg.InboxRetention, "inbox-retention", 7*24*time.Hour, "how long consumers keep ids")
	flags.DurationVar(&cfg.LetterRetention, "letter-retention", 90*24*time.Hour, "how long closed dead letters are kept")
	flags.DurationVar(&cfg.Overdue, "overdue", 24*time.Hour, "how long what is past its retention may stay")
	flags.DurationVar(&cfg.SnapshotAge, "snapshot-age", 10*time.Minute, "how long a transaction may keep deleted rows")
	flags.DurationVar(&cfg.ClockOffset, "clock-offset", 2*time.Second, "how far clocks may differ")
	return cmd
}

// report prints findings, errors first, and returns an error if there is one.
func report(out io.Writer, findings []doctor.Finding, asJSON bool) error {
	slices.SortStableFunc(findings, func(a, b doctor.Finding) int { return weight(a) - weight(b) })
	if asJSON {
		if err := printJSON(out, append([]doctor.Finding{}, findings...), ""); err != nil {
			return err
		}
	} else if err := printFindings(out, findings); err != nil {
		return err
	}
	if slices.ContainsFunc(findings, func(f doctor.Finding) bool { return f.Severity == doctor.Error }) {
		return errFindings
	}
	return nil
}

func weight(f doctor.Finding) int {
	if f.Severity == doctor.Error {
		return 0
	}
	return 1
}

func printFindings(out io.Writer, findings []doctor.Finding) error {
	if len(findings) == 0 {
		_, err := fmt.Fprintln(out, "Nothing is wrong.")
		return err
	}
	for _, f := range findings {
		if _, err := fmt.Fprintf(out, "%s (%s): %s\n    %s\n", f.Severity, f.Check, wholeLine(f.Problem), wholeLine(f.Remedy)); err != nil {
			return err
		}
	}
	return nil
}

// wholeLine returns a text as one line, in which strangers can control no terminal.
func wholeLine(text string) string {
	return escaped(strings.ReplaceAll(text, "\n", " "), func(out *strings.Builder, r rune) {
		out.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
	})
}
