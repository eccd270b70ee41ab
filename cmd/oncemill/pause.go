package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/steer"
)

const targets = "topic|sink|lane|key|consumer"

func newPause(opts *options) *cobra.Command {
	var act steer.Act
	cmd := &cobra.Command{
		Use:   "pause " + targets + " NAME",
		Short: "Pause a topic, a sink, a lane, a key or a consumer, until it is resumed",
		Long: `Pause a topic, a sink, a lane, an ordering key or a consumer. Workers know it within a second
or two. What is in flight or being handled is finished; nothing is lost, no attempts are used
up, and the order of keys is kept. A pause outlives every process: oncemill resume ends it.
oncemill pause list shows who paused what. A reason is required.

A sink is the name of a route of a relay's router, or its pattern of topics if it has no name;
a relay without a router has one sink, named #.`,
		Example: `  oncemill pause topic orders --reason "their queue is full"
  oncemill pause consumer billing --reason "deploy of 1.7"
  oncemill pause list
  oncemill resume topic orders`,
		Args: wrongUse(oneTarget),
		RunE: func(cmd *cobra.Command, args []string) error {
			if strings.TrimSpace(act.Reason) == "" {
				return &usageError{errors.New("--reason is required to pause")}
			}
			return opts.withControl(cmd, func(control *steer.Control) error {
				t := targetOf(args)
				if err := control.Pause(cmd.Context(), t, act); err != nil {
					return err
				}
				_, err := fmt.Fprintln(cmd.OutOrStdout(), oneLine(t.String()), "is paused")
				return err
			})
		},
	}
	steerFlags(cmd, &act, "why (required)")
	cmd.AddCommand(newPauses(opts))
	return cmd
}

func newPauses(opts *options) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List what is paused, by whom, since when and why",
		Args:  wrongUse(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.reading(cmd, func(ctx context.Context, db *sql.DB, cfg oncemill.Config) error {
				control, err := openControl(ctx, db, cfg)
				if err != nil {
					return err
				}
				pauses, err := control.List(ctx)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), pauses, "")
				}
				table := newTable("KIND", "NAME", "SINCE", "BY", "REASON")
				for _, p := range pauses {
					table.row(p.Kind, p.Name, p.Since, p.By, p.Reason)
				}
				return table.print(cmd.OutOrStdout())
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newResume(opts *options) *cobra.Command {
	var act steer.Act
	cmd := &cobra.Command{
		Use:   "resume " + targets + " NAME",
		Short: "Resume what oncemill pause has paused",
		Args:  wrongUse(oneTarget),
		RunE: func(cmd *cobra.Command, args []string) error {
			return opts.withControl(cmd, func(control *steer.Control) error {
				t := targetOf(args)
				if err := control.Resume(cmd.Context(), t, act); err != nil {
					return err
				}
				_, err := fmt.Fprintln(cmd.OutOrStdout(), oneLine(t.String()), "is resumed")
				return err
			})
		},
	}
	steerFlags(cmd, &act, "why, for the record")
	return cmd
}

func newRelease(opts *options) *cobra.Command {
	var act steer.Act
	cmd := &cobra.Command{
		Use:   "release lane NUMBER",
		Short: "Have a relay give a lane back, for another relay to take; a reason is required",
		Long: `Have the relay that owns a lane finish what is in flight and give the lane back. Another relay
takes it; if there is none, the same one does. A reason is required.`,
		Args: wrongUse(func(cmd *cobra.Command, args []string) error {
			if err := oneTarget(cmd, args); err != nil {
				return err
			}
			if steer.Kind(args[0]) != steer.Lane {
				return fmt.Errorf("%q cannot be released, only a lane", args[0])
			}
			return nil
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			if strings.TrimSpace(act.Reason) == "" {
				return &usageError{errors.New("--reason is required to release")}
			}
			return opts.withControl(cmd, func(control *steer.Control) error {
				number, err := strconv.Atoi(args[1])
				if err != nil {
					return &usageError{fmt.Errorf("%q is not the number of a lane, 0 to %d", args[1], outbox.Lanes-1)}
				}
				if err := control.ReleaseLane(cmd.Context(), number, act); err != nil {
					return err
				}
				_, err = fmt.Fprintln(cmd.OutOrStdout(), "lane", number, "will be given back")
				return err
			})
		},
	}
	steerFlags(cmd, &act, "why (required)")
	return cmd
}

func newRetry(opts *options) *cobra.Command {
	var act steer.Act
	var what steer.Selection
	cmd := &cobra.Command{
		Use:   "retry --topic TOPIC | --key KEY | --all",
		Short: "Have retrying messages tried now, instead of when they are due",
		Long: `Have retrying messages tried now, instead of when they are due, and topics that are
unavailable probed. The relays do it within a second or two. Those that fail again use up an
attempt. Messages of what is paused stay where they are.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := noneEmpty(cmd, "topic", "key"); err != nil {
				return err
			}
			if (what.Topic != "" || what.Key != "") == what.All {
				return &usageError{errors.New("give --topic, --key or both, or --all")}
			}
			return opts.withControl(cmd, func(control *steer.Control) error {
				if err := control.Retry(cmd.Context(), what, act); err != nil {
					return err
				}
				_, err := fmt.Fprintln(cmd.OutOrStdout(), "relays try these retrying messages now; oncemill retrying lists what still waits")
				return err
			})
		},
	}
	steerFlags(cmd, &act, "why, for the record")
	cmd.Flags().StringVar(&what.Topic, "topic", "", "only messages of this topic")
	cmd.Flags().StringVar(&what.Key, "key", "", "only messages with this ordering key")
	cmd.Flags().BoolVar(&what.All, "all", false, "all messages")
	return cmd
}

// withControl opens the database and the control of its workers.
func (o *options) withControl(cmd *cobra.Command, fn func(*steer.Control) error) error {
	return acting(o, cmd, o.database.with, openControl, fn)
}

func openControl(ctx context.Context, db *sql.DB, cfg oncemill.Config) (*steer.Control, error) {
	if err := oncemill.CheckMigrated(ctx, db, cfg, audit.Migrations, steer.Migrations); err != nil {
		return nil, err
	}
	return steer.New(db, steer.Config{Database: cfg})
}

func steerFlags(cmd *cobra.Command, act *steer.Act, reason string) {
	cmd.Flags().StringVar(&act.By, "by", who(), "who does it, for the record")
	cmd.Flags().StringVar(&act.Reason, "reason", "", reason)
}

func targetOf(args []string) steer.Target {
	return steer.Target{Kind: steer.Kind(args[0]), Name: args[1]}
}

func oneTarget(_ *cobra.Command, args []string) error {
	if len(args) != 2 || !strings.Contains("|"+targets+"|", "|"+args[0]+"|") || args[1] == "" {
		return errors.New("give one of topic, sink, lane, key or consumer, and a name")
	}
	return nil
}
