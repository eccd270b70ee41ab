package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/data"
	"github.com/oncemill/oncemill/examples/internal/demo"
	"github.com/oncemill/oncemill/examples/shop"
	"github.com/oncemill/oncemill/relay"
)

// runDemo hosts the broker, runs the service as another process, kills it again
// and again, and checks what is left.
func runDemo(ctx context.Context, args []string, out *os.File) error {
	flags := flag.NewFlagSet("quickstart demo", flag.ContinueOnError)
	file := flags.String("orders", "", "file of orders, JSON Lines, maybe .gz (default: the 10,000 that come with the examples)")
	noInbox := flags.Bool("no-inbox", false, "handle messages without the inbox, to see what happens")
	if err := flags.Parse(args); err != nil {
		return err
	}
	began := time.Now()
	orders, err := data.Load(*file)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "oncemill-demo-")
	if err != nil {
		return err
	}
	progress := demo.NewProgress(out)
	verdict, err := proof(ctx, dir, orders, !*noInbox, progress)
	if err != nil {
		return fmt.Errorf("%w (files kept in %s)", err, dir)
	}
	return errors.Join(os.RemoveAll(dir), progress.Finish(verdict, time.Since(began)))
}

func proof(ctx context.Context, dir string, orders []shop.Order, inbox bool, progress demo.Progress) (verdict demo.Verdict, err error) {
	broker, err := startBroker(filepath.Join(dir, "jetstream"))
	if err != nil {
		return demo.Verdict{}, err
	}
	defer broker.stop()
	wire, err := newWire(broker.url())
	if err != nil {
		return demo.Verdict{}, err
	}
	defer wire.close()
	database := filepath.Join(dir, "shop.db")
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(database))
	if err != nil {
		return demo.Verdict{}, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()

	process := &demo.Process{
		Name: "service",
		Args: []string{"service", "-database", database, "-broker", broker.url(), fmt.Sprintf("-inbox=%t", inbox)},
		Log:  filepath.Join(dir, "service.log"),
	}
	run := demo.Demo{
		Orders:    orders,
		Products:  data.Catalogue(),
		Processes: []*demo.Process{process},
		API:       process,
		Faults: []demo.Fault{
			{Taken: 0.10, Process: process, Stage: demo.StageRelay},
			{Taken: 0.30, Process: process},
			{Taken: 0.50, Process: process, Stage: demo.StageRelay},
			{Taken: 0.70, Process: process, Stage: demo.StageConsumer},
			{Taken: 0.85, Process: process, Stage: demo.StageRelay},
			{Booked: 0.30, Process: process, Stage: demo.StageConsumer},
			{Booked: 0.60, Process: process},
			{Booked: 0.80, Process: process, Stage: demo.StageConsumer},
		},
		DB:       db,
		Owed:     "select count(*) from oncemill_outbox",
		Broker:   wire,
		Progress: progress,
	}
	return run.Run(ctx)
}

// runUnder runs the service with a line to the demo that started it.
func (s service) runUnder(ctx context.Context, parent string) error {
	worker, err := demo.Dial(ctx, parent)
	if err != nil {
		return err
	}
	s.ready = worker.Ready
	s.sink = func(inner relay.Sink) relay.Sink { return worker.Sink(inner) }
	s.around = append(s.around, worker.Middleware)
	return worker.Run(ctx, s.run)
}
