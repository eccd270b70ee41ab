package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
)

// resendBatch is how many messages one transaction of a resend writes, unless more of
// them were confirmed at the same time.
const (
	resendBatch = 1000
	resendMost  = 10_000 // what outbox.History takes at once
)

func newResend(opts *options) *cobra.Command {
	var from, to string
	var filter outbox.HistoryFilter
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "resend",
		Short: "Send delivered messages again, from the history",
		Long: `Send the messages again that a broker confirmed in a window of time, as far as the
history is kept. They keep their message ids: consumers with an inbox drop those
that they have handled. The order of a key is kept among the messages that are sent
again. Use it after a failover that has lost commits of consumers, or for a broker
that has lost its queues. All consumers of a topic get them.

The messages are written to the outbox, a thousand to a transaction; relays deliver
them. If it fails, the error names the time to continue from.`,
		Example: `  oncemill resend --from 2026-03-01T10:00:00Z --to 2026-03-01T10:15:00Z --dry-run
  oncemill resend --from 30m --topic orders`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			now := time.Now()
			var fromErr, toErr error
			filter.From, fromErr = timeOf("from", from, now)
			filter.To, toErr = timeOf("to", to, now)
			if err := errors.Join(fromErr, toErr); err != nil {
				return &usageError{err}
			}
			if !filter.From.Before(filter.To) {
				return &usageError{errors.New("--to must be after --from")}
			}
			return opts.database.with(func(db *sql.DB, cfg oncemill.Config) error {
				if err := oncemill.CheckMigrated(cmd.Context(), db, cfg, outbox.Migrations); err != nil {
					return err
				}
				box, err := outbox.New(db, outbox.Config{Database: cfg})
				if err != nil {
					return err
				}
				r := resend{history: box.History(), progress: cmd.ErrOrStderr()}
				return r.run(cmd.Context(), cmd.OutOrStdout(), filter, dryRun)
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&from, "from", "", "begin of the window: a time as 2006-01-02T15:04:05Z, or how long ago as 30m (required)")
	flags.StringVar(&to, "to", "0s", "end of the window, in the same forms")
	flags.StringVar(&filter.Topic, "topic", "", "of this topic")
	flags.StringVar(&filter.Key, "key", "", "of this ordering key")
	flags.BoolVar(&dryRun, "dry-run", false, "count the messages and send none")
	return cmd
}

// timeOf reads a time, or a duration before now.
func timeOf(flag, text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, errors.New("--" + flag + " is required")
	}
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return now.Add(-ago), nil
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return at, errors.New("--" + flag + " " + strconv.Quote(text) + ": must be a time as 2006-01-02T15:04:05Z, or a duration as 30m")
	}
	return at, nil
}

// resend sends a window of the history again, from its begin to its end.
type resend struct {
	history  *outbox.History
	progress io.Writer
	total    int
	sent     int
	done     time.Time // what was confirmed before was sent
}

func (r *resend) run(ctx context.Context, out io.Writer, f outbox.HistoryFilter, dryRun bool) (err error) {
	if r.total, err = r.history.Count(ctx, f); err != nil {
		return err
	}
	if dryRun {
		_, err := fmt.Fprintf(out, "%d messages would be sent again\n", r.total)
		return err
	}
	r.done = f.From
	if err := r.window(ctx, f, r.total); err != nil {
		return fmt.Errorf("%d of %d messages were sent again; continue with --from %s: %w", r.sent, r.total, r.done.UTC().Format(time.RFC3339Nano), err)
	}
	_, err = fmt.Fprintf(out, "%d messages were sent again\n", r.sent)
	return err
}

// window sends n messages, the earlier half of the window first. Messages of a key are
// confirmed in their order, so halves keep it.
func (r *resend) window(ctx context.Context, f outbox.HistoryFilter, n int) error {
	middle := f.From.Add(f.To.Sub(f.From) / 2).Truncate(time.Microsecond) // as times are stored
	divisible := middle.After(f.From)
	switch {
	case n > resendBatch && divisible:
		return r.halves(ctx, f, middle)
	case n > resendMost:
		return fmt.Errorf("%d messages were confirmed at the same time, at most %d can be sent at once; choose by --topic or --key", n, resendMost)
	case n > 0:
		f.Limit = resendMost
		sent, err := r.history.Resend(ctx, f)
		if err != nil {
			return err
		}
		r.sent += sent
		if _, err := fmt.Fprintf(r.progress, "%d of %d messages sent again\n", r.sent, r.total); err != nil {
			return err
		}
	}
	r.done = f.To
	return nil
}

func (r *resend) halves(ctx context.Context, f outbox.HistoryFilter, middle time.Time) error {
	first, second := f, f
	first.To, second.From = middle, middle
	for _, half := range []outbox.HistoryFilter{first, second} {
		n, err := r.history.Count(ctx, half)
		if err != nil {
			return err
		}
		if err := r.window(ctx, half, n); err != nil {
			return err
		}
	}
	return nil
}
