// Command crucible is the torture test of oncemill: real producers, relay workers and consumers
// on a PostgreSQL and a RabbitMQ of their own, a nemesis that hurts all of them at once, and
// checkers that share no code with the library.
//
//	make crucible                              3 minutes, a seed of the day's chance
//	make crucible CRUCIBLE_TIME=60s CRUCIBLE_SEED=7
//
// The parent starts the servers, proxies in front of them (site.go), and this executable again
// for each process (package work). Every process writes a history (package history). The
// nemesis (faults.go, package nemesis) follows a plan made from the seed. At the end the faults
// are healed, the backlog drains (drain.go), and the checkers (package check) read histories,
// tables and the record of the wire. The exit code is 1 if a promise is broken.
// docs/crucible.md explains the checkers and the faults.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/oncemill/oncemill/crucible/work"
)

// options are those of the command line.
type options struct {
	time  time.Duration
	seed  uint64
	out   string
	keep  string
	rate  float64
	lease time.Duration
	calm  bool
	only  string
	rival string

	cluster     string
	upgradeFrom string
}

var errBroken = errors.New("a promise is broken")

func main() {
	if job := os.Getenv(work.Variable); job != "" {
		if err := work.Run(job); err != nil {
			fmt.Fprintln(os.Stderr, "crucible:", err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.DurationVar(&o.time, "time", 0, "how long to produce and to hurt; servers and the drain take about a minute more. 0 is 3m, and with -cluster one round of its faults")
	flag.Uint64Var(&o.seed, "seed", 0, "`seed` of workload and faults; 0 draws one")
	flag.StringVar(&o.out, "out", "crucible.json", "`file` for the result as JSON")
	flag.StringVar(&o.keep, "keep", "", "`directory` in which histories and logs stay; default: kept only after a failure")
	flag.Float64Var(&o.rate, "rate", 170, "transactions a second")
	flag.DurationVar(&o.lease, "lease", 3*time.Second, "lease of the relays; everything has to move within two")
	flag.BoolVar(&o.calm, "calm", false, "inject no fault, to see what the workload alone does")
	flag.StringVar(&o.only, "only", "", "inject only the kinds of faults that match this regular `expression`")
	flag.StringVar(&o.rival, "rival", "", "instead of oncemill, hurt `skip-locked` or forwarder, and say what it loses, doubles and reorders")
	flag.StringVar(&o.cluster, "cluster", "", "run on three `nodes` of postgres (synchronously replicated), postgres-async or rabbitmq (quorum queues), and hurt the nodes")
	flag.StringVar(&o.upgradeFrom, "upgrade-from", "", "begin with this older `build` of the crucible; migrate in the middle, and replace one process after the other")
	flag.Parse()
	if o.cluster != "" && !slices.Contains(clusters, o.cluster) {
		fmt.Fprintf(os.Stderr, "crucible: -cluster %q: must be one of %s\n", o.cluster, strings.Join(clusters, ", "))
		os.Exit(2)
	}
	if o.time == 0 && (o.cluster == "" || o.calm || o.upgradeFrom != "") {
		o.time = 3 * time.Minute
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := start(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "crucible:", err)
		os.Exit(1)
	}
}

func start(ctx context.Context, o options) (err error) {
	if o.seed == 0 {
		o.seed = 1 + uint64(rand.Uint32())
	}
	dir := o.keep
	if dir == "" {
		if dir, err = os.MkdirTemp("", "oncemill-crucible-"); err != nil {
			return err
		}
	} else if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if found, err := os.ReadDir(dir); err != nil {
		return err
	} else if len(found) > 0 { // a run adds to histories, and would be judged by those of another one
		return fmt.Errorf("-keep: %s is not empty: name a directory that is, or that does not exist", dir)
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o711); err != nil { // PostgreSQL may run as another user
		return err
	}
	// So that no other run of the script takes the servers for abandoned ones.
	if err := os.Setenv("ONCEMILL_SERVERS_DIR", filepath.Join(dir, "servers")); err != nil {
		return err
	}
	if err := run(ctx, o, dir); err != nil {
		return fmt.Errorf("%w; histories and logs are in %s", err, dir)
	}
	if o.keep == "" {
		return os.RemoveAll(dir)
	}
	return nil
}
