// Command mutants plants bugs, one at a time, and runs the test that has to notice each. A
// check that never fails proves nothing: this is the proof that the tests of oncemill's
// promises can fail.
//
//	go run ./internal/mutants [-only PATTERN]
//
// Each file in internal/mutants/planted is a bug: what users would suffer, the test, and the
// text to replace. Nothing in the working copy changes. A panic, a time-out or code that does not
// compile is no catch. Before that, the same tests run without a bug and must pass.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"sync"
	"time"
)

// atOnce is how many tests run at the same time; some of them wait more than they compute.
const atOnce = 3

func main() {
	only := flag.String("only", "", "plant the bugs whose name matches this `pattern`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, ".", *only, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// run plants the bugs of a repository and reports each. It returns an error unless every bug
// was caught.
func run(ctx context.Context, root, only string, out io.Writer) error {
	began := time.Now()
	pattern, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	root, err = filepath.Abs(root)
	if err != nil {
		return err
	}
	bugs, err := load(root, pattern)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // in the directory for temporary files
	fmt.Fprintf(out, "running the tests of %d bugs without a bug ...\n", len(bugs))
	if err := unharmed(ctx, root, bugs); err != nil {
		return err
	}
	var (
		mu       sync.Mutex // guards caught, out
		caught   int
		planting sync.WaitGroup
	)
	places := make(chan struct{}, atOnce)
	for _, b := range bugs {
		places <- struct{}{}
		planting.Go(func() {
			defer func() { <-places }()
			started := time.Now()
			err := b.plant(ctx, root, filepath.Join(dir, b.name))
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				caught++
				fmt.Fprintf(out, "caught    %-44s %5.1f s  %s (%s)\n", b.name, time.Since(started).Seconds(), b.test, b.pkg)
				return
			}
			fmt.Fprintf(out, "SURVIVED  %-44s %5.1f s  %s (%s): %v; users would suffer: %s\n", b.name, time.Since(started).Seconds(), b.test, b.pkg, err, b.harm)
		})
	}
	planting.Wait()
	fmt.Fprintf(out, "mutants: planted=%d caught=%d survived=%d seconds=%.0f\n", len(bugs), caught, len(bugs)-caught, time.Since(began).Seconds())
	if caught < len(bugs) {
		return errors.Join(ctx.Err(), fmt.Errorf("%d of %d bugs were not noticed", len(bugs)-caught, len(bugs)))
	}
	return nil
}
