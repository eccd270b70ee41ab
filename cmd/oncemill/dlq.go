package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/status"
)

func newDLQ(opts *options) *cobra.Command {
	letters := newList(opts, "dlq")
	letters.Aliases = []string{"letters"}
	letters.AddCommand(newList(opts, "list"), newGroups(opts), newShowLetter(opts), newReplay(opts), newEdit(opts), newDiscard(opts),
		newUndo(opts), newNote(opts), newExport(opts), newImport(opts))
	return letters
}

// The classes of dlq.Letter.Reason.
var (
	relayReasons    = []string{"refused", "unroutable", "unanswered", "malformed", "crashed", "failed"}
	consumerReasons = []string{
		string(inbox.ReasonFailed), string(inbox.ReasonPermanent), string(inbox.ReasonUnavailable),
		string(inbox.ReasonCrashed), string(inbox.ReasonMalformed), string(inbox.ReasonNoMessageID),
		string(inbox.ReasonConflict), string(inbox.ReasonUnverified), string(inbox.ReasonTooOld),
	}
)

func reasons() string {
	return "relays: " + strings.Join(relayReasons, ", ") + "; consumers: " + strings.Join(consumerReasons, ", ")
}

// newList returns a command that lists dead letters: "dlq" and "dlq list".
func newList(opts *options, use string) *cobra.Command {
	var filter filterFlags
	var limit int
	var asJSON bool
	list := &cobra.Command{
		Use:   use,
		Short: "List dead letters: messages that could not be delivered or handled",
		Long: `List dead letters, the newest first; without --state the open ones.

Replay delivers messages again: a relay's message in its place among those of its
key, a consumer's message to that consumer alone. Discard gives messages up, with a
reason; undo takes that back. A running worker does either within a second or two: the
relay that owns the message, or the consumer's inbox, if that has Config.Replays;
oncemill status reports what nobody has done within a minute. A replayed message that
fails again becomes a new dead letter, which the old one names. oncemill audit shows who
did what.

FROM is "relay", or the name of a consumer. TRIES counts the attempts of a relay, or the
failed deliveries of a consumer. DELIVERED is "maybe" if the broker may already have a
relay's message.`,
		Example: `  oncemill dlq --topic orders
  oncemill dlq show 17
  oncemill dlq show 17 | jq -r .Payload | base64 -d
  oncemill dlq replay 17 18 --reason "queue created"
  oncemill dlq edit 17 --payload order.json --reason "wrong currency"
  oncemill dlq discard 19 --reason "test order"
  oncemill dlq undo 19 --reason "was not one"`,
		Args: wrongUse(noCommand),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := filter.resolve(time.Now()); err != nil {
				return err
			}
			return opts.readLetters(cmd, func(ctx context.Context, letters *dlq.Store) error {
				from, err := filter.at(ctx, letters)
				if err != nil {
					return err
				}
				from.Limit = limit
				page, err := letters.List(ctx, from)
				if err != nil {
					return err
				}
				if err := printLetters(cmd.OutOrStdout(), page, asJSON); err != nil || len(page) == 0 {
					return err
				}
				from.After, from.Limit = page[len(page)-1].Cursor(), 1
				if page, err = letters.List(ctx, from); err != nil || len(page) == 0 {
					return err
				}
				out := cmd.OutOrStdout()
				if asJSON {
					out = cmd.ErrOrStderr() // the list is the whole output
				}
				_, err = fmt.Fprintln(out, "There are more: raise --limit, or select by --topic, --consumer, --since or --until")
				return err
			})
		},
	}
	open := []string{string(dlq.StateDead), string(dlq.StateHeld), string(dlq.StateReplaying), string(dlq.StateDiscarding)}
	filter.register(list, open)
	list.Flags().IntVar(&limit, "limit", 100, "maximum number of dead letters to list, at most 1000")
	list.Flags().BoolVar(&filter.OldestFirst, "oldest", false, "list the oldest first")
	list.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return list
}

// filterFlags are the flags that select dead letters.
type filterFlags struct {
	dlq.Filter
	states       []string
	since, until string
}

func (f *filterFlags) register(cmd *cobra.Command, states []string) {
	flags := cmd.Flags()
	flags.StringSliceVar(&f.states, "state", states, "only these states: dead, held, replaying, discarding, replayed, discarded")
	flags.StringVar(&f.Topic, "topic", "", "only dead letters of this topic")
	flags.StringVar(&f.Key, "key", "", "only dead letters of this ordering key")
	flags.StringVar(&f.Fingerprint, "fingerprint", "", "only dead letters of this group; oncemill dlq groups shows them")
	flags.StringVar(&f.MessageID, "message-id", "", "only dead letters of this message")
	flags.StringVar(&f.Consumer, "consumer", "", "only dead letters of this consumer")
	flags.StringVar((*string)(&f.Source), "source", "", "only dead letters of this source: relay or consumer")
	flags.StringVar(&f.Reason, "reason-class", "", "only dead letters with this reason; "+reasons())
	flags.StringVar(&f.since, "since", "", "only what died at or after a time such as 2006-01-02T15:04:05Z, or within a duration such as 30m")
	flags.StringVar(&f.until, "until", "", "only what died before a time, or longer ago than a duration")
}

// at returns the filter that the flags describe, by the database's clock, as dead letters have
// their times from it.
func (f *filterFlags) at(ctx context.Context, letters *dlq.Store) (filter dlq.Filter, err error) {
	var now time.Time
	if f.since != "" || f.until != "" {
		if now, err = letters.Now(ctx); err != nil {
			return filter, err
		}
	}
	return f.resolve(now)
}

// resolve returns the filter that the flags describe. It refuses wrong ones.
func (f *filterFlags) resolve(now time.Time) (filter dlq.Filter, err error) {
	filter = f.Filter
	if filter.Reason != "" && !slices.Contains(slices.Concat(relayReasons, consumerReasons), filter.Reason) {
		return filter, &usageError{fmt.Errorf("--reason-class %q: must be one of %s", filter.Reason, reasons())}
	}
	if filter.Source != "" && filter.Source != dlq.FromRelay && filter.Source != dlq.FromConsumer {
		return filter, &usageError{fmt.Errorf("--source %q: must be relay or consumer", filter.Source)}
	}
	for _, s := range f.states {
		filter.States = append(filter.States, dlq.State(strings.TrimSpace(s)))
	}
	filter.From, filter.Until, err = span(f.since, f.until, now)
	return filter, err
}

// span reads --since and --until, both optional.
func span(since, until string, now time.Time) (from, to time.Time, err error) {
	for _, bound := range []struct {
		flag, text string
		into       *time.Time
	}{{"since", since, &from}, {"until", until, &to}} {
		if bound.text == "" {
			continue
		}
		if *bound.into, err = timeOf(bound.flag, bound.text, now); err != nil {
			return from, to, &usageError{err}
		}
	}
	return from, to, nil
}

// readLetters is withLetters for what only reads, with a time limit.
func (o *options) readLetters(cmd *cobra.Command, fn func(context.Context, *dlq.Store) error) error {
	return o.reading(cmd, func(ctx context.Context, db *sql.DB, cfg oncemill.Config) error {
		letters, err := openLetters(ctx, db, cfg)
		if err != nil {
			return err
		}
		return fn(ctx, letters)
	})
}

// withLetters opens the database and its dead letters.
func (o *options) withLetters(cmd *cobra.Command, fn func(*dlq.Store) error) error {
	return acting(o, cmd, o.database.with, openLetters, fn)
}

func openLetters(ctx context.Context, db *sql.DB, cfg oncemill.Config) (*dlq.Store, error) {
	if err := oncemill.CheckMigrated(ctx, db, cfg, audit.Migrations, dlq.Migrations); err != nil {
		return nil, err
	}
	return dlq.New(db, dlq.Config{Database: cfg})
}

func printLetters(w io.Writer, page []*dlq.Letter, asJSON bool) error {
	if asJSON {
		return printJSON(w, page, "")
	}
	table := newTable("ID", "STATE", "DIED", "FROM", "TOPIC", "KEY", "MESSAGE", "TRIES", "DELIVERED", "REASON", "ERROR")
	for _, l := range page {
		delivered := "no"
		switch {
		case l.MayHaveBeenDelivered:
			delivered = "maybe"
		case l.Source == dlq.FromConsumer:
			delivered = "-" // it came from the broker
		}
		table.row(l.ID, l.State, l.DiedAt, origin(l.Source, l.Consumer), l.Topic, l.Key, l.MessageID, l.Tries, delivered, l.Reason, l.Error)
	}
	return table.print(w)
}

// origin is who wrote a dead letter: "relay", or the name of a consumer.
func origin(source dlq.Source, consumer string) string {
	if consumer != "" {
		return consumer
	}
	return string(source)
}

func newGroups(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "groups",
		Short: "List groups of open dead letters that failed alike, the largest first",
		Long: `List groups of open dead letters that failed alike: of one source or consumer, with the
same reason, and with errors that differ only in ids and numbers. FIRST and LAST are the
ages of the oldest and the newest one; TOPIC and ERROR are those of the newest. The newest 10,000 dead letters in each state are looked at.`,
		Example: `  oncemill dlq groups
  oncemill dlq --fingerprint 5b1c...`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.readLetters(cmd, func(ctx context.Context, letters *dlq.Store) error {
				groups, err := letters.Groups(ctx)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), groups, "")
				}
				table := newTable("COUNT", "FROM", "REASON", "FIRST", "LAST", "NEWEST", "TOPIC", "FINGERPRINT", "ERROR")
				for _, g := range groups {
					table.row(g.Count, origin(g.Source, g.Consumer), g.Reason, status.Age(time.Since(g.First)), status.Age(time.Since(g.Last)), g.Newest, g.Topic, g.Fingerprint, g.Error)
				}
				return table.print(cmd.OutOrStdout())
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newShowLetter(opts *options) *cobra.Command {
	return &cobra.Command{
		Use:   "show ID",
		Short: "Show a dead letter with its message, attempts, edit and notes, as JSON; payloads are in base64",
		Args:  wrongUse(oneLetter),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := letterIDs(args)
			if err != nil {
				return err
			}
			return opts.readLetters(cmd, func(ctx context.Context, letters *dlq.Store) error {
				letter, err := letters.Get(ctx, ids[0])
				if err != nil {
					return err
				}
				notes, err := letters.Notes(ctx, ids[0])
				if err != nil {
					return err
				}
				return printJSON(cmd.OutOrStdout(), struct {
					*dlq.Letter
					Notes []dlq.Note
				}{letter, notes}, "  ")
			})
		},
	}
}
