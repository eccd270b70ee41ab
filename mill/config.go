package mill

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// Config describes the parts of a service. A part that is nil or empty is not used and has
// no tables. The parts share Database, Logger, MeterProvider, TracerProvider and Propagator:
// leave these fields of the parts empty.
type Config struct {
	// Database describes where the tables are.
	Database oncemill.Config

	// Outbox configures the outbox; see [Mill.Outbox]. Required with Sink, and for
	// consumers that produce messages. Default: none.
	Outbox *outbox.Config

	// Sink takes the messages of the outbox to the broker. With it Run is a relay worker.
	// Default: none; another process relays, for example the command oncemill relay.
	Sink relay.Sink

	// Relay configures the worker. LetterRetention also applies to the dead letters of
	// consumers. It is the only field that may be set without Sink.
	Relay relay.Config

	// Consumers handle messages.
	Consumers []Consumer

	// Idempotency configures the keys of HTTP requests and commands; see
	// [Mill.Idempotency]. Its OnCommit wakes the relay unless it is set. With
	// Relay.UniqueName its Failures.UniqueName is Relay.Name unless it is set. Default: none.
	Idempotency *idempotency.Config

	// Keys configures the store of the keys.
	Keys idempotency.StoreConfig

	// NoMigrate makes Run check the tables instead of creating and changing them. Set it
	// if the service's database role may not create tables, and run the command oncemill
	// migrate. Default: false.
	NoMigrate bool

	// StopTimeout is how long Run waits, when its context ends, for running handlers and
	// requests. Default: 30 s. 10 ms to 24 h. The relay then has relay.Config.StopTimeout
	// for its messages in flight.
	StopTimeout time.Duration

	// Logger receives the start, the stop and the events of all parts. Default:
	// slog.Default().
	Logger *slog.Logger

	// MeterProvider, TracerProvider and Propagator are those of all parts. Defaults: the
	// global ones.
	MeterProvider  metric.MeterProvider
	TracerProvider trace.TracerProvider
	Propagator     propagation.TextMapPropagator
}

// resolve fills in what the parts share, and reports missing and invalid settings.
func (c Config) resolve() (Config, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "mill.Config." + field, Value: value, Problem: problem})
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = 30 * time.Second
	}
	if c.StopTimeout < 10*time.Millisecond || c.StopTimeout > 24*time.Hour {
		bad("StopTimeout", c.StopTimeout.String(), "must be 10ms to 24h, or 0 for 30s")
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	switch {
	case c.Sink != nil && c.Outbox == nil:
		bad("Outbox", "nil", "is required with Sink; set it to &outbox.Config{}")
	case c.Outbox == nil && len(c.Consumers) == 0 && c.Idempotency == nil:
		bad("Outbox", "nil", "nothing is used: set Outbox, Consumers or Idempotency")
	}
	relayOnly := c.Relay
	relayOnly.LetterRetention = 0
	if c.Sink == nil && !reflect.ValueOf(relayOnly).IsZero() {
		bad("Relay", "(given)", "has no effect without Sink")
	}
	if c.Idempotency == nil && c.Keys != (idempotency.StoreConfig{}) {
		bad("Keys", "(given)", "has no effect without Idempotency")
	}
	c.share(bad)
	names := map[string]bool{}
	for i := range c.Consumers {
		consumer := &c.Consumers[i]
		consumer.check(c, func(field, value, problem string) { bad(fmt.Sprintf("Consumers[%d].%s", i, field), value, problem) })
		if names[consumer.Name] {
			bad(fmt.Sprintf("Consumers[%d].Name", i), consumer.Name, "is used by another consumer; names must be unique")
		}
		names[consumer.Name] = true
	}
	return c, errors.Join(errs...)
}

type report func(field, value, problem string)

// share fills the shared settings into copies of the parts' configurations.
func (c *Config) share(bad report) {
	same := func(field string, given, shared *oncemill.Config) {
		if *given != (oncemill.Config{}) && *given != *shared {
			bad(field, fmt.Sprintf("%+v", *given), "must be empty: all parts are in Config.Database")
		}
		*given = *shared
	}
	if c.Outbox != nil {
		own := *c.Outbox
		same("Outbox.Database", &own.Database, &c.Database)
		own.Logger, own.Propagator = cmp.Or(own.Logger, c.Logger), cmp.Or(own.Propagator, c.Propagator)
		c.Outbox = &own
	}
	c.Relay.StopTimeout = cmp.Or(c.Relay.StopTimeout, 10*time.Second)
	c.Relay.Logger = cmp.Or(c.Relay.Logger, c.Logger)
	c.Relay.MeterProvider = cmp.Or(c.Relay.MeterProvider, c.MeterProvider)
	c.Relay.TracerProvider = cmp.Or(c.Relay.TracerProvider, c.TracerProvider)
	c.Relay.Propagator = cmp.Or(c.Relay.Propagator, c.Propagator)
	same("Keys.Database", &c.Keys.Database, &c.Database)
	if c.Idempotency != nil {
		own := *c.Idempotency
		own.Logger, own.Telemetry.MeterProvider = cmp.Or(own.Logger, c.Logger), cmp.Or(own.Telemetry.MeterProvider, c.MeterProvider)
		own.Telemetry.TracerProvider = cmp.Or(own.Telemetry.TracerProvider, c.TracerProvider)
		if c.Relay.UniqueName {
			own.Failures.UniqueName = cmp.Or(own.Failures.UniqueName, c.Relay.Name)
		}
		c.Idempotency = &own
	}
	consumers := make([]Consumer, len(c.Consumers))
	for i, consumer := range c.Consumers {
		settings := &consumer.Inbox
		same(fmt.Sprintf("Consumers[%d].Inbox.Database", i), &settings.Database, &c.Database)
		settings.Logger, settings.MeterProvider = cmp.Or(settings.Logger, c.Logger), cmp.Or(settings.MeterProvider, c.MeterProvider)
		settings.TracerProvider, settings.Propagator = cmp.Or(settings.TracerProvider, c.TracerProvider), cmp.Or(settings.Propagator, c.Propagator)
		consumers[i] = consumer
	}
	c.Consumers = consumers
}
