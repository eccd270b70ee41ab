package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/status"
)

var errProblems = errors.New("something is wrong; see above")

func newStatus(opts *options) *cobra.Command {
	var watch, asJSON, check, lanes bool
	var every time.Duration
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what waits, who works, and what is wrong",
		Long: `Show what waits in the database, which relays work, and what is wrong.

A number that ends with + is where counting ended; one that begins with ~ comes from the
statistics of the database. So the command costs little on a large backlog. It changes
nothing.`,
		Example: `  oncemill status
  oncemill status --watch
  oncemill status --json | jq .Outbox.Oldest
  oncemill status --check   # exits with 1 if something is wrong`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case every < 100*time.Millisecond:
				return &usageError{fmt.Errorf("--every %s: must be at least 100ms", every)}
			case cmd.Flags().Changed("every") && !watch:
				return &usageError{errors.New("--every is for --watch")}
			}
			return opts.database.with(func(db *sql.DB, cfg oncemill.Config) error {
				reader, err := status.New(db, status.Config{Database: cfg})
				if err != nil {
					return err
				}
				out := cmd.OutOrStdout()
				show := func(clearFirst bool) (int, error) {
					return showStatus(cmd.Context(), reader, out, clearFirst, asJSON, lanes)
				}
				if watch {
					return watchStatus(cmd, every, func() error { _, err := show(isTerminal(out)); return err })
				}
				problems, err := show(false)
				if err == nil && check && problems > 0 {
					err = errProblems
				}
				return err
			})
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&watch, "watch", false, "show it again and again, until interrupted")
	flags.DurationVar(&every, "every", 2*time.Second, "with --watch, the time in between")
	flags.BoolVar(&asJSON, "json", false, "print JSON, one line each time")
	flags.BoolVar(&check, "check", false, "exit with 1 if something is wrong")
	flags.BoolVar(&lanes, "lanes", false, "show each lane that has messages")
	cmd.MarkFlagsMutuallyExclusive("watch", "check")
	cmd.MarkFlagsMutuallyExclusive("json", "lanes") // JSON has the lanes
	return cmd
}

// watchStatus shows the status until it is interrupted. After an error it goes on: a failover is
// when people watch.
func watchStatus(cmd *cobra.Command, every time.Duration, show func() error) error {
	for {
		err := show()
		if err != nil && cmd.Context().Err() == nil {
			cmd.PrintErrln("oncemill:", inFlags(err))
		}
		if !sleep.For(cmd.Context(), every) {
			return nil
		}
	}
}

// showStatus prints the status and returns the number of problems.
func showStatus(ctx context.Context, reader *status.Reader, out io.Writer, clearFirst, asJSON, lanes bool) (int, error) {
	s, err := reader.Read(ctx)
	if err != nil {
		return 0, err
	}
	problems := s.Problems()
	if asJSON {
		return len(problems), printJSON(out, described(s), "")
	}
	var text strings.Builder
	if clearFirst {
		text.WriteString("\x1b[H\x1b[2J")
	}
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	statusRows(table, s, lanes)
	if err := table.Flush(); err != nil {
		return 0, err
	}
	if text.Len() > 0 {
		text.WriteString("\n")
	}
	if len(problems) == 0 {
		text.WriteString("Nothing is wrong.\n")
	}
	for _, p := range problems {
		text.WriteString(wrapped(p, columnsOf(out), "  ") + "\n")
	}
	_, err = io.WriteString(out, text.String())
	return len(problems), err
}

func statusRows(table io.Writer, s *status.Status, lanes bool) {
	row := func(what string, format string, args ...any) {
		fmt.Fprintf(table, "%s\t%s\n", what, fmt.Sprintf(format, args...))
	}
	for _, part := range s.Forbidden {
		row(part, "not readable by this role")
	}
	for _, part := range s.Silent {
		row(part, "no answer")
	}
	if o := s.Outbox; o != nil {
		row("outbox", "%s waiting%s", o.Depth, since(o.Depth, o.Oldest))
		if lanes {
			for _, l := range o.Lanes {
				row(fmt.Sprintf("  lane %d", l.Lane), "%s waiting%s", l.Depth, since(l.Depth, l.Oldest))
			}
		}
		row("scheduled", "%s, %s due", o.Scheduled, o.Due)
	}
	if r := s.Relay; r != nil {
		row("retrying", "%s%s, %s behind them, %s keys held", r.Retrying, since(r.Retrying, r.Oldest), r.Behind, r.HeldKeys)
		if r.SetAside.N > 0 {
			row("  set aside", "%s%s", r.SetAside, since(r.SetAside, r.OldestSetAside))
		}
		for _, w := range r.Workers {
			row("relay "+oneLine(w.Name), "%s, %d lanes, up %s", workerState(w), w.Lanes, w.Up)
		}
		if len(r.Workers) == 0 {
			row("relay", "none has worked within the last hour")
		}
	}
	if d := s.DeadLetters; d != nil {
		row("dead letters", "%s open", d.Total)
		for _, l := range d.Open {
			from := string(l.Source)
			if l.Consumer != "" {
				from = l.Consumer
			}
			row("  "+oneLine(from), "%s %s%s", l.Count, oneLine(string(l.State)), since(l.Count, l.Oldest))
		}
	}
	if p := s.Pauses; p != nil {
		const most = 20
		for i, one := range p.Paused {
			if i == most {
				row("paused", "%d more; oncemill pause list shows them", len(p.Paused)-most)
				break
			}
			row("paused "+oneLine(one.Target().String()), "by %s for %s: %s", oneLine(one.By), status.Age(max(time.Second, s.At.Sub(one.Since))), oneLine(one.Reason))
		}
	}
	if k := s.Keys; k != nil {
		row("idempotency keys", "%s stored", k.Stored)
		for _, started := range k.Started {
			state := "running"
			if !started.Running {
				state = "left by their process"
			}
			row("  "+oneLine(started.Endpoint), "%s %s%s", started.Count, state, since(started.Count, started.Oldest))
		}
	}
}

func workerState(w status.Worker) string {
	switch {
	case w.Gone > 0:
		return "gone for " + w.Gone.String()
	case w.Stopping:
		return "stopping"
	case !w.Ready:
		return "waits for its broker"
	}
	return "working"
}

func since(n status.Count, oldest status.Age) string {
	if n.N == 0 {
		return ""
	}
	return ", the oldest for " + oldest.String()
}

// isTerminal reports whether a person looks at w.
func isTerminal(w io.Writer) bool {
	file, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
