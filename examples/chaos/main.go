// Command chaos checks the promises of oncemill. It runs the shop of package shop with 10,000
// orders, kills its processes again and again, and checks the tables and the messages:
//
//	go run ./chaos             SQLite and an embedded NATS JetStream server; one process
//	go run ./chaos -servers    PostgreSQL and RabbitMQ; API, relay and inventory are processes
//
// The parent posts the orders (customers.go), starts and kills the processes (run.go,
// process.go) and checks the result (check.go). It starts its own executable for them
// (worker.go), on one of two sites (embedded.go, servers.go). The check shares no code with
// the library: it reads the tables with SQL and the messages with the broker's client.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/oncemill/oncemill/examples/data"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case errors.Is(err, errBroken): // the last line has shown it
		os.Exit(1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1)
	}
}

var errNoServers = errors.New("-servers needs PostgreSQL and RabbitMQ: set -postgres and -amqp, " +
	`or run first: eval "$(scripts/servers.sh up)"`)

func run(ctx context.Context, args []string, out *os.File) error {
	if text := os.Getenv(jobVariable); text != "" {
		return work(ctx, text)
	}
	flags := flag.NewFlagSet("chaos", flag.ContinueOnError)
	onServers := flags.Bool("servers", false, "run on PostgreSQL and RabbitMQ")
	postgres := flags.String("postgres", os.Getenv("ONCEMILL_TEST_POSTGRES"), "postgres:// URL of the database, for -servers")
	amqp := flags.String("amqp", os.Getenv("ONCEMILL_TEST_AMQP"), "amqp:// URL of RabbitMQ, for -servers")
	file := flags.String("orders", "", "file of orders, JSON Lines, maybe .gz (default: the 10,000 that come with the examples)")
	noDedup := flags.Bool("no-dedup", false, "let the inbox recognize no message, to see that the check can fail")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *onServers && (*postgres == "" || *amqp == "") {
		return errNoServers
	}
	began := time.Now()
	orders, err := data.Load(*file)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "oncemill-chaos-")
	if err != nil {
		return err
	}
	prepare := func() (*setup, error) { return prepareEmbedded(ctx, dir) }
	if *onServers {
		prepare = func() (*setup, error) { return prepareServers(ctx, *postgres, *amqp) }
	}
	show := newProgress(out)
	result, err := prove(ctx, dir, prepare, orders, !*noDedup, show)
	if err != nil {
		return fmt.Errorf("%w (logs are kept in %s)", err, dir)
	}
	return errors.Join(os.RemoveAll(dir), show.finish(result, time.Since(began)))
}
