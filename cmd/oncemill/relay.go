package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/propagation"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
	"github.com/oncemill/oncemill/status"
)

type relayOptions struct {
	amqp     amqpOptions
	topology string
	history  time.Duration
	notify   bool
	listen   string
	readyLag time.Duration
	pprof    bool
	order    string
	holdKey  bool
	relay    relay.Config
	rabbitmq rabbitmq.Config
}

func newRelay(opts *options) *cobra.Command {
	var o relayOptions
	cmd := &cobra.Command{
		Use:   "relay",
		Short: "Run a worker that delivers the outbox to RabbitMQ until it is stopped",
		Long: `Run a worker that delivers the messages of the outbox to RabbitMQ. Start as many
workers as you like; they share the work by leases. SIGTERM or SIGINT stops a
worker cleanly: it waits for messages in flight and hands over its lanes. A second
signal ends it at once.

--listen serves metrics for Prometheus. The standard variables of OpenTelemetry, such as
OTEL_EXPORTER_OTLP_ENDPOINT, make the worker send metrics and traces to a collector as
well, by OTLP over HTTP.`,
		Example: `  oncemill relay --database postgres://app@localhost/shop --amqp-url amqp://localhost`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := opts.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return opts.database.with(func(db *sql.DB, cfg oncemill.Config) error {
				return o.run(cmd, db, cfg, opts.database.url, log)
			})
		},
	}
	flags := cmd.Flags()
	o.amqp.register(flags)
	flags.StringVar(&o.topology, "topology", "pubsub", "what a topic is: pubsub (a durable fanout exchange) or queue (a durable queue)")
	flags.DurationVar(&o.history, "history", 24*time.Hour, "how long delivered messages are kept; 0 keeps none")
	flags.StringVar(&o.listen, "listen", "", "address to serve /healthz, /readyz, /status and /metrics at, such as 127.0.0.1:9464; it has no authentication (default: none)")
	flags.DurationVar(&o.readyLag, "ready-lag", 0, "/readyz of --listen fails while a message has waited in the outbox, or set aside in parked, for longer than this; all workers then fail (default: no limit)")
	flags.BoolVar(&o.pprof, "pprof", false, "serve profiles of the process at /debug/pprof/ of --listen, for whoever reaches it")
	flags.BoolVar(&o.notify, "notify", false, "let producers with an outbox.Notifier wake this worker; --database must not be a pooler")
	flags.StringVar(&o.relay.Name, "name", "", "name shown to operators (default: the host's name)")
	flags.BoolVar(&o.relay.UniqueName, "unique-name", false, "take over the lanes of a crashed worker of the same --name at once; no two running workers may share the name")
	flags.DurationVar(&o.relay.Lease, "lease", 15*time.Second, "after how long others take over a dead worker's lanes; use the same value for all workers")
	flags.DurationVar(&o.relay.StopTimeout, "stop-timeout", 10*time.Second, "how long a clean stop waits for messages in flight")
	flags.DurationVar(&o.relay.PollMin, "poll-min", 2*time.Millisecond, "shortest pause between two reads when idle")
	flags.DurationVar(&o.relay.PollMax, "poll-max", 250*time.Millisecond, "longest pause between two reads when idle")
	flags.StringVar(&o.order, "order", "key", "order of messages: key, key-pipelined or none")
	flags.IntVar(&o.relay.Retry.MaxAttempts, "max-attempts", 10, "attempts of a refused message before it becomes a dead letter")
	flags.DurationVar(&o.relay.Retry.Initial, "retry-initial", time.Second, "first retry delay of a refused message; doubles up to --retry-max")
	flags.DurationVar(&o.relay.Retry.Max, "retry-max", 5*time.Minute, "longest retry delay of a refused message")
	flags.BoolVar(&o.holdKey, "hold-key", false, "after a dead letter, hold back the later messages of its key until an operator acts")
	flags.BoolVar(&o.relay.RequireDurable, "require-durable", false, "publish only what the database has made durable")
	flags.IntVar(&o.relay.Window, "window", 1024, "most messages in flight to the broker")
	return cmd
}

func (o *relayOptions) run(cmd *cobra.Command, db *sql.DB, cfg oncemill.Config, dsn string, log *slog.Logger) error {
	orders := map[string]relay.Order{"key": relay.OrderPerKey, "key-pipelined": relay.OrderPerKeyPipelined, "none": relay.OrderNone}
	order, ok := orders[o.order]
	if !ok {
		return &usageError{fmt.Errorf("--order %q: must be key, key-pipelined or none", o.order)}
	}
	o.relay.Order = order
	if o.holdKey {
		o.relay.Retry.Exhausted = relay.ExhaustedHoldKey
	}
	urls, err := o.amqp.split()
	if err != nil {
		return err
	}
	history := o.history
	switch {
	case history == 0:
		history = outbox.NoHistory
	case history < time.Hour:
		return &usageError{fmt.Errorf("--history %v: must be at least 1h, or 0 to keep none", history)}
	}
	// A maximum that is not set follows from its minimum.
	for name, value := range map[string]*time.Duration{"poll-max": &o.relay.PollMax, "retry-max": &o.relay.Retry.Max} {
		if !cmd.Flags().Changed(name) {
			*value = 0
		}
	}
	topology, err := topologyOf(o.topology, urls[0])
	if err != nil {
		return err
	}
	box, boxErr := outbox.New(db, outbox.Config{Database: cfg, History: history, Logger: log})
	o.rabbitmq.Addresses, o.rabbitmq.AllowPlaintext, o.rabbitmq.Logger = urls[1:], o.amqp.allowPlaintext, log
	sink, sinkErr := rabbitmq.New(topology, o.rabbitmq)
	if err := errors.Join(boxErr, sinkErr); err != nil {
		return &usageError{err}
	}
	switch {
	case o.listen == "" && (o.pprof || o.readyLag != 0):
		return &usageError{errors.New("--pprof and --ready-lag require --listen")}
	case o.readyLag < 0:
		return &usageError{fmt.Errorf("--ready-lag %v: must be positive, or 0 for no limit", o.readyLag)}
	}
	signals, err := newTelemetry(cmd.Context(), o.instance(), o.listen != "", log)
	if err != nil {
		return err
	}
	defer func() { // after the worker
		if err := signals.end(cmd.Context()); err != nil {
			log.WarnContext(cmd.Context(), "the last metrics and traces were not exported", "error", abridged(err))
		}
	}()
	o.relay.Logger, o.relay.MeterProvider, o.relay.TracerProvider, o.relay.Propagator = log, signals.meters, signals.tracers, propagation.TraceContext{}
	worker, err := relay.New(box, sink, o.relay)
	if err != nil {
		return &usageError{err}
	}
	if o.listen != "" {
		reader, err := status.New(db, status.Config{Database: cfg})
		if err != nil {
			return &usageError{err}
		}
		stop, err := serveEndpoint(cmd.Context(), o.listen, &endpoint{ready: worker.Ready, read: reader.Read, late: o.readyLag, metrics: signals.page, pprof: o.pprof, log: log})
		if err != nil {
			return err
		}
		defer stop() // after the worker, which may take a while to stop
	}
	group, ctx := errgroup.WithContext(cmd.Context())
	if o.notify {
		listener, err := outbox.NewListener(box, dsn)
		if err != nil {
			return &usageError{fmt.Errorf("--notify: %w", err)}
		}
		group.Go(func() error { return listener.Run(ctx) })
	}
	log.InfoContext(ctx, "relay starting", "dialect", cfg.Dialect.String(), "topology", o.topology)
	group.Go(func() error { return worker.Run(ctx) })
	if err := group.Wait(); err != nil {
		return err
	}
	log.InfoContext(ctx, "relay stopped", "reason", "signal")
	return nil
}

// instance returns the name of the worker, as the relay has it.
func (o *relayOptions) instance() string {
	if o.relay.Name != "" {
		return o.relay.Name
	}
	name, _ := os.Hostname() // a missing host name is no reason to fail
	return name
}

// serveEndpoint serves an endpoint on an address until stop is called.
func serveEndpoint(ctx context.Context, address string, e *endpoint) (stop func(), err error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	var malformed *net.AddrError
	switch {
	case errors.As(err, &malformed):
		return nil, &usageError{fmt.Errorf("--listen: %w", err)}
	case err != nil:
		return nil, fmt.Errorf("--listen: %w", err)
	}
	e.log.InfoContext(ctx, "serving health, status and metrics", "address", listener.Addr().String())
	if at, ok := listener.Addr().(*net.TCPAddr); ok && !at.IP.IsLoopback() {
		e.log.WarnContext(ctx, "health, status and metrics are served to other machines, without authentication; they show names of workers, consumers and endpoints", "address", at.String())
		if e.pprof {
			e.log.WarnContext(ctx, "profiles are served to other machines, without authentication; taking one slows the worker down", "address", at.String())
		}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var served sync.WaitGroup
	served.Go(func() { e.serve(ctx, listener) })
	return func() { cancel(); served.Wait() }, nil
}
