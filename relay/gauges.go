package relay

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// gauges report the backlog in the tables. The worker that does the upkeep reads the tables, and
// only while somebody collects the metrics.
type gauges struct {
	collected chan struct{}         // capacity 1: the metrics were collected
	latest    atomic.Pointer[depth] // nil if there is none, or another worker does the upkeep
}

// depth is one reading.
type depth struct {
	until          time.Time // it is too old after that
	outbox         outboxstore.Backlog
	waiting        relaystore.Waiting
	workers, lanes int // workers that are alive, lanes without one
	letters        []dlqstore.OpenCount
}

const (
	gaugesEvery  = 5 * time.Second
	gaugesWanted = 10 * time.Minute // after a collection
	gaugesLimit  = 2 * time.Second  // for a reading
	gaugesMost   = 10_000           // where counts end

	// gaugesShare bounds the part of the time that readings take: a hundredth. An old snapshot
	// that keeps deleted rows makes them long.
	gaugesShare = 100
	gaugesRetry = 20 * time.Second // after a reading that failed
)

func (g *gauges) register(meter metric.Meter) error {
	g.collected = make(chan struct{}, 1)
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
		select {
		case g.collected <- struct{}{}:
		default:
		}
		d := g.latest.Load()
		if d == nil || time.Now().After(d.until) {
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

// gauge reads the tables while the metrics are collected and this worker has the lease for the
// upkeep. It has a goroutine of its own: a lock on one of the tables must not hold up the upkeep.
func (w *worker) gauge(ctx context.Context) error {
	g := &w.met.gauges
	defer g.latest.Store(nil)
	calls := bounded.New(1)
	var wanted time.Time // until then
	for {
		pause := gaugesEvery
		switch {
		case !time.Now().Before(wanted):
			g.latest.Store(nil)
			pause = forever
		case w.upkeepLease.held() == 0:
			g.latest.Store(nil)
		default:
			begin := time.Now()
			read, err := bounded.Do(ctx, calls, gaugesLimit, w.readDepth)
			pause = max(gaugesEvery, gaugesShare*time.Since(begin))
			if err != nil {
				g.latest.Store(nil)
				if ctx.Err() == nil {
					level, attrs := w.failed(&w.failing.gauges, slog.LevelWarn, err)
					w.log.Log(ctx, level, "the backlog cannot be measured; its metrics are missing until it can", append(attrs, "error", err)...)
				}
				pause = min(pause, gaugesRetry)
				break
			}
			if attrs, report := w.failing.gauges.Over(); report {
				w.log.InfoContext(ctx, "the backlog is measured again", attrs...)
			}
			read.until = time.Now().Add(3 * pause)
			g.latest.Store(&read)
		}
		timer := time.NewTimer(pause)
		for waiting := true; waiting; {
			select {
			case <-g.collected:
				waiting = time.Now().Before(wanted)
				wanted = time.Now().Add(gaugesWanted)
			case <-timer.C:
				waiting = false
			case <-ctx.Done():
				timer.Stop()
				return nil
			}
		}
		timer.Stop()
	}
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
