package mill

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/oncemill/oncemill"
)

const (
	// subscribeLimit is how long the relay waits for the consumers to subscribe: a broker
	// may have no queue for their topics before.
	subscribeLimit = 5 * time.Second

	// purgeInterval is the pause between two purges of dead letters, where there is no
	// relay that does it.
	purgeInterval = time.Hour

	// stopMargin is how long Run waits for parts beyond the limits that they have
	// themselves.
	stopMargin = 2 * time.Second
)

// Run creates the tables that are used, or checks them (Config.NoMigrate), and runs all of
// the service until ctx ends; then it returns nil. Parts of the caller's own run beside it:
// they return when their context ends. If one of them or one of the mill's fails, Run stops
// the others and returns its error. A part of the caller's that returns nil has done its
// work.
//
// When it stops, the caller's parts and the consumers go first and have Config.StopTimeout;
// the relay goes last. Messages that are in the outbox then are delivered by other workers,
// or after the next start. If something does not return, Run returns an error that matches
// [ErrStillRunning] and names it.
//
// While the broker is away, Run keeps trying; it ends with an error if the database cannot
// be reached at the start. It can be called once.
func (m *Mill) Run(ctx context.Context, parts ...func(ctx context.Context) error) error {
	if m.started.Swap(true) {
		return ErrRunning
	}
	log := m.cfg.Logger
	log.InfoContext(ctx, "oncemill starts", m.uses()...)
	if err := m.prepare(ctx); err != nil || ctx.Err() != nil {
		return errors.Join(err, m.closeSubscribers(ctx))
	}
	// The relay outlives the others.
	failed := newFailures()
	front, back := newStage(ctx, failed), newStage(context.WithoutCancel(ctx), failed)
	for i, part := range parts {
		front.start(fmt.Sprintf("argument %d of Run", i+1), part)
	}
	for _, c := range m.consumers {
		front.startEndless("consumer "+c.Name, func(ctx context.Context) error { return c.run(ctx, m.cfg.StopTimeout) })
		front.startEndless("inbox of "+c.Name, c.inbox.Run)
	}
	if m.worker != nil {
		back.startEndless("relay", func(ctx context.Context) error { m.awaitConsumers(ctx); return m.worker.Run(ctx) })
	} else if len(m.consumers) > 0 {
		back.startEndless("purge of dead letters", m.purge)
	}
	if m.keys != nil {
		back.startEndless("idempotency", m.keys.Run)
	}
	m.running.Store(true)
	select {
	case <-ctx.Done():
		log.InfoContext(ctx, "oncemill stops", "reason", context.Cause(ctx))
	case <-failed.first:
		log.ErrorContext(ctx, "oncemill stops", "reason", failed.joined())
	}
	m.running.Store(false) // no request comes any more, if a load balancer asks
	left := front.stop(m.cfg.StopTimeout + stopMargin)
	left = append(left, back.stop(m.cfg.Relay.StopTimeout+stopMargin)...)
	ended := context.WithoutCancel(ctx)
	if len(left) == 0 {
		log.InfoContext(ended, "oncemill stopped")
	} else {
		log.ErrorContext(ended, "oncemill stopped with parts still running", "still_running", left)
	}
	return errors.Join(failed.joined(), stillRunning(left))
}

func stillRunning(names []string) error {
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %q", ErrStillRunning, names)
}

// uses returns what is on.
func (m *Mill) uses() []any {
	consumers := make([]string, len(m.consumers))
	for i, c := range m.consumers {
		consumers[i] = c.Name
	}
	database := m.letters.Config().Database
	return []any{
		"outbox", m.box != nil, "relay", m.worker != nil, "consumers", consumers, "idempotency", m.keys != nil,
		"schema", database.Schema, "prefix", database.Prefix,
	}
}

// prepare creates or checks the tables. A database that is silent does not keep it when ctx
// has ended.
func (m *Mill) prepare(ctx context.Context) error {
	failed := newFailures()
	tables := newStage(ctx, failed)
	tables.start("migrations", func(ctx context.Context) error {
		if m.cfg.NoMigrate {
			return oncemill.CheckMigrated(ctx, m.db, m.cfg.Database, m.Migrations()...)
		}
		return oncemill.Migrate(ctx, m.db, m.cfg.Database, m.Migrations()...)
	})
	select {
	case <-tables.done():
	case <-ctx.Done():
	}
	left := tables.stop(stopMargin)
	return errors.Join(failed.joined(), stillRunning(left))
}

// closeSubscribers closes what Run has not started.
func (m *Mill) closeSubscribers(ctx context.Context) error {
	failed := newFailures()
	closing := newStage(context.WithoutCancel(ctx), failed)
	for _, c := range m.consumers {
		closing.start("subscriber of "+c.Name, func(context.Context) error { return c.subscriber.Close() })
	}
	left := closing.wait(m.cfg.StopTimeout)
	closing.cancel()
	return errors.Join(failed.joined(), stillRunning(left))
}

// awaitConsumers gives the consumers time to subscribe.
func (m *Mill) awaitConsumers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, subscribeLimit)
	defer cancel()
	for _, c := range m.consumers {
		select {
		case <-c.subscribed:
		case <-ctx.Done():
			return
		}
	}
}

// purge removes old dead letters.
func (m *Mill) purge(ctx context.Context) error {
	for {
		if _, err := m.letters.Purge(ctx); err != nil && ctx.Err() == nil {
			m.cfg.Logger.WarnContext(ctx, "dead letters not purged", "error", err)
		}
		select {
		case <-time.After(purgeInterval):
		case <-ctx.Done():
			return nil
		}
	}
}

// Serve returns a part for Run that serves HTTP, with TLS if server has a configuration for
// it. When it stops it takes no further requests and gives those in flight
// Config.StopTimeout.
func (m *Mill) Serve(server *http.Server) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		stopped := make(chan error, 1)
		stop := context.AfterFunc(ctx, func() {
			limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.cfg.StopTimeout)
			defer cancel()
			err := server.Shutdown(limited)
			if err != nil {
				err = errors.Join(err, server.Close())
			}
			stopped <- err
		})
		err := m.listenAndServe(ctx, server)
		if stop() {
			return fmt.Errorf("serve %s: %w", server.Addr, err)
		}
		if err := <-stopped; err != nil {
			return fmt.Errorf("stop serving %s: %w", server.Addr, err)
		}
		return nil
	}
}

func (m *Mill) listenAndServe(ctx context.Context, server *http.Server) error {
	address := server.Addr
	if address == "" {
		address = ":http"
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	m.cfg.Logger.InfoContext(ctx, "HTTP server listening", "address", listener.Addr().String())
	if server.TLSConfig != nil {
		return server.ServeTLS(listener, "", "")
	}
	return server.Serve(listener)
}
