package relay

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/gauges"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// backlogGauges report the backlog in the tables. The worker that does the upkeep reads them.
type backlogGauges struct{ *gauges.Reader[depth] }

// depth is one reading.
type depth struct {
	outbox         outboxstore.Backlog
	waiting        relaystore.Waiting
	workers, lanes int // workers that are alive, lanes without one
	letters        []dlqstore.OpenCount
}

const (
	gaugesLimit = 2 * time.Second // for a reading
	gaugesMost  = 10_000          // where counts end
)

func (g *backlogGauges) register(meter metric.Meter) error {
	g.Reader = gauges.New[depth]()
	var errs []error
	var all []metric.Observable
	count := func(name, unit, description string) metric.Int64ObservableGauge {
		gauge, err := meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs, all = append(errs, err), append(all, gauge)
		return gauge
	}
	seconds := func(name, description string) metric.Float64ObservableGauge {
		gauge, err := meter.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(description))
		errs, all = append(errs, err), append(all, gauge)
		return gauge
	}
	waiting := count("oncemill.outbox.depth", "{message}", "Messages in the outbox: in flight, or before their first attempt. From about 10,000 on, an estimate.")
	oldest := seconds("oncemill.outbox.oldest_age", "Age of the oldest message in the outbox.")
	scheduled := count("oncemill.scheduled.depth", "{message}", "Scheduled messages, up to 10,000.")
	due := count("oncemill.scheduled.due", "{message}", "Scheduled messages whose time has come, up to 10,000.")
	late := seconds("oncemill.scheduled.late", "Time since the first of them was due.")
	retrying := count("oncemill.relay.retrying", "{message}", "Refused messages that will be tried again, up to 10,000.")
	held := count("oncemill.relay.held_keys", "{key}", "Ordering keys that a dead letter holds, up to 10,000.")
	workers := count("oncemill.relay.workers", "{worker}", "Workers that are alive.")
	unowned := count("oncemill.relay.unowned_lanes", "{lane}", "Lanes that no living worker has.")
	letters := count("oncemill.dead_letters.open", "{message}", "Dead letters that are neither replayed nor discarded, by state, source and consumer, up to 10,000 of each state.")
	if err := errors.Join(errs...); err != nil {
		return err
	}
	_, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		d, ok := g.Collect()
		if !ok {
			return nil
		}
		n, _ := d.outbox.Depth()
		o.ObserveInt64(waiting, n)
		o.ObserveFloat64(oldest, d.outbox.Oldest().Seconds())
		o.ObserveInt64(scheduled, d.outbox.Scheduled)
		o.ObserveInt64(due, d.outbox.Due)
		o.ObserveFloat64(late, d.outbox.Late.Seconds())
		o.ObserveInt64(retrying, d.waiting.Retrying)
		o.ObserveInt64(held, d.waiting.HeldKeys)
		o.ObserveInt64(workers, int64(d.workers))
		o.ObserveInt64(unowned, int64(d.lanes))
		for _, l := range d.letters {
			o.ObserveInt64(letters, l.N, metric.WithAttributes(
				attribute.String("state", l.State), attribute.String("source", l.Source), attribute.String("messaging.consumer.group.name", l.Consumer)))
		}
		return nil
	}, all...)
	return err
}

// gauge reads the tables while this worker has the lease for the upkeep. It has a goroutine of its
// own: a lock on one of the tables must not hold up the upkeep.
func (w *worker) gauge(ctx context.Context) error {
	calls := bounded.New(1)
	w.met.backlog.Run(ctx, func(ctx context.Context) (d depth, ok bool, err error) {
		if w.upkeepLease.held() == 0 {
			return d, false, nil
		}
		d, err = bounded.Do(ctx, calls, gaugesLimit, w.readDepth)
		return d, err == nil, err
	}, func(err error) {
		if err != nil {
			level, attrs := w.failed(&w.failing.gauges, slog.LevelWarn, err)
			w.log.Log(ctx, level, "the backlog cannot be measured; its metrics are missing until it can", append(attrs, "error", err)...)
		} else if attrs, report := w.failing.gauges.Over(); report {
			w.log.InfoContext(ctx, "the backlog is measured again", attrs...)
		}
	})
	return nil
}

func (w *worker) readDepth(ctx context.Context) (d depth, err error) {
	if d.outbox, err = w.queue.Backlog(ctx, gaugesMost/outbox.Lanes); err != nil {
		return d, err
	}
	if d.waiting, err = w.observed.Waiting(ctx, gaugesMost); err != nil {
		return d, err
	}
	owners, err := w.observed.Owners(ctx)
	if err != nil {
		return d, err
	}
	for _, o := range owners {
		if !o.Alive() {
			d.lanes++
		}
	}
	workers, err := w.observed.Workers(ctx)
	if err != nil {
		return d, err
	}
	for _, seen := range workers {
		if seen.Left > 0 {
			d.workers++
		}
	}
	d.letters, err = w.openLetters(ctx, gaugesMost)
	return d, err
}
