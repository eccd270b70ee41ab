// Package verify runs a small service on the user's own servers, hurts its processes and
// connections, and checks what is left. Everything it creates has one name, and is removed at
// the end. It touches nothing else.
//
// The run is the parent of its processes, which are this executable again (worker.go). It sends
// the requests (customers.go), injects the faults (faults.go), and records every message
// (wire.go). Package check judges the result.
package verify

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/cmd/oncemill/internal/verify/check"
	"github.com/oncemill/oncemill/internal/sleep"
)

// Config describes a run.
type Config struct {
	Access

	Time     time.Duration // how long requests begin and faults are injected
	Rate     float64       // requests a second
	Seed     uint64        // of requests and faults
	Lease    time.Duration // of the relays
	Patience time.Duration // how long nothing may move before what is missing counts as lost
	Keep     bool          // everything stays
	Version  string        // of the program
	Worker   []string      // arguments that make this executable a worker

	Migrations []oncemill.Migrations

	// Progress is called about twice a second. Optional.
	Progress func(Progress)
}

// Progress is how far a run has come.
type Progress struct {
	Phase    string
	Left     time.Duration // of the phase; 0 if it ends when all work is done
	Requests int           // answered or rolled back
	Messages int           // different ones that the broker has delivered
	Faults   int
}

// run is one run.
type run struct {
	Config
	db    *sql.DB
	texts *texts

	wire      *wire
	customers *customers
	faults    *faults
	processes map[string]*process
	logs      string // directory
}

// Run runs and returns the certificate. An error means that there is none.
func Run(ctx context.Context, cfg Config) (c *Certificate, err error) {
	connector, err := cfg.connector("verify")
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	db.SetMaxIdleConns(2)
	defer func() { err = errors.Join(err, db.Close()) }()
	s := &scratch{Access: &cfg.Access, db: db, texts: newTexts(cfg.Schema)}
	if !cfg.Keep {
		defer func() { err = errors.Join(err, s.remove(ctx)) }()
	}
	began := time.Now()
	c = &Certificate{Version: cfg.Version, Date: began.UTC().Truncate(time.Second), Run: settingsOf(cfg), Limits: limits}
	var shared bool
	if c.PostgreSQL, c.RabbitMQ, shared, err = s.describe(ctx); err != nil {
		return nil, err
	}
	c.warn()
	if err := s.create(ctx); err != nil {
		return nil, err
	}
	if err := oncemill.Migrate(ctx, db, cfg.database(), cfg.Migrations...); err != nil {
		return nil, err
	}
	r := newRun(cfg, s)
	if r.logs, err = os.MkdirTemp("", NamePrefix); err != nil {
		return nil, err
	}
	h, err := r.run(ctx, r.kinds(shared))
	if ctx.Err() != nil {
		return nil, errors.Join(errInterrupted, os.RemoveAll(r.logs))
	}
	if err != nil {
		return nil, fmt.Errorf("%w; the logs of the processes are in %s", err, r.logs)
	}
	c.judge(h, r)
	c.Seconds = time.Since(began).Round(time.Second / 10).Seconds()
	if c.Passed() && !cfg.Keep {
		return c, os.RemoveAll(r.logs)
	}
	c.Logs = r.logs
	return c, nil
}

func newRun(cfg Config, s *scratch) *run {
	r := &run{Config: cfg, db: s.db, texts: s.texts, wire: newWire(s.Access), processes: map[string]*process{}}
	r.customers = &customers{seed: cfg.Seed, rate: cfg.Rate}
	r.faults = &faults{
		processes: r.processes, wire: r.wire, lease: cfg.Lease, seed: cfg.Seed, count: map[string]int{}, skipped: map[string]string{},
	}
	for i, name := range processNames {
		role, _, _ := strings.Cut(name, "-")
		p := &process{job: job{Access: cfg.Access, Role: role, Name: name, Lease: cfg.Lease}, args: cfg.Worker, outcome: r.faults.outcome}
		r.processes[name] = p
		if i < services {
			r.customers.services = append(r.customers.services, p)
		}
	}
	return r
}

// kinds returns the kinds of faults that are possible here.
func (r *run) kinds(shared bool) (kinds []string) {
	if shared {
		r.faults.skipped[faultEnd] = "a pooler is in between, so a backend may be another program's"
	}
	if freezeSignal == nil {
		r.faults.skipped[faultFreeze] = "not possible on this system"
	}
	for _, kind := range faultKinds {
		if r.faults.skipped[kind] == "" {
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

// run runs the processes, and returns what they left.
func (r *run) run(ctx context.Context, kinds []string) (*check.History, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	working, stop := context.WithCancel(ctx)
	var recorder, processes sync.WaitGroup
	recorder.Go(func() { r.wire.record(ctx) })
	for name, p := range r.processes {
		p.log = filepath.Join(r.logs, name+".log")
		processes.Go(func() {
			if err := p.supervise(working); err != nil {
				cancel(err)
			}
		})
	}
	end := func() {
		stop()
		processes.Wait()
	}
	defer recorder.Wait()
	defer cancel(nil)
	err := r.work(ctx, kinds)
	end()
	var h *check.History
	if err == nil {
		h, err = r.collect(ctx)
	}
	if ctx.Err() != nil { // the cause of err
		err = context.Cause(ctx)
	}
	return h, err
}

var errInterrupted = errors.New("interrupted")

const lookEvery = 500 * time.Millisecond

// work waits for the processes, lets customers and faults loose, and returns when all work is
// done or nothing moves any more.
func (r *run) work(ctx context.Context, kinds []string) error {
	moving, err := r.await(ctx, "starting", startPatience, func() (any, bool) {
		n := 0
		for _, p := range r.processes {
			if p.hasWorked() {
				n++
			}
		}
		return n, n == len(r.processes)
	})
	if err == nil && !moving {
		err = errNotReady
	}
	if err != nil {
		return err
	}
	shutAt := time.Now().Add(r.Time)
	open, shut := context.WithDeadline(ctx, shutAt)
	defer shut()
	answering, giveUp := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { r.customers.run(answering, open) })
	group.Go(func() { r.faults.run(ctx, open, planFaults(r.Seed, r.Time, kinds)) })
	over := make(chan struct{}) // all requests are answered, and every process runs
	go func() {
		group.Wait()
		close(over)
	}()
	defer func() {
		giveUp()
		<-over
	}()
	for sleep.For(open, lookEvery) {
		r.show("running", time.Until(shutAt))
	}
	_, err = r.await(ctx, "finishing", r.Patience, func() (any, bool) {
		var now state
		var dbErr, queueErr error
		now.counts, dbErr = r.texts.count(ctx, r.db)
		now.began, now.open, now.answers = r.customers.progress()
		now.different = r.wire.different()
		now.waiting, queueErr = r.wire.waiting()
		if dbErr != nil || queueErr != nil {
			return nil, false // as if nothing had moved
		}
		select {
		case <-over:
			return now, now.done()
		default:
			return now, false
		}
	})
	return err // what is missing is judged by what is there
}

// state is how far the work has come.
type state struct {
	counts
	began, open, answers int // requests
	different            int // messages on the wire
	waiting              int // in the consumers' queues
}

func (s *state) done() bool {
	return s.Unsent == 0 && s.waiting == 0 && s.Effects+s.Letters >= s.Sent && s.different >= s.Sent
}

const startPatience = 2 * time.Minute

var errNotReady = fmt.Errorf("no further process became ready for %s", startPatience)

// await looks until done. It returns false if what look returns has not changed for as long as
// patience.
func (r *run) await(ctx context.Context, phase string, patience time.Duration, look func() (state any, done bool)) (bool, error) {
	var last any
	for moved := time.Now(); time.Since(moved) < patience; {
		state, done := look()
		if done {
			return true, nil
		}
		if state != nil && state != last {
			last, moved = state, time.Now()
		}
		r.show(phase, 0)
		if !sleep.For(ctx, lookEvery) {
			return false, ctx.Err()
		}
	}
	return false, nil
}

// show reports progress.
func (r *run) show(phase string, left time.Duration) {
	if r.Progress == nil {
		return
	}
	began, open, _ := r.customers.progress()
	r.Progress(Progress{Phase: phase, Left: left, Requests: began - open, Messages: r.wire.different(), Faults: r.faults.total()})
}

// collect returns what a run left, when its processes have ended.
func (r *run) collect(ctx context.Context) (*check.History, error) {
	if err := r.wire.sendSentinel(ctx); err != nil {
		return nil, err
	}
	read, err := r.await(ctx, "reading", startPatience, func() (any, bool) {
		select {
		case <-r.wire.ended:
			return nil, true
		default:
			return r.wire.received(), false
		}
	})
	if err == nil && !read {
		err = fmt.Errorf("queue %s could not be read to its end", r.mirror())
	}
	if err != nil {
		return nil, err
	}
	h := &check.History{
		Requests: r.customers.requests, Wire: r.wire.copies,
		Topics: []check.Topic{{Name: r.topic(roleFirst), Consumer: roleFirst}, {Name: r.topic(roleSecond), Consumer: roleSecond}},
	}
	return h, r.texts.read(ctx, r.db, h)
}

func settingsOf(cfg Config) []Setting {
	return []Setting{
		{"name", cfg.Schema},
		{"time", cfg.Time.String()},
		{"requests a second", strconv.FormatFloat(cfg.Rate, 'g', -1, 64)},
		{"lease", cfg.Lease.String()},
		{"seed", strconv.FormatUint(cfg.Seed, 10)},
		{"processes", strings.Join(processNames, ", ")},
	}
}
