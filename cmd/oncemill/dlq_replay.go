package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/dlq"
)

func newReplay(opts *options) *cobra.Command {
	var act dlq.Act
	var filter filterFlags
	var plan dlq.JobPlan
	var all, dryRun, detach bool
	cmd := &cobra.Command{
		Use:   "replay [ID...]",
		Short: "Deliver the messages of dead letters again: of some ids, or with --all or a filter as a job",
		Long: `Deliver the messages of dead letters again.

With ids, the replays are requested at once. With --all or a filter, a job is started for the
dead letters that are dead or held now, and followed until it ends or pauses; a reason is
required. A relay runs the job: ctrl-C leaves it running. --canary replays so many first, and
goes on when they have ended well.

--dry-run counts them. DUPLICATES are those that the consumer will drop, since it has handled
their message id, or since several have the same one.`,
		Example: `  oncemill dlq replay 17 18 --reason "queue created"
  oncemill dlq replay --consumer stock --dry-run
  oncemill dlq replay --consumer stock --canary 10 --rate 500 --stop-after 20 --reason "fixed in 1.4"`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := noneEmpty(cmd, filterNames...); err != nil {
				return err
			}
			plan.Filter = dlq.Filter{}
			filtered := slices.ContainsFunc(filterNames, cmd.Flags().Changed)
			forJob := slices.ContainsFunc([]string{"canary", "rate", "stop-after", "dry-run", "detach"}, cmd.Flags().Changed)
			switch {
			case len(args) > 0 && (all || filtered):
				return &usageError{errors.New("give ids, or --all, or a filter, not several of them")}
			case all && filtered:
				return &usageError{errors.New("give --all or a filter, not both")}
			case len(args) == 0 && !all && !filtered:
				return &usageError{errors.New("give the ids of dead letters, or --all, or a filter such as --consumer; oncemill dlq lists them")}
			}
			ids, err := letterIDs(args)
			if err != nil {
				return err
			}
			if len(ids) > 0 && !forJob {
				return opts.withLetters(cmd, func(letters *dlq.Store) error {
					accepted, err := letters.Replay(cmd.Context(), ids, act)
					fmt.Fprintf(cmd.OutOrStdout(), "%d of %d will be replayed\n", len(accepted), len(ids))
					return err
				})
			}
			if !dryRun {
				if err := reasonGiven(cmd, act); err != nil {
					return err
				}
			}
			plan.IDs = ids
			if _, err := filter.resolve(time.Now()); err != nil {
				return err
			}
			if dryRun {
				return opts.readLetters(cmd, func(ctx context.Context, letters *dlq.Store) error {
					if plan.Filter, err = filter.at(ctx, letters); err != nil {
						return err
					}
					preview, err := letters.PreviewJob(ctx, plan)
					if err != nil {
						return err
					}
					return printPreview(cmd.OutOrStdout(), preview)
				})
			}
			return opts.withLetters(cmd, func(letters *dlq.Store) error {
				plan.Filter, err = within(cmd.Context(), opts.readTimeout, func(ctx context.Context) (dlq.Filter, error) { return filter.at(ctx, letters) })
				if err != nil {
					return err
				}
				job, err := letters.StartJob(cmd.Context(), plan, act)
				if err != nil {
					return err
				}
				if detach {
					fmt.Fprintf(cmd.OutOrStdout(), "job %d started; oncemill jobs watch %d follows it\n", job.ID, job.ID)
					return nil
				}
				return opts.watchJob(cmd, letters, job.ID)
			})
		},
	}
	filter.register(cmd, nil)
	flags := cmd.Flags()
	flags.Lookup("state").Usage = "only these states: dead, held; default both"
	flags.BoolVar(&all, "all", false, "replay all dead letters that are dead or held, as a job")
	flags.IntVar(&plan.Canary, "canary", 0, "replay so many first, and pause if one of them fails again")
	flags.IntVar(&plan.Rate, "rate", 0, "replays a second, at most 1000 (default 100)")
	flags.IntVar(&plan.StopAfter, "stop-after", 0, "pause after so many renewed failures")
	flags.BoolVar(&dryRun, "dry-run", false, "only count what would be replayed")
	flags.BoolVar(&detach, "detach", false, "start the job and do not follow it")
	actFlags(cmd, &act, "why, for the record; required for a job")
	return cmd
}

// filterNames are the flags of filterFlags.
var filterNames = []string{"state", "topic", "key", "fingerprint", "message-id", "consumer", "source", "reason-class", "since", "until"}

func printPreview(w io.Writer, p *dlq.Preview) error {
	table := newTable("FROM", "STATE", "COUNT", "DUPLICATES", "MAYBE DELIVERED")
	for _, c := range p.Counts {
		duplicates := "-"
		if c.Source == dlq.FromConsumer && p.Uncounted == nil {
			duplicates = strconv.FormatInt(c.Duplicates, 10)
		}
		table.row(origin(c.Source, c.Consumer), c.State, c.Count, duplicates, c.MaybeDelivered)
	}
	if err := table.print(w); err != nil {
		return err
	}
	more := "."
	if p.Partial {
		more = "; there are more, which were not looked at."
	}
	if p.Uncounted != nil {
		more += "\nDuplicates were not counted: " + oneLine(p.Uncounted.Error())
	}
	_, err := fmt.Fprintf(w, "%d dead letters would be replayed%s\n", p.Total, more)
	return err
}
