package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/shop"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// Roles of a process.
const (
	roleAPI       = "api"       // accepts orders
	roleRelay     = "relay"     // publishes the messages of the outbox
	roleInventory = "inventory" // handles them
)

// job is the task of a process, passed as JSON in an environment variable. Everyone on the
// machine could read arguments, and it contains passwords.
type job struct {
	Embedded *embedded `json:",omitempty"` // one of the two sites
	Servers  *servers  `json:",omitempty"`
	Roles    []string
	NoDedup  bool
	Stage    string // where to pause, after that many messages
	After    int64
}

const jobVariable = "ONCEMILL_CHAOS_JOB"

// site is the processes' access to a database and a broker.
type site interface {
	open() (*sql.DB, error)
	database() oncemill.Config
	topic() string
	sink(*slog.Logger) (relay.Sink, error)
	consumer(*slog.Logger) (mill.Consumer, error) // without Name and Handler
}

func (j job) site() site {
	if j.Servers != nil {
		return j.Servers
	}
	return j.Embedded
}

// work runs a process until it is killed, ctx ends, or standard input is closed.
func work(ctx context.Context, text string) (err error) {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	go func() { // ends with the process: a read of standard input cannot be canceled
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	db, err := j.site().open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg, err := j.config(db, logger)
	if err != nil {
		return err
	}
	m, err := mill.New(db, cfg)
	if err != nil {
		return err
	}
	if !slices.Contains(j.Roles, roleAPI) {
		return m.Run(ctx, func(ctx context.Context) error { return ready(ctx, m, "") })
	}
	orders, err := shop.New(db, m.Outbox(), j.site().topic())
	if err != nil {
		return err
	}
	address := make(chan string, 1)
	server := &http.Server{
		Addr: "127.0.0.1:0", Handler: orders.Handler(m.Idempotency(), logger), ReadHeaderTimeout: 10 * time.Second,
		BaseContext: func(l net.Listener) context.Context {
			address <- l.Addr().String()
			return context.WithoutCancel(ctx)
		},
	}
	return m.Run(ctx, m.Serve(server), func(ctx context.Context) error {
		select {
		case at := <-address:
			return ready(ctx, m, at)
		case <-ctx.Done():
			return nil
		}
	})
}

// config assembles the roles of the process.
func (j job) config(db *sql.DB, logger *slog.Logger) (cfg mill.Config, err error) {
	cfg.Database, cfg.Logger = j.site().database(), logger
	pause := &pause{job: j}
	if slices.Contains(j.Roles, roleAPI) {
		cfg.Outbox, cfg.Idempotency = &outbox.Config{}, shop.Idempotency()
	}
	if slices.Contains(j.Roles, roleRelay) {
		sink, err := j.site().sink(logger)
		if err != nil {
			return mill.Config{}, err
		}
		cfg.Outbox, cfg.Sink = &outbox.Config{}, pausingSink{sink, pause}
		cfg.Relay.Lease = 2 * time.Second // short, so that the demo does not take long
	}
	if slices.Contains(j.Roles, roleInventory) {
		inventory, err := shop.NewInventory(db)
		if err != nil {
			return mill.Config{}, err
		}
		consumer, err := j.site().consumer(logger)
		if err != nil {
			return mill.Config{}, err
		}
		consumer.Name, consumer.Topic = roleInventory, j.site().topic()
		consumer.Handler = func(msg *message.Message) ([]*message.Message, error) { return nil, inventory.Handle(msg) }
		consumer.Middleware = []message.HandlerMiddleware{pause.middleware}
		if j.NoDedup {
			consumer.Inbox.ID = func(*message.Message) string { return watermill.NewUUID() }
		}
		cfg.Consumers = []mill.Consumer{consumer}
	}
	return cfg, nil
}

// ready reports to the parent when the process is ready.
func ready(ctx context.Context, m *mill.Mill, address string) error {
	if until(ctx, func() (bool, error) { return m.Ready() == nil, nil }) == nil {
		_, err := fmt.Println("ready " + address)
		return err
	}
	return nil // it stops
}

// Stages at which a process can pause to be killed.
const (
	// stageRelay is after the broker's confirm and before the relay gets it: the message is
	// both in the broker and in the outbox.
	stageRelay = "relay"

	// stageConsumer is after the commit of the effect, before the acknowledgement: the
	// broker will deliver the message again.
	stageConsumer = "consumer"
)

// pause is the pause that the job requests.
type pause struct {
	job
	passed atomic.Int64
	first  sync.Once
}

var errPaused = errors.New("paused for a kill that did not come")

// due reports whether the caller has to pause at stage with message id. The first one is
// reported to the parent, which kills the process.
func (p *pause) due(stage, id string) bool {
	if stage != p.Stage || p.passed.Add(1) <= p.After {
		return false
	}
	p.first.Do(func() { fmt.Println("paused " + id) })
	return true
}

// pausingSink is a sink that pauses at [stageRelay].
type pausingSink struct {
	relay.Sink
	pause *pause
}

func (s pausingSink) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	s.Sink.Publish(ctx, msgs, func(m *relay.Message, err error) {
		if err != nil || !s.pause.due(stageRelay, m.MessageID) {
			done(m, err)
			return
		}
		// A sink must report an outcome by the end of ctx.
		context.AfterFunc(ctx, func() { done(m, relay.Unavailable(errPaused)) })
	})
}

// middleware pauses at [stageConsumer]. It runs around the inbox.
func (p *pause) middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := h(msg)
		if err == nil && p.due(stageConsumer, msg.UUID) {
			<-msg.Context().Done()
			return nil, errPaused
		}
		return produced, err
	}
}
