// Command bench compares oncemill with other ways to do the same, on this machine and
// in one run:
//
//	make bench                              # the table of docs/bench
//	make bench-long                         # more rounds, and the rows that grow
//	cd internal/bench
//	go run . -rows relay-engine -pairs 1    # what one row needs, once
//
// It starts a PostgreSQL and a RabbitMQ, with fsync on, and removes them at the end.
// Our side, and every client of the other sides, run in this process.
//
// A run fails if a message is missing, doubled, damaged or out of order. A goal that is
// not reached is reported, but is no failure. docs/bench/method.md explains how the
// figures are made.
//
// scenario.go is the harness. The files named after rows hold the scenarios.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	_ "github.com/lib/pq" // the driver that both sides use
)

// bench is what the scenarios share.
type bench struct {
	postgres string // URL
	amqp     string // URI
	db       *sql.DB
	traffic  *traffic
	pairs    int
	log      *slog.Logger
	progress *progress
	ends     []func() error // of the scenario that is measured
}

const (
	usualPairs = 3
	longPairs  = 5
	idleConns  = 16
)

func main() {
	var o options
	flag.StringVar(&o.rows, "rows", "", "comma-separated `ids` of rows to run, with those that share their runs; default: all")
	flag.IntVar(&o.pairs, "pairs", 0, fmt.Sprintf("`rounds` of each row; default: %d, or %d with -long", usualPairs, longPairs))
	flag.BoolVar(&o.long, "long", false, "more rounds, and the rows that take minutes")
	flag.StringVar(&o.out, "out", "", "`file` for the results as JSON")
	flag.StringVar(&o.docs, "docs", "", "`directory` for the table and the plot")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type options struct {
	rows, out, docs string
	pairs           int
	long            bool
}

func run(ctx context.Context, o options) (err error) {
	chosen, err := choose(o.rows, o.long)
	if err != nil {
		return err
	}
	switch {
	case o.pairs < 0:
		return fmt.Errorf("-pairs %d: must be at least 1", o.pairs)
	case o.pairs == 0 && o.long:
		o.pairs = longPairs
	case o.pairs == 0:
		o.pairs = usualPairs
	}
	b := &bench{traffic: newTraffic(keyCount), pairs: o.pairs, progress: newProgress(os.Stderr, chosen, o.pairs)}
	b.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	b.progress.say("starting PostgreSQL and RabbitMQ")
	stop, err := b.startServers(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if b.db, err = b.open(idleConns, ""); err != nil {
		return err
	}
	defer b.db.Close()
	rep, err := b.newReport(ctx)
	if err != nil {
		return err
	}
	if err := b.migrate(ctx, ""); err != nil {
		return err
	}
	for _, s := range chosen {
		results, err := b.measure(ctx, s)
		if err != nil {
			return fmt.Errorf("%s: %w", s.id, err)
		}
		rep.Rows = append(rep.Rows, results...)
	}
	return rep.write(os.Stdout, o.out, o.docs)
}

// choose returns the scenarios of the named rows, in the order given; if none are named,
// all of them, with the long ones only if asked for.
func choose(list string, long bool) (chosen []scenario, err error) {
	if list == "" {
		for _, s := range scenarios() {
			if long || !s.long {
				chosen = append(chosen, s)
			}
		}
		return chosen, nil
	}
	var have []string
	for id := range strings.SplitSeq(list, ",") {
		var known []string
		for _, s := range scenarios() {
			named := s.rowIDs()
			known = append(known, named...)
			if !slices.Contains(named, id) {
				continue
			}
			if !slices.Contains(have, s.id) { // two rows may share their runs
				chosen = append(chosen, s)
			}
			have = append(have, s.id, id)
		}
		if !slices.Contains(have, id) {
			return nil, fmt.Errorf("-rows: there is no row %q; there are %s", id, strings.Join(known, ", "))
		}
	}
	return chosen, nil
}

// scenarios are run in this order.
func scenarios() []scenario {
	return []scenario{
		toRabbitMQ(), engine(), wal(), publish(), latency(), idle(), scaleOut(),
		posting(), consuming(), hot(), poison(),
		growthBacklog(), growthXmin(), growthKeys(), growthInbox(),
	}
}
