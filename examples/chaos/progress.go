package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// errBroken is returned by a run that found a promise broken or untested.
var errBroken = errors.New("a promise was broken")

const maxProblems = 20

// progress shows the progress of a run; on a terminal in one line that is overwritten.
type progress struct {
	out      io.Writer
	every    time.Duration // between two lines of counts
	terminal bool
}

func newProgress(out *os.File) progress {
	info, err := out.Stat()
	if err == nil && info.Mode()&os.ModeCharDevice != 0 {
		return progress{out: out, every: 200 * time.Millisecond, terminal: true}
	}
	return progress{out: out, every: 2 * time.Second}
}

// say prints a line that is not overwritten.
func (p progress) say(format string, args ...any) {
	p.erase()
	_, _ = fmt.Fprintf(p.out, format+"\n", args...) // a closed terminal must not end the run
}

// counts prints a line that the next one overwrites.
func (p progress) counts(format string, args ...any) {
	p.erase()
	if !p.terminal {
		format += "\n"
	}
	_, _ = fmt.Fprintf(p.out, format, args...)
}

func (p progress) erase() {
	if p.terminal {
		_, _ = fmt.Fprint(p.out, "\r\x1b[K")
	}
}

// finish prints the findings and the last line, and returns [errBroken] unless every promise
// held.
func (p progress) finish(v result, took time.Duration) error {
	for i, problem := range v.problems {
		if i == maxProblems {
			p.say("  ... and %d more", len(v.problems)-i)
			break
		}
		p.say("  %s", problem)
	}
	p.say("%s", v.line(took))
	if !v.ok() {
		return errBroken
	}
	return nil
}
