package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"
)

// event is a line of go test -json; see go doc test2json.
type event struct {
	Time    time.Time
	Action  string
	Package string
	Test    string
	Elapsed float64
	Output  string
}

type counts struct{ passed, failed, skipped int }

func (c *counts) add(other counts) {
	c.passed += other.passed
	c.failed += other.failed
	c.skipped += other.skipped
}

// report prints the results of one module: a line for each package, and the output of tests
// that did not pass.
type report struct {
	counts
	out      io.Writer
	allowed  skips
	unlisted []string // tests that were skipped without being listed
	running  map[string]*packageRun
}

func newReport(out io.Writer, allowed skips) *report {
	return &report{out: out, allowed: allowed, running: map[string]*packageRun{}}
}

// packageRun is a package whose tests are running.
type packageRun struct {
	counts
	began  time.Time           // when its first test did; before, it may have waited for its turn
	output map[string][]string // by test, without passed tests; "" is the package's own output
	tests  []string            // keys of output, in the order of their first lines
}

// read reads the events of one go test.
func (r *report) read(events io.Reader) error {
	decoder := json.NewDecoder(events)
	for {
		var e event
		if err := decoder.Decode(&e); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("output of go test -json: %w", err)
		}
		r.take(e)
	}
}

// failure returns why the module failed although go test succeeded.
func (r *report) failure() error {
	if len(r.unlisted) > 0 {
		return fmt.Errorf("skipped without being listed: %s", strings.Join(r.unlisted, ", "))
	}
	if r.passed == 0 {
		return errors.New("no test ran")
	}
	return nil
}

func (r *report) take(e event) {
	if e.Action == "build-output" {
		fmt.Fprint(r.out, e.Output)
		return
	}
	p := r.running[e.Package]
	if p == nil {
		p = &packageRun{output: map[string][]string{}}
		r.running[e.Package] = p
	}
	switch e.Action {
	case "run":
		if p.began.IsZero() {
			p.began = e.Time
		}
	case "output":
		if _, known := p.output[e.Test]; !known {
			p.tests = append(p.tests, e.Test)
		}
		p.output[e.Test] = append(p.output[e.Test], e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			r.packageDone(e, p)
		} else {
			r.testDone(e, p)
		}
	}
}

// ofTheProcess matches a line that is not about the test that go test takes it for, which may have
// passed: how the process of a package ended, and a race, for which another test fails.
var ofTheProcess = regexp.MustCompile(`DATA RACE|^(exit status|signal:|panic:|fatal error:) `)

func (r *report) testDone(e event, p *packageRun) {
	name := e.Package + "." + e.Test
	switch {
	case e.Action == "fail":
		p.failed++
		return
	case e.Action == "pass":
		p.passed++
		if slices.ContainsFunc(p.output[e.Test], ofTheProcess.MatchString) {
			return
		}
	case r.allowed.allow(name):
		p.skipped++
	default:
		p.skipped++
		r.unlisted = append(r.unlisted, name)
		return
	}
	delete(p.output, e.Test)
}

// packageDone prints the output of the tests that failed, did not end or were skipped without
// being listed, and then the line of the package.
func (r *report) packageDone(e event, p *packageRun) {
	delete(r.running, e.Package)
	r.add(p.counts)
	for _, test := range p.tests {
		if test != "" || e.Action == "fail" {
			fmt.Fprint(r.out, strings.Join(p.output[test], ""))
		}
	}
	if e.Action == "skip" {
		return // no tests
	}
	word := "ok  "
	if e.Action == "fail" {
		word = "FAIL"
	}
	seconds := e.Elapsed
	if !p.began.IsZero() {
		seconds = e.Time.Sub(p.began).Seconds()
	}
	fmt.Fprintf(r.out, "%s %s: passed=%d failed=%d skipped=%d seconds=%.1f\n", word, e.Package, p.passed, p.failed, p.skipped, seconds)
}
