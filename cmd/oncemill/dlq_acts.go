package main

import (
	"context"
	"errors"
	"fmt"
	"os/user"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/dlq"
)

func newDiscard(opts *options) *cobra.Command {
	return newEach(opts, &cobra.Command{
		Use:   "discard ID...",
		Short: "Discard dead letters; a reason is required, undo takes it back",
	}, "will be discarded", (*dlq.Store).Discard)
}

func newUndo(opts *options) *cobra.Command {
	return newEach(opts, &cobra.Command{
		Use:   "undo ID...",
		Short: "Undo the discard of dead letters that are not purged; a reason is required",
		Long: `Undo the discard of dead letters: they are dead again, or held again. A held one can be
restored only until its relay has removed its message, which takes a second or two. A
reason is required.`,
	}, "were restored", (*dlq.Store).Restore)
}

// newEach returns a command that does something to one dead letter after the other, with a
// reason.
func newEach(opts *options, cmd *cobra.Command, done string, do func(*dlq.Store, context.Context, int64, dlq.Act) error) *cobra.Command {
	var act dlq.Act
	cmd.Args = wrongUse(someLetters)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ids, err := letterIDs(args)
		if err != nil {
			return err
		}
		if err := reasonGiven(cmd, act); err != nil {
			return err
		}
		return opts.withLetters(cmd, func(letters *dlq.Store) error {
			var errs []error
			accepted := 0
			for _, id := range ids {
				if err := do(letters, cmd.Context(), id, act); err != nil {
					errs = append(errs, err)
					if cmd.Context().Err() != nil {
						break // the rest would fail in the same way
					}
					continue
				}
				accepted++
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%d of %d %s\n", accepted, len(ids), done)
			return errors.Join(errs...)
		})
	}
	actFlags(cmd, &act, "why (required)")
	return cmd
}

func reasonGiven(cmd *cobra.Command, act dlq.Act) error {
	if strings.TrimSpace(act.Reason) == "" {
		return &usageError{errors.New("--reason is required to " + cmd.Name())}
	}
	return nil
}

func newNote(opts *options) *cobra.Command {
	var act dlq.Act
	cmd := &cobra.Command{
		Use:   "note ID TEXT",
		Short: "Add a note to a dead letter; show prints the notes",
		Args: wrongUse(func(_ *cobra.Command, args []string) error {
			if len(args) != 2 || strings.TrimSpace(args[1]) == "" {
				return errors.New("give the id of one dead letter and a text in quotes")
			}
			return nil
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := letterIDs(args[:1])
			if err != nil {
				return err
			}
			act.Reason = args[1]
			return opts.withLetters(cmd, func(letters *dlq.Store) error {
				return letters.AddNote(cmd.Context(), ids[0], act)
			})
		},
	}
	byFlag(cmd, &act)
	return cmd
}

func actFlags(cmd *cobra.Command, act *dlq.Act, reason string) {
	byFlag(cmd, act)
	cmd.Flags().StringVar(&act.Reason, "reason", "", reason)
}

func byFlag(cmd *cobra.Command, act *dlq.Act) {
	cmd.Flags().StringVar(&act.By, "by", who(), "who does it, for the record")
}

// who returns who does something, unless a flag says so.
func who() string {
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return "oncemill"
}

func oneLetter(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return errors.New("give the id of one dead letter; oncemill dlq lists them")
	}
	return nil
}

func someLetters(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return errors.New("give the ids of dead letters; oncemill dlq lists them")
	}
	return nil
}

func letterIDs(args []string) ([]int64, error) {
	ids := make([]int64, len(args))
	for i, arg := range args {
		id, err := strconv.ParseInt(arg, 10, 64)
		if err != nil || id <= 0 {
			return nil, &usageError{fmt.Errorf("%q is not the id of a dead letter; oncemill dlq lists them", arg)}
		}
		ids[i] = id
	}
	return ids, nil
}
