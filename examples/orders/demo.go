package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/examples/data"
	"github.com/oncemill/oncemill/examples/internal/demo"
	"github.com/oncemill/oncemill/examples/shop"
)

// runDemo runs the shop on servers that others may use too: its schemas, its
// exchange and its queues are its own, and gone afterwards.
func runDemo(ctx context.Context, args []string, out *os.File) error {
	var s settings
	flags := s.flags("demo")
	file := flags.String("orders", "", "file of orders, JSON Lines, maybe .gz (default: the 10,000 that come with the examples)")
	noInbox := flags.Bool("no-inbox", false, "handle messages without the inbox, to see what happens")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return err
	}
	began := time.Now()
	orders, err := data.Load(*file)
	if err != nil {
		return err
	}
	name := "demo_" + strings.ToLower(rand.Text()[:10])
	s.schema, s.topic = name, name
	logs, err := os.MkdirTemp("", "oncemill-demo-")
	if err != nil {
		return err
	}
	progress := demo.NewProgress(out)
	verdict, err := s.proof(ctx, logs, orders, !*noInbox, progress)
	if err != nil {
		return fmt.Errorf("%w (logs kept in %s)", err, logs)
	}
	return errors.Join(os.RemoveAll(logs), progress.Finish(verdict, time.Since(began)))
}

func (s *settings) proof(ctx context.Context, logs string, orders []shop.Order, inbox bool, progress demo.Progress) (verdict demo.Verdict, err error) {
	db, err := s.open()
	if err != nil {
		return demo.Verdict{}, err
	}
	defer func() { err = errors.Join(err, s.dropSchemas(ctx, db), db.Close()) }()
	if err := s.migrate(ctx); err != nil {
		return demo.Verdict{}, err
	}
	mirror, err := newMirror(s.amqp, s.topic, s.subscription())
	if err != nil {
		return demo.Verdict{}, err
	}
	defer func() { err = errors.Join(err, mirror.close()) }()

	inventory := s.process(logs, "inventory", fmt.Sprintf("-inbox=%t", inbox))
	relay := s.process(logs, "relay", "-lease", demoLease.String())
	api := s.process(logs, "api", "-listen", "127.0.0.1:0")
	run := demo.Demo{
		Orders:    orders,
		Products:  data.Catalogue(),
		Processes: []*demo.Process{inventory, relay, api},
		API:       api,
		Faults: []demo.Fault{
			{Taken: 0.10, Process: relay, Stage: demo.StageRelay},
			{Taken: 0.25, Process: inventory, Stage: demo.StageConsumer},
			{Taken: 0.40, Process: relay},
			{Taken: 0.55, Process: api},
			{Taken: 0.70, Process: inventory},
			{Taken: 0.85, Process: relay, Stage: demo.StageRelay},
			{Booked: 0.50, Process: inventory, Stage: demo.StageConsumer},
			{Booked: 0.80, Process: inventory},
		},
		DB:       db,
		Owed:     "select count(*) from " + pq.QuoteIdentifier(s.tables().Schema) + ".outbox",
		Broker:   mirror,
		Progress: progress,
	}
	return run.Run(ctx)
}

// process is this command's sibling, on the same servers and names. The URLs go
// by the environment: arguments can be read by everyone on the machine.
func (s *settings) process(logs, command string, args ...string) *demo.Process {
	return &demo.Process{
		Name: command,
		Args: append([]string{command, "-schema", s.schema, "-topic", s.topic}, args...),
		Env:  []string{"ONCEMILL_TEST_POSTGRES=" + s.postgres, "ONCEMILL_TEST_AMQP=" + s.amqp},
		Log:  filepath.Join(logs, command+".log"),
	}
}

func (s *settings) dropSchemas(ctx context.Context, db *sql.DB) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	_, err := db.ExecContext(ctx, "drop schema if exists "+
		pq.QuoteIdentifier(s.schema)+", "+pq.QuoteIdentifier(s.tables().Schema)+" cascade")
	if err != nil {
		return fmt.Errorf("drop the demo's schemas: %w", err)
	}
	return nil
}
