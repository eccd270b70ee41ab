package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/examples/data"
	"github.com/oncemill/oncemill/examples/shop"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// service is the whole shop but its broker.
type service struct {
	database string // path of the SQLite file
	broker   string // URL of the NATS server
	listen   string // address of the API
	inbox    bool   // false: effects without an inbox, to see what happens then
	logger   *slog.Logger

	ready  func(address string) error   // called once the API can be
	booked func(order, customer string) // called after each effect
	sink   func(relay.Sink) relay.Sink  // around the way to the broker; nil for none
	around []message.HandlerMiddleware  // around the inbox
}

// run opens the database, wires the blocks and runs them until ctx ends.
func (s service) run(ctx context.Context) error {
	db, err := s.open(ctx)
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // every commit has been reported by then

	// Writing: the API and its outbox.
	box, err := outbox.New(db, outbox.Config{Logger: s.logger})
	if err != nil {
		return err
	}
	orders, err := shop.New(db, box, topic)
	if err != nil {
		return err
	}
	engine, err := shop.NewEngine(db, box, oncemill.Config{}, s.logger)
	if err != nil {
		return err
	}

	// Relaying: what the outbox owes goes to the broker.
	publisher, err := newPublisher(s.broker, s.logger)
	if err != nil {
		return err
	}
	defer publisher.Close() //nolint:errcheck // the relay has stopped, nothing is in flight
	sink := relay.FromPublisher(publisher)
	if s.sink != nil {
		sink = s.sink(sink)
	}
	worker, err := relay.New(box, sink, relay.Config{Lease: lease, Logger: s.logger})
	if err != nil {
		return err
	}

	// Consuming: each message has its effect once.
	once, forget, err := s.dedup(db)
	if err != nil {
		return err
	}
	router, err := s.router(db, once)
	if err != nil {
		return err
	}

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return worker.Run(ctx) })
	group.Go(func() error { return router.Run(ctx) })
	group.Go(func() error { return forget(ctx) })     // removes old ids
	group.Go(func() error { return engine.Run(ctx) }) // deletes what has expired
	group.Go(func() error { return s.serve(ctx, orders.Handler(engine, s.logger)) })
	return group.Wait()
}

// lease is how long a relay that was killed keeps its lanes from its successor.
// A service without an impatient audience leaves it at its default.
const lease = 2 * time.Second

func (s service) open(ctx context.Context) (*sql.DB, error) {
	if err := os.MkdirAll(filepath.Dir(s.database), 0o700); err != nil {
		return nil, err
	}
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(s.database))
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	db.SetMaxIdleConns(8) // readers work beside the one writer
	err = oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations, idempotency.Migrations)
	if err == nil {
		err = shop.CreateTables(ctx, db)
	}
	if err == nil {
		err = shop.AddProducts(ctx, db, data.Catalogue())
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// serve runs the API until ctx ends, then lets the requests under way finish.
func (s service) serve(ctx context.Context, handler http.Handler) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", s.listen)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		patience, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return server.Shutdown(patience)
	})
	if err := s.ready("http://" + listener.Addr().String()); err != nil {
		return errors.Join(err, server.Close(), group.Wait())
	}
	return group.Wait()
}
