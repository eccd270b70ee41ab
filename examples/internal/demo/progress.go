package demo

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"
)

// Progress shows how far a run has come.
type Progress struct {
	Out io.Writer

	// Every is the time between two lines. On a terminal one line is written
	// over and over.
	Every    time.Duration
	terminal bool
}

// NewProgress returns a Progress that fits out.
func NewProgress(out *os.File) Progress {
	info, err := out.Stat()
	if err == nil && info.Mode()&os.ModeCharDevice != 0 {
		return Progress{Out: out, Every: 200 * time.Millisecond, terminal: true}
	}
	return Progress{Out: out, Every: 2 * time.Second}
}

// Say writes a line of its own.
func (p Progress) Say(format string, args ...any) {
	p.erase()
	_, _ = fmt.Fprintf(p.Out, format+"\n", args...) // a terminal that has gone stops no run
}

// Finish writes what was found, the last line last, and returns [ErrBroken] if it
// is not as promised.
func (p Progress) Finish(v Verdict, took time.Duration) error {
	for i, problem := range v.Problems {
		if i == maxProblems {
			p.Say("  ... and %d more", len(v.Problems)-i)
			break
		}
		p.Say("  %s", problem)
	}
	p.Say("%s", v.Line(took))
	if !v.OK() {
		return ErrBroken
	}
	return nil
}

const maxProblems = 20

func (p Progress) show(line string) {
	p.erase()
	if !p.terminal {
		line += "\n"
	}
	_, _ = fmt.Fprint(p.Out, line)
}

func (p Progress) erase() {
	if p.terminal {
		_, _ = fmt.Fprint(p.Out, "\r\x1b[K")
	}
}

// watch shows the counts until ctx ends.
func (r *run) watch(ctx context.Context) error {
	ticker := time.NewTicker(r.Progress.Every)
	defer ticker.Stop()
	before, at := int64(0), time.Now()
	for {
		select {
		case <-ctx.Done():
			r.Progress.erase()
			return nil
		case now := <-ticker.C:
			booked, err := count(ctx, r.DB, countLedger)
			if err != nil {
				if ctx.Err() != nil {
					continue
				}
				return err
			}
			taken := r.client.taken.Load()
			rate := float64(taken-before) / now.Sub(at).Seconds()
			before, at = taken, now
			r.Progress.show(fmt.Sprintf("  %6d of %d orders taken (%4.0f/s)  %6d booked  %d kills  %d requests repeated",
				taken, len(r.Orders), rate, booked, r.kills.Load(), r.client.retries.Load()))
		}
	}
}
