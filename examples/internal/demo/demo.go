package demo

import (
	"context"
	"database/sql"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/examples/shop"
)

// Broker is what a demo asks of its broker, behind the back of the processes.
type Broker interface {
	// Copy sends n messages that are on the wire a second time, as they are, and
	// returns their ids. Each call takes other messages.
	Copy(ctx context.Context, n int) ([]string, error)

	// Waiting is the number of messages that the consumer has not acknowledged.
	Waiting(ctx context.Context) (int, error)

	// Wire is the broker's record of all messages, in its order.
	Wire(ctx context.Context) ([]Delivery, error)
}

// Fault is one SIGKILL.
type Fault struct {
	Taken   float64 // share of the orders that were taken before it
	Booked  float64 // share of the orders that were booked before it
	Process *Process
	Stage   string // where the process stands when it is killed; "" for anywhere
}

// Demo is one run.
type Demo struct {
	Orders   []shop.Order
	Products []shop.Product // the stock at the start

	// Processes are started in this order and stopped in the reverse one. API is
	// the one that takes the orders.
	Processes []*Process
	API       *Process
	Faults    []Fault

	DB     *sql.DB // for reading what the processes wrote
	Owed   string  // the statement that counts the rows of the outbox
	Broker Broker

	Progress Progress
}

const (
	copiesPerFault = 10

	// drainTimeout is how long nothing at all may change before what is missing
	// counts as lost.
	drainTimeout = 30 * time.Second
	settleTime   = 500 * time.Millisecond
	poll         = 10 * time.Millisecond
)

// Run starts the processes, posts the orders, kills as planned, waits until
// everything is delivered and handled, and checks what is there. The error says
// why there is no verdict.
func (d *Demo) Run(ctx context.Context) (Verdict, error) {
	r := &run{Demo: d, client: newClient(), held: map[string][]string{}, copies: map[string]int{}}
	defer func() {
		for _, p := range d.Processes {
			p.Kill() // does nothing after a clean stop
		}
	}()
	for _, p := range d.Processes {
		if err := r.start(ctx, p); err != nil {
			return Verdict{}, err
		}
	}
	group, groupCtx := errgroup.WithContext(ctx)
	finished, finish := context.WithCancel(groupCtx)
	group.Go(func() error { return r.watch(finished) })
	group.Go(func() error {
		defer finish()
		return r.work(groupCtx)
	})
	if err := group.Wait(); err != nil {
		return Verdict{}, err
	}
	for i := len(d.Processes) - 1; i >= 0; i-- {
		if err := d.Processes[i].Stop(); err != nil {
			return Verdict{}, err
		}
	}
	return r.check(ctx)
}

type run struct {
	*Demo
	client *client
	kills  atomic.Int64
	held   map[string][]string // by stage: message ids at which a process was killed
	copies map[string]int      // by message id
}

func (r *run) start(ctx context.Context, p *Process) error {
	address, err := p.Start(ctx)
	if err != nil {
		return err
	}
	if p == r.API {
		r.client.address.Store(&address)
	}
	return nil
}

func (r *run) work(ctx context.Context) error {
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.client.post(groupCtx, r.Orders) })
	group.Go(func() error { return r.kill(groupCtx) })
	if err := group.Wait(); err != nil {
		return err
	}
	return r.drain(ctx)
}

func (r *run) kill(ctx context.Context) error {
	for i, fault := range r.Faults {
		r.openGate(r.Faults[i:])
		if err := until(ctx, func() (bool, error) { return r.due(ctx, fault) }); err != nil {
			return err
		}
		if fault.Stage != "" {
			if err := r.hold(ctx, fault, r.Faults[i+1:]); err != nil {
				return err
			}
		}
		fault.Process.Kill()
		r.kills.Add(1)
		ids, err := r.Broker.Copy(ctx, copiesPerFault)
		if err != nil {
			return fmt.Errorf("send copies: %w", err)
		}
		for _, id := range ids {
			r.copies[id]++
		}
		if err := r.start(ctx, fault.Process); err != nil {
			return err
		}
	}
	r.openGate(nil)
	return nil
}

// openGate lets the orders pass up to the next fault that needs some of them
// afterwards.
func (r *run) openGate(ahead []Fault) {
	limit := len(r.Orders)
	for _, fault := range ahead {
		if fault.Stage == StageRelay {
			limit = r.share(fault.Taken)
			break
		}
	}
	r.client.gate.open(limit)
}

func (r *run) hold(ctx context.Context, fault Fault, ahead []Fault) error {
	if err := fault.Process.Arm(ctx, fault.Stage); err != nil {
		return err
	}
	r.openGate(ahead)
	id, err := fault.Process.Held(ctx)
	if err != nil {
		return err
	}
	r.held[fault.Stage] = append(r.held[fault.Stage], id)
	return nil
}

func (r *run) due(ctx context.Context, fault Fault) (bool, error) {
	if int(r.client.taken.Load()) < r.share(fault.Taken) {
		return false, nil
	}
	if fault.Booked == 0 {
		return true, nil
	}
	booked, err := count(ctx, r.DB, lastEntry)
	return booked >= r.share(fault.Booked), err
}

func (r *run) share(part float64) int { return int(part * float64(len(r.Orders))) }

// drain waits until nothing is owed, nothing waits for the consumer and every
// order is booked, and then a little longer, for whatever should not come. If
// nothing moves any more before that, the check counts what is missing.
func (r *run) drain(ctx context.Context) error {
	type state struct{ owed, waiting, effects, booked int }
	var last state
	moved := time.Now()
	return until(ctx, func() (bool, error) {
		var now state
		var err error
		if now.owed, err = count(ctx, r.DB, r.Owed); err != nil {
			return false, err
		}
		// In this order: what is no longer owed is on the wire by now.
		if now.waiting, err = r.Broker.Waiting(ctx); err != nil {
			return false, fmt.Errorf("ask the broker what waits: %w", err)
		}
		if now.effects, err = count(ctx, r.DB, countLedger); err != nil {
			return false, err
		}
		if now.booked, err = count(ctx, r.DB, countBooked); err != nil {
			return false, err
		}
		if now != last {
			last, moved = now, time.Now()
		}
		if now.owed == 0 && now.waiting == 0 && now.booked >= len(r.Orders) {
			return time.Since(moved) > settleTime, nil
		}
		return time.Since(moved) > drainTimeout, nil
	})
}

func (r *run) check(ctx context.Context) (Verdict, error) {
	tables, err := ReadTables(ctx, r.DB)
	if err != nil {
		return Verdict{}, err
	}
	wire, err := r.Broker.Wire(ctx)
	if err != nil {
		return Verdict{}, fmt.Errorf("read the wire: %w", err)
	}
	r.Progress.Say("  %d kills, %d with messages unconfirmed, %d between commit and acknowledgement;"+
		" %d messages sent twice on purpose, %d requests repeated", r.kills.Load(), len(r.held[StageRelay]),
		len(r.held[StageConsumer]), len(r.copies), r.client.retries.Load())
	return Check(History{
		Orders:      r.Orders,
		Products:    r.Products,
		Tables:      tables,
		Wire:        wire,
		Copies:      r.copies,
		Unconfirmed: r.held[StageRelay],
	}), nil
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
