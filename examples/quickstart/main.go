package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/oncemill/oncemill/examples/internal/demo"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case errors.Is(err, demo.ErrBroken): // the last line has said it
		os.Exit(1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == "demo" {
		return runDemo(ctx, args[1:], os.Stdout)
	}
	if len(args) > 0 && args[0] == "service" {
		return runService(ctx, args[1:])
	}
	return runQuickstart(ctx, args, os.Stdout)
}

// runQuickstart runs the broker and the service in this process.
func runQuickstart(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	dir := flags.String("dir", filepath.Join(os.TempDir(), "oncemill-quickstart"), "directory of the SQLite file and of the broker's files")
	listen := flags.String("listen", "127.0.0.1:8080", "address of the HTTP API")
	if err := flags.Parse(args); err != nil {
		return err
	}
	broker, err := startBroker(filepath.Join(*dir, "jetstream"))
	if err != nil {
		return err
	}
	defer broker.stop()
	s := service{
		database: filepath.Join(*dir, "shop.db"),
		broker:   broker.url(),
		listen:   *listen,
		inbox:    true,
		logger:   slog.New(slog.NewTextHandler(os.Stderr, nil)),
		ready:    func(address string) error { return welcome(out, *dir, address) },
		booked: func(order, customer string) {
			_, _ = fmt.Fprintf(out, "booked  order %s of %s\n", order, customer) // a terminal that has gone stops no shop
		},
	}
	return s.run(ctx)
}

func welcome(out io.Writer, dir, address string) error {
	_, err := fmt.Fprintf(out, `
The shop is open at %[1]s; its files are in %[2]s.

Place an order:

  curl -i %[1]s/orders -d '{"id": "order-1", "customer": "ana", "placed_at": "2026-11-21T12:00:00Z",
    "items": [{"sku": "SKU-1001", "quantity": 2, "price_cents": 2190}], "note": "ring twice"}'

Its effect shows up below, and here:       curl %[1]s/stock
Repeat the order: it changes nothing.      Stop with Ctrl-C, or with kill -9.

Proof under fire, with 10,000 orders:      go run ./quickstart demo

`, address, dir)
	return err
}

// runService runs the service without the broker: what the demo kills.
func runService(ctx context.Context, args []string) error {
	s := service{listen: "127.0.0.1:0", logger: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	flags := flag.NewFlagSet("quickstart service", flag.ContinueOnError)
	flags.StringVar(&s.database, "database", "", "path of the SQLite file")
	flags.StringVar(&s.broker, "broker", "", "URL of the broker")
	flags.BoolVar(&s.inbox, "inbox", true, "remove duplicates")
	parent := flags.String("parent", "", "address of the demo that started this process")
	if err := flags.Parse(args); err != nil {
		return err
	}
	return s.runUnder(ctx, *parent)
}
