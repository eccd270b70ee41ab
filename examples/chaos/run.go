package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/examples/data"
	"github.com/oncemill/oncemill/examples/shop"
)

// setup is a site prepared for a run, with the parent's access to it.
type setup struct {
	name      string
	job       job    // what all processes have in common
	pending   string // the statement that counts the rows of the outbox
	wire      wire
	processes []*process                  // started in this order, stopped in the reverse one
	close     func(context.Context) error // also used after the context has ended
}

// wire is the parent's own access to the broker.
type wire interface {
	// copy publishes n messages of the broker a second time, unchanged, and returns their
	// ids. Each call uses other messages.
	copy(ctx context.Context, n int) ([]string, error)

	// waiting is the number of messages that the inventory has not acknowledged.
	waiting(ctx context.Context) (int, error)

	// read returns all messages in the order of arrival.
	read(ctx context.Context) ([]delivery, error)
}

const (
	copiesPerKill = 10

	// stallTimeout is how long a run may make no progress before it fails.
	stallTimeout = 2 * time.Minute

	// drainTimeout is how long a run may make no progress, after all orders were accepted,
	// before missing messages and effects count as lost.
	drainTimeout = 30 * time.Second
	settleTime   = 500 * time.Millisecond
	poll         = 10 * time.Millisecond
)

// chaos is one run.
type chaos struct {
	*setup
	db        *sql.DB
	orders    []shop.Order
	customers *customers
	show      progress
	kills     atomic.Int64

	mu     sync.Mutex // guards what follows, and wire.copy
	paused map[string][]string
	copies map[string]int
}

// prove starts the processes, posts the orders, kills as planned, waits until everything is
// delivered and handled, and checks the result. An error means that there is no result.
func prove(ctx context.Context, dir string, prepare func() (*setup, error), orders []shop.Order, dedup bool, show progress) (v result, err error) {
	s, err := prepare()
	if err != nil {
		return result{}, err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	s.job.NoDedup = !dedup
	kills := 0
	for _, p := range s.processes {
		p.log = filepath.Join(dir, p.name+".log")
		kills += len(p.ends)
	}
	show.say("  %d orders on %s, %d kills", len(orders), s.name, kills)
	db, err := s.job.site().open()
	if err != nil {
		return result{}, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := shop.CreateTables(ctx, db); err != nil {
		return result{}, err
	}
	if err := shop.AddProducts(ctx, db, data.Catalogue()); err != nil {
		return result{}, err
	}
	customers, err := newCustomers()
	if err != nil {
		return result{}, err
	}
	c := &chaos{setup: s, db: db, orders: orders, customers: customers, show: show, paused: map[string][]string{}, copies: map[string]int{}}
	if err := c.run(ctx); err != nil {
		return result{}, err
	}
	return c.check(ctx)
}

func (c *chaos) run(ctx context.Context) error {
	defer func() {
		for _, p := range c.processes {
			p.kill() // does nothing after a clean stop
		}
	}()
	for _, p := range c.processes {
		if err := c.start(ctx, p, 0); err != nil {
			return err
		}
	}
	group, groupCtx := errgroup.WithContext(ctx)
	watched, finish := context.WithCancel(groupCtx)
	group.Go(func() error { return c.watch(watched) })
	group.Go(func() error {
		defer finish()
		return c.work(groupCtx)
	})
	if err := group.Wait(); err != nil {
		return err
	}
	for i := len(c.processes) - 1; i >= 0; i-- {
		if err := c.processes[i].stop(); err != nil {
			return err
		}
	}
	return nil
}

// start starts a life of p.
func (c *chaos) start(ctx context.Context, p *process, life int) error {
	j := c.job
	j.Roles = p.roles
	if life < len(p.ends) {
		j.Stage, j.After = p.ends[life].stage, int64(c.share(p.ends[life].after))
	}
	address, err := p.start(ctx, j)
	if address != "" {
		c.customers.address.Store(&address)
	}
	return err
}

func (c *chaos) work(ctx context.Context) error {
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.customers.post(groupCtx, c.orders) })
	for _, p := range c.processes {
		group.Go(func() error { return c.killAgainAndAgain(groupCtx, p) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return c.drain(ctx)
}

func (c *chaos) killAgainAndAgain(ctx context.Context, p *process) error {
	for life, end := range p.ends {
		id, err := c.await(ctx, p, end)
		if err != nil {
			return err
		}
		p.kill()
		c.kills.Add(1)
		if err := c.sendCopies(ctx, end.stage, id); err != nil {
			return err
		}
		if err := c.start(ctx, p, life+1); err != nil {
			return err
		}
	}
	return nil
}

// await waits until p is to be killed, and returns the id of the message that it paused with.
func (c *chaos) await(ctx context.Context, p *process, e end) (id string, err error) {
	if e.stage != "" {
		return p.hear(ctx, "paused")
	}
	return "", until(ctx, func() (bool, error) {
		if err := p.alive(); err != nil || int(c.customers.taken.Load()) < c.share(e.taken) {
			return false, err
		}
		if e.booked == 0 {
			return true, nil
		}
		booked, err := count(ctx, c.db, lastEntry)
		return booked >= c.share(e.booked), err
	})
}

func (c *chaos) sendCopies(ctx context.Context, stage, id string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if stage != "" {
		c.paused[stage] = append(c.paused[stage], id)
	}
	ids, err := c.wire.copy(ctx, copiesPerKill)
	if err != nil {
		return fmt.Errorf("send copies: %w", err)
	}
	for _, id := range ids {
		c.copies[id]++
	}
	return nil
}

func (c *chaos) share(part float64) int { return int(part * float64(len(c.orders))) }

// drain waits until the outbox is empty, nothing waits for the inventory and every order is
// booked. Then it waits a little longer for unexpected messages. If there is no progress
// before that, the check counts what is missing.
func (c *chaos) drain(ctx context.Context) error {
	type state struct{ pending, waiting, effects, booked int }
	var last state
	moved := time.Now()
	return until(ctx, func() (bool, error) {
		var now state
		var err error
		if now.pending, err = count(ctx, c.db, c.pending); err != nil {
			return false, err
		}
		// In this order: what has left the outbox is on the wire by now.
		if now.waiting, err = c.wire.waiting(ctx); err != nil {
			return false, fmt.Errorf("count waiting messages: %w", err)
		}
		if now.effects, err = count(ctx, c.db, countLedger); err != nil {
			return false, err
		}
		if now.booked, err = count(ctx, c.db, countBooked); err != nil {
			return false, err
		}
		if now != last {
			last, moved = now, time.Now()
		}
		if now.pending == 0 && now.waiting == 0 && now.booked >= len(c.orders) {
			return time.Since(moved) > settleTime, nil
		}
		return time.Since(moved) > drainTimeout, nil
	})
}

// watch shows the counts until ctx ends, and returns an error if they do not change.
func (c *chaos) watch(ctx context.Context) error {
	type counts struct{ taken, booked, kills int }
	var last counts
	at, moved := time.Now(), time.Now()
	ticker := time.NewTicker(c.show.every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			c.show.erase()
			return nil
		case now := <-ticker.C:
			booked, err := count(ctx, c.db, countLedger)
			if err != nil {
				if ctx.Err() != nil {
					continue
				}
				return err
			}
			seen := counts{int(c.customers.taken.Load()), booked, int(c.kills.Load())}
			c.show.counts("  %6d of %d orders taken (%4.0f/s)  %6d booked  %d kills  %d requests repeated",
				seen.taken, len(c.orders), float64(seen.taken-last.taken)/now.Sub(at).Seconds(), seen.booked, seen.kills, c.customers.repeated())
			if seen != last {
				moved = now
			}
			if now.Sub(moved) > stallTimeout {
				return fmt.Errorf("no progress for %s", stallTimeout)
			}
			last, at = seen, now
		}
	}
}

func (c *chaos) check(ctx context.Context) (result, error) {
	h := history{orders: c.orders, products: data.Catalogue(), copies: c.copies, unconfirmed: c.paused[stageRelay]}
	var err error
	if h.tables, err = readTables(ctx, c.db); err != nil {
		return result{}, err
	}
	if h.wire, err = c.wire.read(ctx); err != nil {
		return result{}, fmt.Errorf("read the wire: %w", err)
	}
	c.show.say("  %d kills, %d with messages unconfirmed, %d between commit and acknowledgement;"+
		" %d messages sent twice on purpose, %d requests repeated", c.kills.Load(), len(c.paused[stageRelay]),
		len(c.paused[stageConsumer]), len(c.copies), c.customers.repeated())
	return check(h), nil
}

func until(ctx context.Context, done func() (bool, error)) error {
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
