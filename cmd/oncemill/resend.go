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

// resendBatch is how many messages one transaction of a resend writes, unless more were
// confirmed at the same time.
const (
	resendBatch = 1000
	resendMost  = 10_000 // limit of outbox.History.Resend
)

// newResend returns "history resend", which is also "resend".
func newResend(opts *options) *cobra.Command {
	var from, to string
	var filter outbox.HistoryFilter
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "resend",
		Short: "Send delivered messages again, from the history",
		Long: `Send messages again that the broker confirmed in a time window, as far as the
history is kept. They keep their ids, so consumers with an inbox drop those that
they have handled. Messages of a key stay in order among themselves. All consumers
of a topic get them. Use it after a failover that lost commits of consumers, or for
a broker that lost its queues.

The command writes the messages to the outbox, a thousand in a transaction, and
relays deliver them. If it fails, the error states the times to continue with. Times
are those of the database's clock.`,
		Example: `  oncemill history resend --from 2026-03-01T10:00:00Z --to 2026-03-01T10:15:00Z --dry-run
  oncemill history resend --from 30m --topic orders`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := noneEmpty(cmd, "topic", "key"); err != nil {
				return err
			}
			if _, _, err := window(from, to, time.Now()); err != nil {
				return err
			}
			open := func(ctx context.Context, db *sql.DB, cfg oncemill.Config) (*resend, error) {
				if err := oncemill.CheckMigrated(ctx, db, cfg, outbox.Migrations); err != nil {
					return nil, err
				}
				box, err := outbox.New(db, outbox.Config{Database: cfg})
				if err != nil {
					return nil, err
				}
				now, err := box.History().Now(ctx)
				if err != nil {
					return nil, err
				}
				if filter.From, filter.To, err = window(from, to, now); err != nil {
					return nil, err
				}
				if filter.To.After(now) {
					return nil, &usageError{fmt.Errorf("--to %s is in the future, by the database's clock (%s): what is sent again would be sent once more", to, now.UTC().Format(time.RFC3339))}
				}
				return &resend{history: box.History(), progress: cmd.ErrOrStderr(), limit: opts.readTimeout}, nil
			}
			if dryRun {
				return opts.reading(cmd, func(ctx context.Context, db *sql.DB, cfg oncemill.Config) error {
					r, err := open(ctx, db, cfg)
					if err != nil {
						return err
					}
					return r.run(ctx, cmd.OutOrStdout(), filter, true)
				})
			}
			return acting(opts, cmd, opts.database.with, open, func(r *resend) error { return r.run(cmd.Context(), cmd.OutOrStdout(), filter, false) })
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&from, "from", "", "start of the window: a time such as 2006-01-02T15:04:05Z, or how long ago, such as 30m (required)")
	flags.StringVar(&to, "to", "0s", "end of the window, in the same forms")
	flags.StringVar(&filter.Topic, "topic", "", "only this topic")
	flags.StringVar(&filter.Key, "key", "", "only this ordering key")
	flags.BoolVar(&dryRun, "dry-run", false, "only count the messages")
	return cmd
}

// window reads the window's bounds.
func window(from, to string, now time.Time) (start, end time.Time, err error) {
	start, fromErr := timeOf("from", from, now)
	end, toErr := timeOf("to", to, now)
	if err := errors.Join(fromErr, toErr); err != nil {
		return start, end, &usageError{err}
	}
	if !start.Before(end) {
		return start, end, &usageError{errors.New("--to must be after --from")}
	}
	return start, end, nil
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
		return at, errors.New("--" + flag + " " + strconv.Quote(text) + ": must be a time such as 2006-01-02T15:04:05Z, or a duration such as 30m")
	}
	return at, nil
}

// resend sends a window of the history again, from start to end.
type resend struct {
	history  *outbox.History
	progress io.Writer
	limit    time.Duration // of a count; 0: none
	total    int
	sent     int
	done     time.Time // everything confirmed before was sent
}

func (r *resend) run(ctx context.Context, out io.Writer, f outbox.HistoryFilter, dryRun bool) (err error) {
	if r.total, err = r.count(ctx, f); err != nil {
		return err
	}
	if dryRun {
		_, err := fmt.Fprintf(out, "%d messages would be sent again\n", r.total)
		return err
	}
	if r.total == 0 {
		return errors.New("nothing was sent again: the history has no such message; oncemill history list shows what it has")
	}
	r.done = f.From
	if err := r.window(ctx, f, r.total); err != nil {
		return fmt.Errorf("%d of %d messages were sent again; continue with --from %s --to %s: %w", r.sent, r.total, r.done.UTC().Format(time.RFC3339Nano), f.To.UTC().Format(time.RFC3339Nano), err)
	}
	_, err = fmt.Fprintf(out, "%d messages were sent again\n", r.sent)
	return err
}

// count counts the messages of a window, within the limit.
func (r *resend) count(ctx context.Context, f outbox.HistoryFilter) (int, error) {
	return within(ctx, r.limit, func(ctx context.Context) (int, error) { return r.history.Count(ctx, f) })
}

// window sends n messages, the earlier half of the window first. Messages of a key are
// confirmed in order, so this keeps their order.
func (r *resend) window(ctx context.Context, f outbox.HistoryFilter, n int) error {
	middle := f.From.Add(f.To.Sub(f.From) / 2).Truncate(time.Microsecond) // the precision of stored times
	divisible := middle.After(f.From)
	switch {
	case n > resendBatch && divisible:
		return r.halves(ctx, f, middle)
	case n > resendMost:
		return fmt.Errorf("%d messages were confirmed at the same time, but at most %d can be sent at once; narrow them down with --topic or --key", n, resendMost)
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
		n, err := r.count(ctx, half)
		if err != nil {
			return err
		}
		if err := r.window(ctx, half, n); err != nil {
			return err
		}
	}
	return nil
}
