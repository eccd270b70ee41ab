package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// Migrations creates the tables relay_leases, relay_workers and parked, which holds the
// retrying messages. A relay also needs the tables of package dlq.
var Migrations = oncemill.Migrations{Name: "relay", FS: relaystore.Migrations}

// Config configures a Relay. The zero value is right for most services. All workers of
// one outbox must use the same Lease.
type Config struct {
	// Name is shown to operators. Default: the host name.
	Name string

	// UniqueName promises that no two running workers of this outbox have this Name, as in
	// a StatefulSet. A worker that starts then takes over the lanes of the crashed worker
	// with its name at once, instead of after its Lease. If the promise is broken, each
	// start interrupts the other worker, which costs repeated messages and counts as a
	// crash. Requires Name, and one Run at a time. Default: false.
	UniqueName bool

	// Lease is how long a worker that has died or is cut off keeps others from its
	// lanes: the longest pause after a crash. A shorter lease tolerates less: a worker
	// that cannot reach its database for that long stops publishing. Default: 15 s. At
	// least 1 s.
	Lease time.Duration

	// PublishTimeout is how long the broker may take to confirm a message before it is
	// sent again. A later confirm still counts. The lane's lease is renewed meanwhile.
	// A message that exceeds it again and again, while others are confirmed, becomes a
	// dead letter. A shorter timeout notices a lost confirm sooner, and repeats
	// messages when the broker is slow. Default: twice Lease. At least 10 ms.
	PublishTimeout time.Duration

	// StopTimeout is how long Run waits for messages in flight when its context ends.
	// Messages without an answer by then stay in the outbox, and the next worker sends
	// them again. Default: 10 s.
	StopTimeout time.Duration

	// Window is the largest number of messages in flight to the broker. A larger window
	// hides a longer round trip, but costs memory in the broker, and more messages may
	// be sent again after a crash. Default: 1024.
	Window int

	// Batch is the largest number of rows that one read takes from a lane. Default:
	// 256. At most 400: PostgreSQL would consider a larger read worth JIT compiling
	// each time. With the default, a worker with all 32 lanes keeps about ten thousand
	// rows in memory. While topics are stuck it keeps up to about 65,536 (8 times Batch
	// per lane), but no more than about 3 MiB of each lane.
	Batch int

	// Order selects what is kept in order. Default: OrderPerKey.
	Order Order

	// Retry configures how often and when a refused message is retried.
	Retry Retry

	// LetterRetention is how long dead letters are kept once they have been replayed or
	// discarded. Open ones are kept forever. Default: 30 days. At least 1 h.
	LetterRetention time.Duration

	// DropUnroutable returns, for a topic, whether messages without a receiver count as
	// delivered. Use it for topics that may have no subscriber. Otherwise an unroutable
	// message uses up an attempt, unless its topic as a whole seems to have lost its
	// queues: then its messages wait. Default: false for all.
	DropUnroutable func(topic string) bool

	// RequireDurable publishes nothing that the database server could still lose. After
	// each read the worker makes a commit with synchronous_commit on, behind everything
	// it has read, and waits for it. Otherwise a transaction that was committed with
	// synchronous_commit off may be lost in a server crash after its message was
	// published. It protects against a failover only with synchronous standbys. It
	// costs a commit for each read. Not needed on SQLite. Default: false.
	RequireDurable bool

	// PollMin and PollMax bound the pause between two reads of lanes that had nothing
	// more. The pause is shortest while messages arrive and longest after a quiet time.
	// A commit of the same process, by outbox.RunInTx, is seen at once. Defaults: 2 ms
	// and 250 ms.
	PollMin, PollMax time.Duration

	// Logger receives outages, dead letters, takeovers, and a summary each minute; at debug
	// level each message. docs/operations.md lists all events. Default: slog.Default().
	Logger *slog.Logger

	// MeterProvider receives the metrics. Default: the global one.
	MeterProvider metric.MeterProvider

	// TracerProvider receives a span each time a message is handed to the sink, if the
	// message carries a sampled trace. Propagator extracts the trace from the metadata, and
	// writes that of the attempt there.
	// Defaults: the global ones.
	TracerProvider trace.TracerProvider
	Propagator     propagation.TextMapPropagator
}

// Relay delivers the messages of one outbox to one sink; each Run is a worker. Any
// number of relays, in any number of processes, share the lanes.
type Relay struct {
	box  *outbox.Outbox
	sink Sink
	cfg  Config
	met  *metrics

	deadLetters *dlq.Store

	mu      sync.Mutex // guards what follows
	running map[*worker]struct{}
}

// New returns a relay from box to sink. It does no I/O. All bad values of cfg are
// reported at once, each as an [*oncemill.ConfigError].
func New(box *outbox.Outbox, sink Sink, cfg Config) (*Relay, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "relay." + field, Value: value, Problem: problem})
	}
	if box == nil {
		bad("New box", "nil", "an outbox is needed")
	}
	if sink == nil {
		bad("New sink", "nil", "a sink is needed")
	}
	if s, ok := sink.(interface{ MaxInFlight() int }); ok {
		if most := s.MaxInFlight(); most < 1 {
			bad("New sink", fmt.Sprintf("%T with MaxInFlight %d", sink, most), "MaxInFlight must be at least 1, or nothing would be published")
		}
	}
	duration := func(field string, value *time.Duration, byDefault, least, most time.Duration) {
		switch {
		case *value == 0:
			*value = byDefault
		case *value < least || *value > most:
			bad("Config."+field, value.String(), "must be "+least.String()+" to "+most.String()+", or 0 for "+byDefault.String())
		}
	}
	number := func(field string, value *int, byDefault, most int) {
		switch {
		case *value == 0:
			*value = byDefault
		case *value < 0 || *value > most:
			bad("Config."+field, strconv.Itoa(*value), "must be 1 to "+strconv.Itoa(most)+", or 0 for "+strconv.Itoa(byDefault))
		}
	}
	duration("Lease", &cfg.Lease, 15*time.Second, time.Second, time.Hour)
	duration("PublishTimeout", &cfg.PublishTimeout, max(2*cfg.Lease, time.Second), 10*time.Millisecond, time.Hour)
	duration("StopTimeout", &cfg.StopTimeout, 10*time.Second, time.Millisecond, time.Hour)
	number("Window", &cfg.Window, 1024, 1<<16)
	number("Batch", &cfg.Batch, 256, 400)
	duration("PollMin", &cfg.PollMin, 2*time.Millisecond, time.Millisecond, time.Minute)
	if cfg.PollMin >= time.Millisecond {
		duration("PollMax", &cfg.PollMax, max(250*time.Millisecond, cfg.PollMin), cfg.PollMin, time.Hour)
	}
	if cfg.Order > OrderNone {
		bad("Config.Order", strconv.Itoa(int(cfg.Order)), "must be OrderPerKey, OrderPerKeyPipelined or OrderNone")
	}
	number("Retry.MaxAttempts", &cfg.Retry.MaxAttempts, 10, 1000)
	duration("Retry.Initial", &cfg.Retry.Initial, time.Second, time.Millisecond, 24*time.Hour)
	if cfg.Retry.Initial >= time.Millisecond {
		duration("Retry.Max", &cfg.Retry.Max, max(5*time.Minute, cfg.Retry.Initial), cfg.Retry.Initial, 30*24*time.Hour)
	}
	duration("Retry.TimeLimit", &cfg.Retry.TimeLimit, 0, time.Millisecond, 365*24*time.Hour)
	if cfg.Retry.Exhausted > ExhaustedHoldKey {
		bad("Config.Retry.Exhausted", strconv.Itoa(int(cfg.Retry.Exhausted)), "must be ExhaustedSkip or ExhaustedHoldKey")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.MeterProvider == nil {
		cfg.MeterProvider = otel.GetMeterProvider()
	}
	if cfg.TracerProvider == nil {
		cfg.TracerProvider = otel.GetTracerProvider()
	}
	if cfg.Propagator == nil {
		cfg.Propagator = otel.GetTextMapPropagator()
	}
	if cfg.UniqueName && cfg.Name == "" {
		bad("Config.UniqueName", "true", "requires a name, which a host's is not: it may run several workers")
	}
	if cfg.Name == "" {
		cfg.Name, _ = os.Hostname() // a missing host name is no reason to fail
	}
	met, err := newMetrics(cfg.MeterProvider, nopanic.NewTelemetry(cfg.Logger))
	if err != nil {
		errs = append(errs, err)
	}
	duration("LetterRetention", &cfg.LetterRetention, 30*24*time.Hour, time.Hour, 100*365*24*time.Hour)
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	letters, err := dlq.New(box.DB(), dlq.Config{Database: box.Config().Database, Retention: cfg.LetterRetention})
	if err != nil {
		return nil, err
	}
	return &Relay{box: box, sink: sink, cfg: cfg, met: met, deadLetters: letters, running: map[*worker]struct{}{}}, nil
}

// Run works until ctx ends. Then it takes nothing new, finishes what is in flight
// within StopTimeout, gives its lanes back, and returns nil. A clean stop repeats
// nothing.
//
// Run survives outages of the database and the broker. It returns an error only for
// what waiting cannot repair:
//
//   - At its start: tables that are not migrated (a *oncemill.SchemaError),
//     [outbox.ErrSequenceBehind], [outbox.ErrSequenceCached] or [outbox.ErrReadOnly], and
//     on SQLite wrong settings (see [oncemill.CheckSQLite]).
//   - Later: a SQLite file that was replaced ([oncemill.ErrDatabaseReplaced]).
//   - A sink that gave up.
//
// Any other such condition that appears later, for example after a failover, stops the
// reading of the outbox and is logged until it is repaired. Run returns when the sink's
// Run has. It may be called again after it has returned, and concurrently if the sink
// allows that.
//
// It returns within StopTimeout and a second after ctx has ended, with
// [ErrStillRunning] if something hangs.
func (r *Relay) Run(ctx context.Context) error {
	w := newWorker(r)
	r.mu.Lock()
	r.running[w] = struct{}{}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.running, w)
	}()
	ended := make(chan error, 1)
	go func() {
		err := w.prepare(ctx)
		if err == nil && ctx.Err() == nil {
			err = w.run(ctx)
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	timer := time.NewTimer(r.cfg.StopTimeout + lastSecond)
	defer timer.Stop()
	select {
	case err := <-ended:
		return err
	case <-timer.C:
		w.log.ErrorContext(context.WithoutCancel(ctx), "relay stopped, but something has not returned; it is left behind", "abandoned_calls", w.bounds.Abandoned())
		return ErrStillRunning
	}
}

// lastSecond is how long Run waits, after StopTimeout, for calls that hang.
const lastSecond = time.Second
