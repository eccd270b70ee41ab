package main

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf16"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

func newLetters(opts *options) *cobra.Command {
	letters := newList(opts, "letters")
	letters.AddCommand(newList(opts, "list"), newGroups(opts), newShowLetter(opts), newReplay(opts), newDiscard(opts))
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

// newList returns a command that lists dead letters: "letters" and "letters list".
func newList(opts *options, use string) *cobra.Command {
	var filter dlq.Filter
	var states []string
	var asJSON bool
	list := &cobra.Command{
		Use:   use,
		Short: "List dead letters: messages that could not be delivered or handled",
		Long: `List dead letters, the newest first; without --state the open ones.

Replay delivers messages again: a relay's message in its place among those of its
key, a consumer's message to that consumer alone. Discard gives messages up, with a
reason. A running worker does either within a second or two: the relay that owns the
message, or the consumer's inbox, if that has Config.Replays. A replayed message that
fails again becomes a new dead letter.

FROM is "relay", or the name of a consumer. TRIES counts the attempts of a relay, or the
failed deliveries of a consumer. DELIVERED is "maybe" if the broker may already have a
relay's message.`,
		Example: `  oncemill letters --topic orders
  oncemill letters show 17
  oncemill letters show 17 | jq -r .Payload | base64 -d
  oncemill letters replay 17 18 --reason "queue created"
  oncemill letters discard 19 --reason "test order"`,
		Args: wrongUse(noCommand),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if filter.Reason != "" && !slices.Contains(slices.Concat(relayReasons, consumerReasons), filter.Reason) {
				return &usageError{fmt.Errorf("--reason-class %q: must be one of %s", filter.Reason, reasons())}
			}
			return opts.withLetters(cmd, func(letters *dlq.Store) error {
				for _, s := range states {
					filter.States = append(filter.States, dlq.State(strings.TrimSpace(s)))
				}
				page, err := letters.List(cmd.Context(), filter)
				if err != nil {
					return err
				}
				return printLetters(cmd.OutOrStdout(), page, asJSON)
			})
		},
	}
	flags := list.Flags()
	flags.StringSliceVar(&states, "state", []string{string(dlq.StateDead), string(dlq.StateHeld), string(dlq.StateReplaying), string(dlq.StateDiscarding)},
		"states to list: dead, held, replaying, discarding, replayed, discarded")
	flags.StringVar(&filter.Topic, "topic", "", "only dead letters of this topic")
	flags.StringVar(&filter.Key, "key", "", "only dead letters of this ordering key")
	flags.StringVar(&filter.Fingerprint, "fingerprint", "", "only dead letters of this group; oncemill letters groups shows them")
	flags.StringVar(&filter.MessageID, "message-id", "", "only dead letters of this message")
	flags.StringVar(&filter.Consumer, "consumer", "", "only dead letters of this consumer")
	flags.StringVar(&filter.Reason, "reason-class", "", "only dead letters with this reason; "+reasons())
	flags.IntVar(&filter.Limit, "limit", 100, "maximum number of dead letters to list, at most 1000")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return list
}

// withLetters opens the database and its dead letters.
func (o *options) withLetters(cmd *cobra.Command, fn func(*dlq.Store) error) error {
	return o.database.with(func(db *sql.DB, cfg oncemill.Config) error {
		if err := oncemill.CheckMigrated(cmd.Context(), db, cfg, audit.Migrations, dlq.Migrations); err != nil {
			return err
		}
		letters, err := dlq.New(db, dlq.Config{Database: cfg})
		if err != nil {
			return err
		}
		return fn(letters)
	})
}

func printLetters(w io.Writer, page []*dlq.Letter, asJSON bool) error {
	if asJSON {
		if page == nil {
			page = []*dlq.Letter{}
		}
		return printJSON(w, page, "")
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "ID\tSTATE\tDIED\tFROM\tTOPIC\tKEY\tMESSAGE\tTRIES\tDELIVERED\tREASON\tERROR")
	for _, l := range page {
		from := string(l.Source)
		if l.Consumer != "" {
			from = l.Consumer
		}
		delivered := "no"
		switch {
		case l.MayHaveBeenDelivered:
			delivered = "maybe"
		case l.Source == dlq.FromConsumer:
			delivered = "-" // it came from the broker
		}
		fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", l.ID, oneLine(string(l.State)), l.DiedAt.UTC().Format(time.RFC3339), oneLine(from),
			oneLine(l.Topic), oneLine(l.Key), oneLine(l.MessageID), l.Tries, delivered, oneLine(l.Reason), oneLine(l.Error))
	}
	return table.Flush()
}

// printJSON prints JSON that is safe for terminals. JSON itself escapes only ASCII's
// control characters.
func printJSON(w io.Writer, v any, indent string) error {
	var encoded strings.Builder
	encoder := json.NewEncoder(&encoded)
	encoder.SetIndent("", indent)
	if err := encoder.Encode(v); err != nil {
		return err
	}
	_, err := io.WriteString(w, escaped(encoded.String(), func(out *strings.Builder, r rune) {
		for _, unit := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(out, `\u%04x`, unit)
		}
	}))
	return err
}

// escaped returns text with every character that a terminal may act on, except newlines,
// replaced by escape.
func escaped(text string, escape func(out *strings.Builder, r rune)) string {
	var out strings.Builder
	for _, r := range text {
		if r == '\n' || unicode.IsGraphic(r) {
			out.WriteRune(r)
		} else {
			escape(&out, r)
		}
	}
	return out.String()
}

// oneLine makes text from untrusted senders safe for a table and a terminal.
func oneLine(s string) string {
	quoted := strconv.QuoteToGraphic(s)
	quoted = strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
	const most = 80
	if runes := []rune(quoted); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return quoted
}

func newGroups(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "groups",
		Short: "List groups of open dead letters that failed alike, the largest first",
		Long: `List groups of open dead letters that failed alike: of one source or consumer, with the
same reason, and with errors that differ only in ids and numbers. TOPIC and ERROR are those
of the newest one. The newest 10,000 dead letters in each state are looked at.`,
		Example: `  oncemill letters groups
  oncemill letters --fingerprint 5b1c...`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.withLetters(cmd, func(letters *dlq.Store) error {
				groups, err := letters.Groups(cmd.Context())
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), groups, "")
				}
				table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
				fmt.Fprintln(table, "COUNT\tFROM\tREASON\tFIRST\tLAST\tNEWEST\tTOPIC\tFINGERPRINT\tERROR")
				for _, g := range groups {
					from := string(g.Source)
					if g.Consumer != "" {
						from = g.Consumer
					}
					fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", g.Count, oneLine(from), oneLine(g.Reason),
						g.First.Format(time.RFC3339), g.Last.Format(time.RFC3339), g.Newest, oneLine(g.Topic), oneLine(g.Fingerprint), oneLine(g.Error))
				}
				return table.Flush()
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newShowLetter(opts *options) *cobra.Command {
	return &cobra.Command{
		Use:   "show ID",
		Short: "Show a dead letter with its message and its attempts, as JSON; the payload is in base64",
		Args:  wrongUse(oneLetter),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := letterIDs(args)
			if err != nil {
				return err
			}
			return opts.withLetters(cmd, func(letters *dlq.Store) error {
				letter, err := letters.Get(cmd.Context(), ids[0])
				if err != nil {
					return err
				}
				return printJSON(cmd.OutOrStdout(), letter, "  ")
			})
		},
	}
}

func newReplay(opts *options) *cobra.Command {
	var act dlq.Act
	cmd := &cobra.Command{
		Use:   "replay ID...",
		Short: "Deliver the messages of dead letters again",
		Args:  wrongUse(someLetters),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := letterIDs(args)
			if err != nil {
				return err
			}
			return opts.withLetters(cmd, func(letters *dlq.Store) error {
				accepted, err := letters.Replay(cmd.Context(), ids, act)
				fmt.Fprintf(cmd.OutOrStdout(), "%d of %d will be replayed\n", len(accepted), len(ids))
				return err
			})
		},
	}
	actFlags(cmd, &act, "why, for the record")
	return cmd
}

func newDiscard(opts *options) *cobra.Command {
	var act dlq.Act
	cmd := &cobra.Command{
		Use:   "discard ID...",
		Short: "Discard dead letters for good; a reason is required",
		Args:  wrongUse(someLetters),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := letterIDs(args)
			if err != nil {
				return err
			}
			if strings.TrimSpace(act.Reason) == "" {
				return &usageError{errors.New("--reason is required to discard")}
			}
			return opts.withLetters(cmd, func(letters *dlq.Store) error {
				var errs []error
				accepted := 0
				for _, id := range ids {
					if err := letters.Discard(cmd.Context(), id, act); err != nil {
						errs = append(errs, err)
						continue
					}
					accepted++
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%d of %d will be discarded\n", accepted, len(ids))
				return errors.Join(errs...)
			})
		},
	}
	actFlags(cmd, &act, "why (required)")
	return cmd
}

func actFlags(cmd *cobra.Command, act *dlq.Act, reason string) {
	name := "oncemill"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	cmd.Flags().StringVar(&act.By, "by", name, "who does it, for the record")
	cmd.Flags().StringVar(&act.Reason, "reason", "", reason)
}

func oneLetter(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return errors.New("give the id of one dead letter; oncemill letters lists them")
	}
	return nil
}

func someLetters(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return errors.New("give the ids of dead letters; oncemill letters lists them")
	}
	return nil
}

func letterIDs(args []string) ([]int64, error) {
	ids := make([]int64, len(args))
	for i, arg := range args {
		id, err := strconv.ParseInt(arg, 10, 64)
		if err != nil || id <= 0 {
			return nil, &usageError{fmt.Errorf("%q is not the id of a dead letter; oncemill letters lists them", arg)}
		}
		ids[i] = id
	}
	return ids, nil
}
