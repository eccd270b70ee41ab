package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/sleep"
)

func newJobs(opts *options) *cobra.Command {
	jobs := newListJobs(opts, "jobs")
	jobs.AddCommand(newListJobs(opts, "list"), newShowJob(opts), newWatchJob(opts),
		newChangeJob(opts, "pause", "Pause a replay job; the replays it has requested go on", (*dlq.Store).PauseJob),
		newChangeJob(opts, "resume", "Resume a paused replay job; after failures a canary begins again", (*dlq.Store).ResumeJob),
		newChangeJob(opts, "cancel", "End a replay job; dead letters it has not asked for stay as they are", (*dlq.Store).CancelJob))
	return jobs
}

func newListJobs(opts *options, use string) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   use,
		Short: "List replay jobs of dead letters, the newest first",
		Long: `List replay jobs of dead letters, the newest 100. oncemill dlq replay --all, or with a
filter, starts one; a relay runs it, whether or not anybody watches.

ASKED counts replays that were requested and whose outcome is not known yet, TAKEN the dead
letters that somebody else had replayed, discarded or purged before the job came to them.`,
		Example: `  oncemill jobs
  oncemill jobs watch 3
  oncemill jobs pause 3 --reason "broker is down"`,
		Args: wrongUse(noCommand),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.readLetters(cmd, func(ctx context.Context, letters *dlq.Store) error {
				jobs, err := letters.Jobs(ctx)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), jobs, "")
				}
				table := newTable("ID", "STATE", "STARTED", "DONE", "FAILED", "BY", "REASON", "NOTE")
				for _, j := range jobs {
					table.row(j.ID, j.State, j.CreatedAt, fmt.Sprintf("%d of %d", j.Done(), j.Total), j.Failed, j.Act.By, j.Act.Reason, jobNote(j))
				}
				return table.print(cmd.OutOrStdout())
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// jobNote is what somebody should know of a job.
func jobNote(j *dlq.Job) string {
	if j.Waiting != "" {
		return "waiting: " + j.Waiting
	}
	return j.Note
}

func newShowJob(opts *options) *cobra.Command {
	return &cobra.Command{
		Use:   "show ID",
		Short: "Show a replay job as JSON",
		Args:  wrongUse(oneJob),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := jobID(args)
			if err != nil {
				return err
			}
			return opts.readLetters(cmd, func(ctx context.Context, letters *dlq.Store) error {
				job, err := letters.Job(ctx, id)
				if err != nil {
					return err
				}
				return printJSON(cmd.OutOrStdout(), job, "  ")
			})
		},
	}
}

func newWatchJob(opts *options) *cobra.Command {
	return &cobra.Command{
		Use:   "watch ID",
		Short: "Follow a replay job until it ends or pauses; ctrl-C leaves it running",
		Args:  wrongUse(oneJob),
		RunE: func(cmd *cobra.Command, args []string) error {
			return opts.withJob(cmd, args, func(letters *dlq.Store, id int64) error {
				return opts.watchJob(cmd, letters, id)
			})
		},
	}
}

func newChangeJob(opts *options, use, short string, change func(*dlq.Store, context.Context, int64, dlq.Act) (*dlq.Job, error)) *cobra.Command {
	var act dlq.Act
	cmd := &cobra.Command{
		Use:   use + " ID",
		Short: short + "; a reason is required",
		Args:  wrongUse(oneJob),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := reasonGiven(cmd, act); err != nil {
				return err
			}
			return opts.withJob(cmd, args, func(letters *dlq.Store, id int64) error {
				job, err := change(letters, cmd.Context(), id, act)
				if err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "job %d is %s\n", job.ID, job.State)
				return nil
			})
		},
	}
	actFlags(cmd, &act, "why (required)")
	return cmd
}

func oneJob(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return errors.New("give the id of one job; oncemill jobs lists them")
	}
	return nil
}

// withJob opens the database, for a command whose argument is the id of a job.
func (o *options) withJob(cmd *cobra.Command, args []string, fn func(*dlq.Store, int64) error) error {
	id, err := jobID(args)
	if err != nil {
		return err
	}
	return o.withLetters(cmd, func(letters *dlq.Store) error { return fn(letters, id) })
}

func jobID(args []string) (int64, error) {
	id, err := strconv.ParseInt(args[0], 10, 64)
	if err != nil || id <= 0 {
		return 0, &usageError{fmt.Errorf("%q is not the id of a job; oncemill jobs lists them", args[0])}
	}
	return id, nil
}

const (
	watchEvery = 500 * time.Millisecond
	watchIdle  = 10 * time.Second // a relay looks for jobs more often
	watchLines = 10 * time.Second // between lines where there is no terminal
)

// watchJob prints the progress of a job until it ends or pauses. On a terminal that is one
// line, written again and again. A job that did not finish is an error. Each look at the job has
// the time limit of reads.
func (o *options) watchJob(cmd *cobra.Command, letters *dlq.Store, id int64) error {
	ctx, w := cmd.Context(), cmd.OutOrStdout()
	file, ok := w.(*os.File)
	width := 0
	if ok {
		width = terminalWidth(file)
	}
	var speed jobSpeed
	var printed time.Time
	var state dlq.JobState
	var seen [4]int64
	var moved time.Time
	for {
		job, err := within(ctx, o.readTimeout, func(ctx context.Context) (*dlq.Job, error) { return letters.Job(ctx, id) })
		switch {
		case ctx.Err() != nil:
			_, err = fmt.Fprintf(w, "%sjob %d goes on; oncemill jobs watch %d follows it, oncemill jobs cancel %d ends it\n", newline(width), id, id, id)
			return err
		case err != nil:
			return err
		}
		now := time.Now()
		over := job.Ended() || job.State == dlq.JobPaused
		if counts := [4]int64{job.Total, job.Pending, job.Asked, job.Done()}; counts != seen || moved.IsZero() {
			seen, moved = counts, now
		}
		line := jobLine(job, speed.left(job, now), width)
		if job.Asked == 0 && now.Sub(moved) > watchIdle {
			line += "; nobody runs it: is there a relay?"
		}
		switch {
		case width > 0:
			if runes := []rune(line); len(runes) >= width {
				line = string(runes[:width-1])
			}
			fmt.Fprintf(w, "\r\x1b[K%s", line)
		case over || job.State != state || now.Sub(printed) >= watchLines:
			fmt.Fprintln(w, line)
			printed, state = now, job.State
		}
		switch {
		case job.State == dlq.JobPaused:
			fmt.Fprint(w, newline(width))
			return fmt.Errorf("job %d is paused: %s; oncemill jobs resume %d goes on, oncemill jobs cancel %d ends it", id, oneLine(job.Note), id, id)
		case over:
			fmt.Fprint(w, newline(width))
			switch {
			case job.State == dlq.JobCanceled:
				return fmt.Errorf("job %d was canceled: it has replayed %d dead letters and skipped %d", id, job.Replayed, job.Skipped)
			case job.Total == 0:
				return fmt.Errorf("job %d has replayed nothing: no dead letter matches that is dead or held", id)
			}
			return nil
		}
		sleep.For(ctx, watchEvery)
	}
}

// newline ends the line of a terminal.
func newline(width int) string {
	if width > 0 {
		return "\n"
	}
	return ""
}

// jobLine is the progress of a job, what matters most first. On a terminal of so many columns it
// leaves out the counts that do not fit.
func jobLine(j *dlq.Job, left string, columns int) string {
	line := fmt.Sprintf("job %d %s: %d of %d done%s", j.ID, j.State, j.Done(), j.Total, left)
	if note := jobNote(j); note != "" {
		line += "; " + note
	}
	line = oneLine(line)
	for _, count := range []struct {
		n    int64
		what string
	}{{j.Failed, "failed again"}, {j.Asked, "in progress"}, {j.Replayed, "replayed"}, {j.Discarded, "discarded"}, {j.Taken, "taken by others"}, {j.Skipped, "skipped"}} {
		text := fmt.Sprintf("; %d %s", count.n, count.what)
		if count.n > 0 && (columns == 0 || utf8.RuneCountInString(line+text) < columns) {
			line += text
		}
	}
	return line
}

// jobSpeed estimates how long a job still takes, from what the last half minute has brought.
type jobSpeed struct {
	at   time.Time
	done int64
}

func (s *jobSpeed) left(j *dlq.Job, now time.Time) string {
	if s.at.IsZero() || j.Done() < s.done {
		s.at, s.done = now, j.Done()
	}
	took, done := now.Sub(s.at), j.Done()-s.done
	if took < 2*time.Second || j.Ended() {
		return ""
	}
	rate := float64(done) / took.Seconds()
	text := fmt.Sprintf(", %.0f/s", rate)
	if rate > 0 && j.State == dlq.JobRunning {
		text += fmt.Sprintf(", about %v left", time.Duration(float64(j.Total-j.Done())/rate*float64(time.Second)).Round(time.Second))
	}
	if took > 30*time.Second {
		s.at, s.done = now.Add(-took/2), j.Done()-done/2
	}
	return text
}
