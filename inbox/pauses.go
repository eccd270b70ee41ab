package inbox

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/repeats"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/steerstore"
)

const (
	// pausesEvery is how long a read of the pauses applies, and may take where an earlier one
	// does. Only deliveries and replays read.
	pausesEvery = time.Second

	// pausedAgain is the average time after which a delivery that is held looks again.
	pausedAgain = 500 * time.Millisecond

	// heldAtMost is how long a delivery of a paused consumer is held, unless its context ends
	// before. RabbitMQ closes the channel of one that takes 30 min.
	heldAtMost = 20 * time.Minute

	// heldAgain is the average time to the redelivery after that.
	heldAgain = 10 * time.Second
)

// pauses are the consumers that operators have paused; see package steer. A nil value has none.
type pauses struct {
	store steerstore.Store

	mu      sync.Mutex // guards what follows
	reading bool
	readAt  time.Time
	known   bool // a read has succeeded
	paused  map[string]bool

	failing   repeats.Series
	forbidden bool // has been logged
}

// isPaused reports whether an operator has paused a consumer, as this inbox knows it. A handler
// of [Inbox.PerHandler] is paused with its inbox, too.
//
// If a read fails, what was read last applies. Before the first read everything is paused, unless
// the role may not read the pauses.
func (in *Inbox) isPaused(ctx context.Context, consumer string) bool {
	p := in.pauses
	if p == nil {
		return false
	}
	p.mu.Lock()
	due := !p.reading && time.Since(p.readAt) >= pausesEvery
	if due {
		p.reading = true
	}
	known := p.known
	p.mu.Unlock()
	if due {
		in.readPauses(ctx, known)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.known && !p.forbidden {
		return true
	}
	if p.paused[consumer] {
		return true
	}
	return in.parent != "" && p.paused[in.parent] || in.perHandler.Load() && p.paused[in.cfg.Consumer] && strings.HasPrefix(consumer, in.cfg.Consumer+"/")
}

func (in *Inbox) readPauses(ctx context.Context, known bool) {
	p := in.pauses
	// A delivery waits for this, perhaps on a connection to a server that is frozen.
	limit := pausesEvery
	if !known {
		limit = callLimit // nothing applies yet
	}
	found, err := bounded.Do(ctx, in.calls, limit, func(ctx context.Context) ([]steerstore.Target, error) {
		return p.store.Paused(ctx, steerstore.KindConsumer)
	})
	log := in.cfg.Logger.With(slog.String("consumer", in.cfg.Consumer))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reading = false
	switch {
	case err != nil && ctx.Err() != nil: // says nothing
		return
	case sqlerr.Forbidden(err) && !p.known:
		// A role of before there were pauses.
		if !p.forbidden {
			p.forbidden = true
			log.WarnContext(ctx, "pauses may not be read, so nobody can pause this consumer; grant select on the table pauses", "error", err)
		}
		p.readAt = time.Now()
		return
	case err != nil:
		level, attrs := p.failing.Failed(slog.LevelWarn, err.Error())
		log.Log(ctx, level, "pauses could not be read; those read last apply, and a consumer that has read none handles nothing", append(attrs, "error", err)...)
		p.readAt = time.Now()
		return
	}
	if attrs, report := p.failing.Over(); report {
		log.InfoContext(ctx, "pauses are read again", attrs...)
	}
	paused := map[string]bool{}
	for _, one := range found {
		paused[one.Name] = true
	}
	p.readAt, p.known, p.paused = time.Now(), true, paused
}

// awaitResumed holds a delivery while its consumer is paused. After a while, or if its subscriber
// stops, the delivery goes back, which is no failure of it.
func (in *Inbox) awaitResumed(ctx context.Context) error {
	leaving := leavingOf(ctx)
	for began := time.Now(); in.isPaused(ctx, in.cfg.Consumer); {
		held := time.Since(began)
		over := held >= heldAtMost
		if !over {
			again := time.NewTimer(in.jitter(min(pausedAgain, max(10*time.Millisecond, held))))
			select {
			case <-again.C:
			case <-leaving:
				over = true
			case <-ctx.Done():
				over = true
			}
			again.Stop()
		}
		if over {
			delayNack(context.WithoutCancel(ctx), in.jitter(heldAgain))
			return errors.Join(ErrPaused, ctx.Err())
		}
	}
	return nil
}

// leavingOf returns a channel that is closed when the subscriber of a delivery stops, nil if it
// does not say so.
func leavingOf(ctx context.Context) <-chan struct{} {
	delivery, _ := DeliveryFromContext(ctx)
	if d, ok := delivery.(interface{ Leaving() <-chan struct{} }); ok {
		return d.Leaving()
	}
	return nil
}
