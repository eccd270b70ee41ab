package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/crucible/check"
	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/crucible/work"
	"github.com/oncemill/oncemill/internal/sleep"
)

// crucible is one run.
type crucible struct {
	options

	dir       string
	site      *site
	processes map[string]*process
	recorder  *recorder
	hurt      *hurt
	began     time.Time
	ended     time.Time // of the producers

	mu      sync.Mutex
	unclean []string // ends of processes that nothing explains
}

const startTimeout = 2 * time.Minute

func run(ctx context.Context, o options, dir string) (err error) {
	lasts := o.time.String()
	if o.time == 0 {
		lasts = "one round"
	}
	say("crucible: seed %d, %s, %.0f transactions/s; starting PostgreSQL and RabbitMQ ...", o.seed, lasts, o.rate)
	c := &crucible{options: o, dir: dir}
	if c.site, err = newSite(ctx, dir, o); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.site.close(ctx)) }()
	defer func() {
		for _, p := range c.processes {
			p.ways.close()
		}
	}()
	if c.processes, err = newProcesses(ctx, c.site, o, dir, c.noteEnd); err != nil {
		return err
	}
	if err := c.torture(ctx); err != nil {
		return err
	}
	in, err := c.collect(ctx)
	if err != nil {
		return err
	}
	counts, results := check.Run(in)
	return c.report(counts, results, in)
}

// torture runs everything until the backlog has drained.
func (c *crucible) torture(ctx context.Context) (err error) {
	own := map[string]*history.Writer{}
	for _, name := range []string{"recorder", "nemesis", "canary", "customers"} {
		w, err := history.Create(c.dir, name)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, w.Close()) }()
		own[name] = w
	}
	c.recorder = &recorder{uris: c.site.amqpURLs(), history: own["recorder"], ids: map[string]struct{}{}}
	c.hurt = &hurt{site: c.site, processes: c.processes, history: own["nemesis"], seed: c.seed, count: map[string]int{}, deaths: map[string]int{}}
	plan, err := c.hurt.plan(c.options)
	if err != nil {
		return err
	}
	intent := fmt.Sprintf("%d faults are planned", len(plan))
	if c.cluster != "" {
		intent = "nodes of the cluster fail in turn"
	}

	group, ctx := errgroup.WithContext(ctx)
	producing, stopProducers := context.WithCancel(ctx)
	defer stopProducers()
	working, stopWorkers := context.WithCancel(ctx)
	defer stopWorkers()
	watching, stopCanary := context.WithCancel(working)
	defer stopCanary()
	operating, stopOperator := context.WithCancel(ctx)
	defer stopOperator()
	group.Go(func() error { return c.recorder.run(working) })
	group.Go(func() error {
		return (&canary{postgres: c.site.url(), amqp: c.site.amqpURLs(), queues: c.site.canaryQueues(), history: own["canary"]}).run(watching)
	})
	shop := &customers{history: own["customers"], seed: c.seed}
	for _, p := range c.processes {
		if p.job.Role == work.RoleService {
			shop.addresses = append(shop.addresses, p.job.Listen)
		}
	}
	slices.Sort(shop.addresses)
	served := make(chan struct{})
	group.Go(func() error {
		defer close(served)
		if len(shop.addresses) == 0 {
			return nil
		}
		return shop.run(ctx, producing)
	})
	group.Go(func() error { return own["recorder"].WatchClock(working, "crucible") }) // with proxies and recorder
	var producers sync.WaitGroup
	for _, p := range c.processes {
		until := working
		if p.job.Role == work.RoleProducer {
			until = producing
			producers.Add(1)
		}
		group.Go(func() error {
			if p.job.Role == work.RoleProducer {
				defer producers.Done()
			}
			err := p.supervise(until)
			if err != nil {
				c.noteUnclean(err.Error())
			}
			return nil
		})
	}
	group.Go(func() error {
		return (&operator{site: c.site, rand: rand.New(rand.NewPCG(c.seed, 3)), left: map[int64]bool{}}).run(operating)
	})
	group.Go(func() error {
		defer stopWorkers()
		defer stopOperator()
		if err := c.awaitAll(ctx); err != nil {
			return err
		}
		say("crucible: %d processes work; %s", len(c.processes), intent)
		c.began = time.Now()
		if err := c.storm(ctx); err != nil {
			return err
		}
		stopProducers()
		producers.Wait()
		<-served
		c.ended = time.Now()
		say("crucible: all faults are healed, the producers have stopped; the backlog drains ...")
		return c.drain(ctx, func() { stopOperator(); stopCanary() })
	})
	return group.Wait()
}

func (c *crucible) awaitAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for _, p := range c.processes {
		if err := p.awaitLife(ctx, 0); err != nil {
			return err
		}
	}
	return nil
}

// storm lets the nemesis rage for as long as the run is to last.
func (c *crucible) storm(ctx context.Context) error {
	plan, err := c.hurt.plan(c.options)
	if err != nil {
		return err
	}
	within, stop := context.WithCancel(ctx)
	defer stop()
	go c.watch(within)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.upgrade(ctx) })
	group.Go(func() error {
		if cluster := c.site.cluster(); cluster != nil && !c.calm {
			return c.hurt.takeTurns(ctx, c.time, cluster, c.only)
		}
		return c.hurt.rage(ctx, c.began, plan)
	})
	if err := group.Wait(); err != nil {
		return err
	}
	if len(plan) > 0 && c.only == "" && c.rival == "" {
		if err := c.encore(within); err != nil {
			return err
		}
	}
	sleep.For(within, time.Until(c.began.Add(c.time)))
	return within.Err()
}

// watch says how far the run is, every ten seconds.
func (c *crucible) watch(ctx context.Context) {
	ticker := time.NewTicker(10 * time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			c.hurt.mu.Lock()
			faults := 0
			for _, n := range c.hurt.count {
				faults += n
			}
			c.hurt.mu.Unlock()
			say("  %4.0f s  %6d messages on the wire  %4d faults", time.Since(c.began).Seconds(), c.recorder.different(), faults)
		case <-ctx.Done():
			return
		}
	}
}

// noteEnd looks at how a process ended. SIGKILL and SIGTERM are what the nemesis does, and a
// process whose database is away at its start gives up; a panic is a defect.
func (c *crucible) noteEnd(name string, err error) {
	if err == nil {
		return
	}
	if text := err.Error(); strings.Contains(text, "exit status 2") {
		c.noteUnclean(name + " panicked: see its log")
	}
}

func (c *crucible) noteUnclean(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unclean = append(c.unclean, text)
}

func (c *crucible) path(name string) string { return filepath.Join(c.dir, name) }

func say(format string, args ...any) { fmt.Fprintf(os.Stdout, format+"\n", args...) }
