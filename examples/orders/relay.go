package main

import (
	"context"
	"time"

	"github.com/oncemill/oncemill/examples/internal/demo"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// runRelay hands what the outbox owes to RabbitMQ. Any number of these may run;
// they share the work. The command oncemill has it ready-made: oncemill relay.
func runRelay(ctx context.Context, args []string) error {
	var s settings
	flags := s.flags("relay")
	lease := flags.Duration("lease", 0, "how long the lanes of a killed relay wait for another (0: the library's default)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return err
	}
	db, err := s.open()
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // the relay has stopped by then
	box, err := outbox.New(db, outbox.Config{Database: s.tables(), Logger: s.logger})
	if err != nil {
		return err
	}
	rabbit, err := rabbitmq.New(s.rabbit(), rabbitmq.Config{Logger: s.logger})
	if err != nil {
		return err
	}
	return s.runUnder(ctx, func(ctx context.Context, worker *demo.Worker) error {
		var sink relay.Sink = rabbit
		if worker != nil {
			sink = worker.Sink(sink)
		}
		r, err := relay.New(box, sink, relay.Config{Lease: *lease, Logger: s.logger})
		if err != nil {
			return err
		}
		if worker != nil {
			if err := worker.Ready(""); err != nil {
				return err
			}
		}
		return r.Run(ctx)
	})
}

// demoLease is short for an audience that does not like to wait.
const demoLease = 2 * time.Second
