package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/examples/internal/demo"
	"github.com/oncemill/oncemill/examples/shop"
	"github.com/oncemill/oncemill/outbox"
)

// runAPI takes orders over HTTP. It knows nothing of RabbitMQ: an order and its
// message are one commit in PostgreSQL.
func runAPI(ctx context.Context, args []string) error {
	var s settings
	flags := s.flags("api")
	listen := flags.String("listen", "127.0.0.1:8080", "address of the HTTP API")
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
	defer db.Close() //nolint:errcheck // every commit has been reported by then
	box, err := outbox.New(db, outbox.Config{Database: s.tables(), Logger: s.logger})
	if err != nil {
		return err
	}
	orders, err := shop.New(db, box, s.topic)
	if err != nil {
		return err
	}
	engine, err := shop.NewEngine(db, box, s.tables(), s.logger)
	if err != nil {
		return err
	}
	return s.runUnder(ctx, func(ctx context.Context, worker *demo.Worker) error {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", *listen)
		if err != nil {
			return err
		}
		address := "http://" + listener.Addr().String()
		s.logger.InfoContext(ctx, "taking orders", "address", address+"/orders")
		if worker != nil {
			if err := worker.Ready(address); err != nil {
				return err
			}
		}
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return engine.Run(ctx) }) // deletes what has expired
		group.Go(func() error { return serve(ctx, listener, orders.Handler(engine, s.logger)) })
		return group.Wait()
	})
}

// serve runs the API until ctx ends, then lets the requests under way finish.
func serve(ctx context.Context, listener net.Listener, handler http.Handler) error {
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
	return group.Wait()
}
