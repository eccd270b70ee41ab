// Command testrun runs the tests of every module of this repository with go test -json, a few
// packages at a time. It fails if a test fails, if a test is skipped that is not listed, or if
// a module has no tests.
//
//	go run ./internal/testrun [-skips FILES] [-packages LIST] [flags of go test]
//
// FILES, separated by commas, list the tests that may be skipped, one "package.TestName" a line, with
// the reason after a #. "package.TestName/*" means all subtests of a test. With a LIST, too,
// only these packages of the module in this directory are tested.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

func main() {
	if len(os.Args) > 3 && os.Args[1] == turnFlag {
		fmt.Fprintln(os.Stderr, "testrun:", takeTurn(os.Args[2], os.Args[3:]))
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, ".", os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
}

// run tests every module under root. It returns why the run failed.
func run(ctx context.Context, root string, args []string, out io.Writer) error {
	started := time.Now()
	allowed := skips{}
	if list, others, given := flagOf("-skips", args); given {
		var err error
		if allowed, err = readSkips(list); err != nil {
			return err
		}
		args = others
	}
	var only []string
	if list, others, given := flagOf("-packages", args); given {
		only, args = strings.Split(list, ","), others
	}
	dirs, err := modules(root)
	if err != nil {
		return err
	}
	if only != nil {
		dirs = []string{root}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	turns, err := os.MkdirTemp("", "testrun")
	if err != nil {
		return err
	}
	defer os.RemoveAll(turns) //nolint:errcheck // it is temporary
	args = append([]string{"-exec", strings.Join([]string{self, turnFlag, filepath.Join(turns, "turn")}, " ")}, args...)
	var (
		group sync.WaitGroup
		mu    sync.Mutex // guards total and errs
		total counts
		errs  []error
	)
	shared, slots := &sharedWriter{out: out}, make(chan struct{}, modulesAtOnce)
	for _, dir := range dirs {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			report := newReport(shared, allowed)
			of := only
			if of == nil {
				of = packages(dir)
			}
			err := testModule(ctx, dir, slices.Concat(args, of), report)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, fmt.Errorf("module %s: %w", dir, err))
			}
			total.add(report.counts)
		})
	}
	group.Wait()
	fmt.Fprintf(out, "tests: modules=%d passed=%d failed=%d skipped=%d seconds=%.0f\n",
		len(dirs), total.passed, total.failed, total.skipped, time.Since(started).Seconds())
	return errors.Join(errs...)
}

// flagOf returns the value of a flag, if the arguments begin with it, and the others.
func flagOf(name string, args []string) (value string, others []string, given bool) {
	if len(args) < 2 || args[0] != name {
		return "", args, false
	}
	return args[1], args[2:], true
}

// longest are the packages whose tests take longest. They come first: the last one of all would
// leave processors idle.
var longest = []string{"relay", "idempotency", "inbox", "outbox", "cmd/oncemill", "relay/rabbitmq", "inbox/rabbitmq"}

// packages returns the packages of the module in dir, in the order in which to test them.
func packages(dir string) (all []string) {
	for _, name := range longest {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.IsDir() {
			all = append(all, "./"+name)
		}
	}
	return append(all, "./...")
}

// modulesAtOnce is how many modules are compiled at once, while packages are tested.
const modulesAtOnce = 2

// sharedWriter lets several modules write lines to one writer.
type sharedWriter struct {
	mu  sync.Mutex // guards out
	out io.Writer
}

func (w *sharedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Write(p)
}

// testModule runs tests of the module in dir.
func testModule(ctx context.Context, dir string, args []string, report *report) error {
	cmd := exec.CommandContext(ctx, "go", slices.Concat([]string{"test", "-json"}, args)...)
	cmd.Dir = dir
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	readErr := report.read(stdout)
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("go test: %w", err)
	}
	if readErr != nil {
		return readErr
	}
	return report.failure()
}
