package mill

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

// Mill is the assembly of one service. Its methods are safe for concurrent use.
type Mill struct {
	db  *sql.DB
	cfg Config

	box       *outbox.Outbox
	worker    *relay.Relay
	letters   *dlq.Store
	consumers []*consumer
	keys      *idempotency.Engine

	answerLimit time.Duration

	started atomic.Bool
	running atomic.Bool
}

// New builds the parts that cfg describes. It does no I/O, unless a Consumer.Subscriber
// does. It reports the missing and invalid settings of all parts together, each as an
// [*oncemill.ConfigError]; those of subscribers when there are no others. The caller keeps
// ownership of db, which must stay open until Run has returned.
func New(db *sql.DB, cfg Config) (*Mill, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "mill.New db", Value: "nil", Problem: "is required"}
	}
	cfg, err := cfg.resolve()
	m := &Mill{db: db, cfg: cfg, answerLimit: answerLimit}
	if err := errors.Join(err, m.produce(), m.makeKeys(), m.makeInboxes()); err != nil {
		return nil, err
	}
	if err := m.makeSubscribers(); err != nil {
		return nil, errors.Join(err, m.closeSubscribers(context.Background())) //nolint:forbidigo // New has no context, and Close takes none
	}
	return m, nil
}

// produce creates the outbox and the relay.
func (m *Mill) produce() (err error) {
	if m.cfg.Outbox == nil {
		return nil
	}
	if m.box, err = outbox.New(m.db, *m.cfg.Outbox); err != nil {
		return err
	}
	if m.cfg.Sink != nil {
		m.worker, err = relay.New(m.box, m.cfg.Sink, m.cfg.Relay)
	}
	return err
}

func (m *Mill) makeKeys() error {
	if m.cfg.Idempotency == nil {
		return nil
	}
	store, err := idempotency.NewSQLStore(m.db, m.cfg.Keys)
	if err != nil {
		return err
	}
	cfg := *m.cfg.Idempotency
	if cfg.OnCommit == nil && m.box != nil {
		cfg.OnCommit = m.box.Wake
	}
	m.keys, err = idempotency.New(store, cfg)
	return err
}

// makeInboxes creates the dead letters and the consumers, without their subscribers.
func (m *Mill) makeInboxes() (err error) {
	m.letters, err = dlq.New(m.db, dlq.Config{Database: m.cfg.Database, Retention: m.cfg.Relay.LetterRetention})
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range m.cfg.Consumers {
		if c.Name == "" {
			continue // resolve has reported it
		}
		made, err := m.newConsumer(c)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		m.consumers = append(m.consumers, made)
	}
	return errors.Join(errs...)
}

func (m *Mill) makeSubscribers() error {
	var errs []error
	first := map[string]*consumer{} // by source
	for _, c := range m.consumers {
		if err := c.makeSubscriber(); err != nil {
			errs = append(errs, err)
			continue
		}
		source := c.source()
		if other := first[source]; other != nil {
			errs = append(errs, &oncemill.ConfigError{Field: "mill.Consumer.Subscriber", Value: source, Problem: fmt.Sprintf(
				"consumers %s and %s share this queue, so each message would reach only one of them; give each a queue of its own", other.Name, c.Name)})
		}
		if source != "" {
			first[source] = c
		}
	}
	return errors.Join(errs...)
}

// Outbox returns the outbox; nil without Config.Outbox.
func (m *Mill) Outbox() *outbox.Outbox { return m.box }

// Idempotency returns the engine of the idempotency keys; nil without Config.Idempotency.
func (m *Mill) Idempotency() *idempotency.Engine { return m.keys }

// Letters returns the dead letters of the relay and of all consumers.
func (m *Mill) Letters() *dlq.Store { return m.letters }

// Inbox returns the inbox of a consumer; nil if there is none of that name.
func (m *Mill) Inbox(consumer string) *inbox.Inbox {
	for _, c := range m.consumers {
		if c.Name == consumer {
			return c.inbox
		}
	}
	return nil
}

// Migrations returns the migrations of the tables that the service uses, for
// oncemill.Migrate. Run calls that itself.
func (m *Mill) Migrations() []oncemill.Migrations {
	var sets []oncemill.Migrations
	if m.box != nil {
		sets = append(sets, outbox.Migrations)
	}
	if m.worker != nil || len(m.consumers) > 0 {
		sets = append(sets, audit.Migrations, steer.Migrations, dlq.Migrations)
	}
	if m.worker != nil {
		sets = append(sets, relay.Migrations)
	}
	if len(m.consumers) > 0 {
		sets = append(sets, inbox.Migrations)
	}
	if m.keys != nil {
		sets = append(sets, m.keys.Migrations()...)
	}
	return sets
}

// Ready returns nil while every part works: the worker reaches database and broker, and
// every consumer receives messages. Use it for a readiness probe.
func (m *Mill) Ready() error {
	if !m.running.Load() {
		return ErrNotRunning
	}
	var errs []error
	if m.worker != nil {
		errs = append(errs, m.worker.Ready())
	}
	for _, c := range m.consumers {
		errs = append(errs, c.ready())
	}
	return errors.Join(errs...)
}
