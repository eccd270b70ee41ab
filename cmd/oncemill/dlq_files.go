package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/dlq"
)

func newExport(opts *options) *cobra.Command {
	var filter filterFlags
	var output string
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Write whole dead letters as lines of JSON",
		Long: `Write dead letters with their messages, edits and notes, each as a line of JSON, the
oldest first; without --state in all states. The format is documented with dlq.Line.

Payloads are in base64. An export holds whatever the messages hold: keep it as safe as the
database. --output creates a file that only its owner can read, and replaces none.`,
		Example: `  oncemill dlq export --consumer stock --output stock.jsonl
  oncemill dlq export --since 24h | jq -r .message_id`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if err := noneEmpty(cmd, filterNames...); err != nil {
				return err
			}
			if _, err := filter.resolve(time.Now()); err != nil {
				return err
			}
			return opts.withLetters(cmd, func(letters *dlq.Store) (err error) {
				from, err := within(cmd.Context(), opts.readTimeout, func(ctx context.Context) (dlq.Filter, error) { return filter.at(ctx, letters) })
				if err != nil {
					return err
				}
				to := cmd.OutOrStdout()
				if output != "" {
					file, err := os.OpenFile(output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the operator names it
					if err != nil {
						return &usageError{fmt.Errorf("--output: %w", err)}
					}
					n, err := letters.Export(cmd.Context(), file, from)
					return exported(cmd, n, errors.Join(err, file.Close()))
				}
				n, err := letters.Export(cmd.Context(), to, from)
				return exported(cmd, n, err)
			})
		},
	}
	filter.register(cmd, nil)
	cmd.Flags().IntVar(&filter.Limit, "limit", 0, "maximum number of dead letters; 0 for all")
	cmd.Flags().StringVar(&output, "output", "", "file to create (default: standard output)")
	return cmd
}

// exported reports how much was exported, on standard error.
func exported(cmd *cobra.Command, n int, err error) error {
	if err != nil {
		return fmt.Errorf("%d dead letters were exported, and the rest was not: %w", n, err)
	}
	_, err = fmt.Fprintf(cmd.ErrOrStderr(), "%d dead letters exported\n", n)
	return err
}

func newImport(opts *options) *cobra.Command {
	var act dlq.Act
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Add the dead letters of an export; - is standard input, a reason is required",
		Long: `Add the dead letters of an export. Those that are there already are left alone, so a file
can be imported again, after an error or an interruption. Open dead letters become dead.
An open one of a relay belongs to its outbox, and is imported nowhere else.

A line that is wrong is reported with its number, and the others are imported; then the
exit code is 1.`,
		Example: `  oncemill dlq import stock.jsonl --reason "moved to the new database"`,
		Args: wrongUse(func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("give one file that oncemill dlq export has written; - is standard input")
			}
			return nil
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := reasonGiven(cmd, act); err != nil {
				return err
			}
			from, done, err := openInput(cmd.Context(), cmd.InOrStdin(), args[0])
			if err != nil {
				return err
			}
			defer done()
			return opts.withLetters(cmd, func(letters *dlq.Store) error {
				done, err := letters.Import(cmd.Context(), from, act)
				fmt.Fprintf(cmd.OutOrStdout(), "%d dead letters imported, %d were there, %d lines with errors\n", done.Added, done.Existing, done.Failed)
				if err == nil && done == (dlq.Imported{}) {
					err = errors.New("the file has no dead letters")
				}
				return err
			})
		},
	}
	actFlags(cmd, &act, "why (required)")
	return cmd
}

// openInput opens a file, or standard input if its name is -. When ctx ends, reading ends,
// too, even if nothing comes: the goroutine that waits for it ends with the process.
func openInput(ctx context.Context, stdin io.Reader, name string) (from io.Reader, done func(), err error) {
	closeFile := func() {}
	if name != "-" {
		file, err := os.Open(name) //nolint:gosec // the operator names it
		if err != nil {
			return nil, nil, &usageError{err}
		}
		stdin, closeFile = file, func() { _ = file.Close() } // nothing was written
	}
	out, in := io.Pipe()
	go func() {
		_, err := io.Copy(in, stdin)
		in.CloseWithError(err)
	}()
	stop := context.AfterFunc(ctx, func() { in.CloseWithError(context.Cause(ctx)) })
	return out, func() { stop(); _ = out.Close(); closeFile() }, nil
}
