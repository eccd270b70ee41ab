package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// timeLimit is that of a package's tests: a bug that makes one hang is not caught.
const timeLimit = "10m" // longer than testserver.MaxWait, with which a test fails

// unharmed runs the tests of all bugs without one.
func unharmed(ctx context.Context, root string, bugs []mutant) error {
	tests := map[string][]string{}
	for _, b := range bugs {
		if !slices.Contains(tests[b.pkg], b.test) {
			tests[b.pkg] = append(tests[b.pkg], b.test)
		}
	}
	var errs []error
	for pkg, names := range tests {
		out, err := goTest(ctx, root, pkg, names)
		for _, name := range names {
			if err == nil && !ended("PASS", name).Match(out) {
				err = fmt.Errorf("no test %s has passed", name)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s without a bug: %w\n%s", pkg, err, end(out)))
		}
	}
	return errors.Join(errs...)
}

// plant runs the test with the bug. It returns nil if the test has noticed it, otherwise why
// that is no catch.
func (b mutant) plant(ctx context.Context, root, dir string) error {
	text, err := b.planted(root)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	with := filepath.Join(dir, filepath.Base(b.file))
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(root, b.file): with}})
	if err != nil {
		return err
	}
	list := filepath.Join(dir, "overlay.json")
	if err := errors.Join(os.WriteFile(with, text, 0o600), os.WriteFile(list, overlay, 0o600)); err != nil {
		return err
	}
	out, err := goTest(ctx, root, b.pkg, []string{b.test}, "-overlay="+list)
	switch {
	case err == nil:
		return errors.New("the test has passed")
	case ctx.Err() != nil:
		return ctx.Err()
	case brokenDown.Match(out):
		return fmt.Errorf("no catch: %s", brokenDown.Find(out))
	case !ended("FAIL", b.test).Match(out):
		return fmt.Errorf("the test did not fail: %w\n%s", err, end(out))
	}
	return nil
}

var brokenDown = regexp.MustCompile(`(?m)^(panic: .*|fatal error: .*|FAIL\s.*\[(build|setup) failed\].*)$`)

// ended matches the line with which a test has ended.
func ended(how, test string) *regexp.Regexp {
	return regexp.MustCompile(`(?m)^ *--- ` + how + `: ` + regexp.QuoteMeta(test) + ` \(`)
}

func goTest(ctx context.Context, root, pkg string, tests []string, flags ...string) ([]byte, error) {
	patterns := make([]string, len(tests))
	for i, test := range tests {
		patterns[i] = "^" + strings.ReplaceAll(regexp.QuoteMeta(test), "/", "$/^") + "$"
	}
	args := append([]string{"test", "-v", "-count=1", "-vet=off", "-timeout=" + timeLimit, "-run=" + strings.Join(patterns, "|")}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	cmd.Dir = root
	return cmd.CombinedOutput()
}

// end returns the last lines of an output.
func end(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}
