package mill

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sleep"
)

const (
	// answerLimit is how long the database may take for its first answer.
	answerLimit = 30 * time.Second

	// subscribeLimit is how long the relay waits for the consumers to subscribe. Before
	// that the broker may have no queue for their topics.
	subscribeLimit = 5 * time.Second

	// purgeInterval is the pause between two purges of dead letters without a relay, which
	// would purge them.
	purgeInterval = time.Hour

	// stopMargin is how long Run waits for parts beyond their own limits.
	stopMargin = 2 * time.Second
)

// Run creates the tables that are used, or checks them (Config.NoMigrate), and runs the
// service until ctx ends. Then it returns nil. It also runs the caller's parts, which must
// return when their context ends. If a part fails, Run stops the others and returns its
// error. A caller's part may return nil early.
//
// Run stops the caller's parts and the consumers first, within Config.StopTimeout, and the
// relay last. Other workers, or the next start, deliver the messages that are left in the
// outbox. If a part does not return, Run returns an error that matches [ErrStillRunning] and
// names the part.
//
// Run retries while the broker is unavailable. It returns an error if the database cannot be
// reached at the start, or does not answer for 30 s. Call it once.
func (m *Mill) Run(ctx context.Context, parts ...func(ctx context.Context) error) error {
	if m.started.Swap(true) {
		return ErrRunning
	}
	log := m.cfg.Logger
	log.InfoContext(ctx, "service starting", m.uses()...)
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
		log.InfoContext(ctx, "service stopping", "reason", context.Cause(ctx))
	case <-failed.first:
		log.ErrorContext(ctx, "part failed; service stopping", "reason", failed.joined())
	}
	m.running.Store(false) // so that load balancers send no more requests
	left := front.stop(m.cfg.StopTimeout + stopMargin)
	left = append(left, back.stop(m.cfg.Relay.StopTimeout+stopMargin)...)
	ended := context.WithoutCancel(ctx)
	if len(left) == 0 {
		log.InfoContext(ended, "service stopped")
	} else {
		log.ErrorContext(ended, "service stopped with parts still running", "still_running", left)
	}
	return errors.Join(failed.joined(), stillRunning(left))
}

func stillRunning(names []string) error {
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %q", ErrStillRunning, names)
}

// uses returns the parts in use, as log attributes.
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

// prepare creates or checks the tables. It returns when ctx ends, even if the database is
// silent.
func (m *Mill) prepare(ctx context.Context) error {
	failed := newFailures()
	tables := newStage(ctx, failed)
	silence := time.AfterFunc(m.answerLimit, func() { failed.add(errSilent) })
	defer silence.Stop()
	tables.start("migrations", func(ctx context.Context) error {
		if err := m.db.PingContext(ctx); err != nil {
			return err
		}
		silence.Stop()
		if m.cfg.NoMigrate {
			return oncemill.CheckMigrated(ctx, m.db, m.cfg.Database, m.Migrations()...)
		}
		return oncemill.Migrate(ctx, m.db, m.cfg.Database, m.Migrations()...)
	})
	select {
	case <-tables.done():
	case <-failed.first:
	case <-ctx.Done():
	}
	left := tables.stop(stopMargin)
	return errors.Join(failed.joined(), stillRunning(left))
}

// closeSubscribers closes the subscribers of a service that was not started.
func (m *Mill) closeSubscribers(ctx context.Context) error {
	failed := newFailures()
	closing := newStage(context.WithoutCancel(ctx), failed)
	for _, c := range m.consumers {
		if c.subscriber == nil {
			continue // it could not be made
		}
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
		if !sleep.For(ctx, purgeInterval) {
			return nil
		}
	}
}

// Serve returns a part for Run that serves HTTP, or HTTPS if server.TLSConfig is set. When
// it stops, it accepts no more requests, and those in flight have Config.StopTimeout.
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
