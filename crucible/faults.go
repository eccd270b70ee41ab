package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/crucible/nemesis"
	"github.com/oncemill/oncemill/internal/crashpoint"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/testserver"
)

// heal ends a fault. It is called again after an error.
type heal func(ctx context.Context) error

// fault is a kind of fault and how it is injected.
type fault struct {
	nemesis.Kind

	inject func(ctx context.Context, target string) (heal, error)
}

// hurt injects faults into a site and its processes.
type hurt struct {
	site      *site
	processes map[string]*process
	history   *history.Writer
	seed      uint64

	mu     sync.Mutex
	count  map[string]int // by kind
	deaths map[string]int // at moments of package crashpoint
}

const (
	brief = time.Second
	short = 3 * time.Second
	long  = 7 * time.Second // past the lease
)

var (
	relays    = []string{"relay-1", "relay-2"}
	consumers = []string{"ledger-1", "ledger-2", "receipts-1", "receipts-2"}
	producers = []string{"producer-1", "producer-2"}
	workers   = slices.Concat(relays, consumers)
	services  = []string{"service-1", "service-2"}
	everybody = slices.Concat(workers, producers, services)
	broker    = []string{"rabbitmq"}
	database  = []string{"postgres"}
)

// faults returns all kinds.
func (h *hurt) faults() []fault {
	return slices.Concat(h.processFaults(), h.crashFaults(), h.databaseFaults(), h.brokerFaults(), h.pauses())
}

func kind(name string, targets []string, least, most time.Duration) nemesis.Kind {
	return nemesis.Kind{Name: name, Targets: targets, Min: least, Max: most}
}

// alone is a kind that does not overlap with others of the same resource.
func alone(resource string, k nemesis.Kind) nemesis.Kind {
	k.Alone = resource
	return k
}

func (h *hurt) processFaults() []fault {
	var all []fault
	for _, group := range [][]string{relays, consumers, producers, services} {
		role, _, _ := strings.Cut(group[0], "-")
		if role == "ledger" {
			role = "consumer"
		}
		all = append(all,
			fault{kind("kill-"+role, group, 0, 0), h.end(syscall.SIGKILL)},
			fault{kind("term-"+role, group, 0, 0), h.end(syscall.SIGTERM)},
			fault{kind("freeze-"+role, group, brief, long), h.freeze},
		)
	}
	return all
}

// crashFaults are deaths at a named moment, in a build that has them. Each kind takes its
// moments in turn.
func (h *hurt) crashFaults() []fault {
	if !crashpoint.On {
		return nil
	}
	handler := []string{crashpoint.AfterClaim, crashpoint.AfterEffect, crashpoint.BeforeCommit, crashpoint.AfterCommit}
	var before, after []string
	for _, call := range crashpoint.Calls {
		before, after = append(before, crashpoint.Before(call)), append(after, crashpoint.After(call))
	}
	return []fault{
		{kind("crash-relay-before-database", relays, 0, 0), h.die(before)},
		{kind("crash-relay-after-database", relays, 0, 0), h.die(after)},
		{kind("crash-relay-sink", relays, 0, 0), h.die([]string{crashpoint.AfterTransmit, crashpoint.AfterOutcome})},
		{kind("crash-consumer", consumers, 0, 0), h.die(handler)},
		{kind("crash-producer", producers, 0, 0), h.die([]string{crashpoint.BeforeCommit, crashpoint.AfterCommit})},
		{kind("crash-service", services, 0, 0), h.die(append(handler, crashpoint.BeforeAnswer, crashpoint.AfterAnswer))},
	}
}

// die makes a process die at the next of some moments. If it is not reached soon, nothing
// happens, which is an error.
func (h *hurt) die(moments []string) func(context.Context, string) (heal, error) {
	var turn atomic.Uint64
	turn.Store(h.seed)
	return func(ctx context.Context, target string) (heal, error) {
		moment := moments[turn.Add(1)%uint64(len(moments))]
		p := h.processes[target]
		life := p.life()
		p.arm(moment)
		for begin := time.Now(); p.life() == life; {
			if time.Since(begin) > long || !sleep.For(ctx, 50*time.Millisecond) {
				p.arm("")
				return nil, fmt.Errorf("%s was not reached", moment)
			}
		}
		h.mu.Lock()
		h.deaths[moment]++
		h.mu.Unlock()
		return func(ctx context.Context) error { return p.awaitLife(ctx, life) }, nil
	}
}

// end ends a process by a signal. The fault lasts until the next life of the process works.
func (h *hurt) end(s syscall.Signal) func(context.Context, string) (heal, error) {
	return func(_ context.Context, target string) (heal, error) {
		p := h.processes[target]
		life := p.life()
		p.signal(s)
		return func(ctx context.Context) error { return p.awaitLife(ctx, life) }, nil
	}
}

func (h *hurt) freeze(_ context.Context, target string) (heal, error) {
	later := h.processes[target].signal(syscall.SIGSTOP)
	return func(context.Context) error {
		later(syscall.SIGCONT)
		return nil
	}, nil
}

// onProxy is a fault of a proxy: set, then unset.
func (h *hurt) onProxy(set, unset func(w ways)) func(context.Context, string) (heal, error) {
	return func(_ context.Context, target string) (heal, error) {
		w := h.processes[target].ways
		set(w)
		return func(context.Context) error {
			unset(w)
			return nil
		}, nil
	}
}

func nothing(ways) {}

// proxied are the faults of the ways to PostgreSQL.
func (h *hurt) proxied() []fault {
	resume := func(w ways) { w.postgres.Resume() }
	return []fault{
		{kind("postgres-cut", everybody, 0, 0), h.onProxy(func(w ways) { w.postgres.Cut() }, nothing)},
		{kind("postgres-silent-relay", relays, short, long), h.onProxy(func(w ways) { w.postgres.SilenceAll() }, resume)},
		{kind("postgres-silent", slices.Concat(consumers, producers, services), short, long), h.onProxy(func(w ways) { w.postgres.SilenceAll() }, resume)},
		{kind("postgres-silent-connections", everybody, short, long), h.onProxy(func(w ways) { w.postgres.Silence(nil, 0) }, resume)},
		{kind("postgres-silent-commit", everybody, short, long), h.onProxy(func(w ways) {
			w.postgres.Silence(testserver.Containing("commit"), 2)
		}, resume)},
		{kind("postgres-silent-insert", everybody, short, long), h.onProxy(func(w ways) {
			w.postgres.Silence(testserver.Containing("insert"), 2)
		}, resume)},
		{kind("postgres-silent-delete", relays, short, long), h.onProxy(func(w ways) {
			w.postgres.Silence(testserver.Containing("delete"), 1)
		}, resume)},
		{kind("postgres-lost-commit-answer", slices.Concat(producers, services), short, long), h.onProxy(func(w ways) { w.postgres.CutCommits(5) },
			func(w ways) { w.postgres.CutCommits(0) })},
		{kind("postgres-lost-commit-answer-worker", workers, short, long), h.onProxy(func(w ways) { w.postgres.CutCommits(5) },
			func(w ways) { w.postgres.CutCommits(0) })},
		{kind("postgres-slow", workers, brief, short), h.onProxy(func(w ways) { w.postgres.Slow(64 << 10) },
			func(w ways) { w.postgres.Slow(0) })},
	}
}

func (h *hurt) brokerFaults() []fault {
	thaw := func(w ways) {
		w.amqp.Frozen.Store(false)
		w.amqp.Cut() // frames are missing
	}
	return []fault{
		{kind("amqp-cut", workers, 0, 0), h.onProxy(func(w ways) { w.amqp.Cut() }, nothing)},
		{kind("amqp-silent-relay", relays, short, long), h.onProxy(func(w ways) { w.amqp.Frozen.Store(true) }, thaw)},
		{kind("amqp-silent-consumer", consumers, short, long), h.onProxy(func(w ways) { w.amqp.Frozen.Store(true) }, thaw)},
		{kind("amqp-lost-acks", relays, brief, short), h.onProxy(func(w ways) { w.amqp.DropAcks.Store(true) },
			func(w ways) { w.amqp.DropAcks.Store(false) })},
		{kind("amqp-late-frames", workers, short, long), h.onProxy(func(w ways) { w.amqp.Delay.Store(int64(300 * time.Millisecond)) },
			func(w ways) { w.amqp.Delay.Store(0) })},
		{kind("amqp-slow", relays, short, long), h.onProxy(func(w ways) { w.amqp.Rate.Store(64 << 10) },
			func(w ways) { w.amqp.Rate.Store(0) })},
		{alone("broker", kind("rabbitmq-connections-closed", broker, 0, 0)), func(ctx context.Context, _ string) (heal, error) {
			return done, h.site.closeConnections(ctx)
		}},
		{alone("broker", kind("rabbitmq-app-stopped", broker, brief, short)), h.eval(testserver.StopApp, testserver.StartApp)},
		{alone("broker", kind("rabbitmq-memory-alarm", broker, brief, short)), h.eval(testserver.RaiseMemoryAlarm, testserver.ClearMemoryAlarm)},
		{alone("broker", kind("rabbitmq-disk-alarm", broker, brief, short)), h.eval(testserver.RaiseDiskAlarm, testserver.ClearDiskAlarm)},
		{alone("audit", kind("topic-without-queue", []string{"topic audit"}, short, long)), h.unbind},
		{alone("audit", kind("queue-full", []string{"topic audit"}, short, long)), h.fill},
	}
}

func done(context.Context) error { return nil }

// eval evaluates expressions in RabbitMQ to begin and to end a fault. The broker may still be
// starting after another, so it insists.
func (h *hurt) eval(begin, end string) func(context.Context, string) (heal, error) {
	return func(ctx context.Context, _ string) (heal, error) {
		run := func(expression string) func(context.Context) error {
			return func(ctx context.Context) error { return h.site.rabbit.Eval(ctx, expression) }
		}
		return run(end), insist(ctx, run(begin))
	}
}

// unbind takes all queues of a topic away: its messages are returned. A broker that is starting
// may not have restored a binding yet, and would after it was deleted: each is deleted when it has
// been seen.
func (h *hurt) unbind(ctx context.Context, target string) (heal, error) {
	_, topic, _ := strings.Cut(target, " ")
	seen := map[string]bool{}
	// The record loses its binding last and gets it back first: what is routed is recorded.
	err := insist(ctx, func(ctx context.Context) error {
		bound, err := h.bound(ctx, topic)
		if err != nil {
			return err
		}
		for _, q := range []string{boxQueue, mirrorQueue} {
			switch {
			case slices.Contains(bound, q):
				seen[q] = true
				if err := h.site.do(ctx, http.MethodDelete, "bindings/%2F/e/"+topic+"/q/"+q+"/~", "", nil); err != nil {
					return err
				}
			case !seen[q]:
				return errNotBound
			}
		}
		return nil
	})
	return func(ctx context.Context) error {
		for _, q := range []string{mirrorQueue, boxQueue} {
			if err := h.site.do(ctx, http.MethodPost, "bindings/%2F/e/"+topic+"/q/"+q, "{}", nil); err != nil {
				return err
			}
			switch bound, err := h.bound(ctx, topic); {
			case err != nil:
				return err
			case !slices.Contains(bound, q):
				return errNotBound
			}
		}
		return nil
	}, err
}

var errNotBound = errors.New("a queue is not bound")

// bound returns the queues that are bound to the exchange of a topic.
func (h *hurt) bound(ctx context.Context, topic string) (queues []string, err error) {
	var bindings []struct {
		Destination string `json:"destination"`
	}
	err = h.site.do(ctx, http.MethodGet, "exchanges/%2F/"+topic+"/bindings/source", "", &bindings)
	for _, b := range bindings {
		queues = append(queues, b.Destination)
	}
	return queues, err
}

// fill makes a queue of the topic nack everything.
func (h *hurt) fill(ctx context.Context, _ string) (heal, error) {
	const path = "policies/%2F/full"
	policy := fmt.Sprintf(`{"pattern": "^%s$", "apply-to": "queues", "definition": {"max-length": 0, "overflow": "reject-publish"}}`, boxQueue)
	err := insist(ctx, func(ctx context.Context) error { return h.site.do(ctx, http.MethodPut, path, policy, nil) })
	return func(ctx context.Context) error {
		return h.site.do(ctx, http.MethodDelete, path, "", nil)
	}, err
}
