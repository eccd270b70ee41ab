package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/crucible/nemesis"
	"github.com/oncemill/oncemill/internal/sleep"
)

const (
	injectTimeout = 20 * time.Second

	// healTimeout is how long healing is tried again. Other faults may be in its way.
	healTimeout = 2 * time.Minute
)

// rage follows a plan, heals every fault, and returns when all are healed. An error means that a
// fault could not be healed, which makes the run worthless.
func (h *hurt) rage(ctx context.Context, begin time.Time, plan []nemesis.Fault) error {
	byKind := map[string]fault{}
	for _, f := range h.faults() {
		byKind[f.Name] = f
	}
	var group sync.WaitGroup
	errs := make(chan error, len(plan))
	for _, planned := range plan {
		group.Go(func() {
			timer := time.NewTimer(time.Until(begin.Add(planned.At)))
			defer timer.Stop()
			select {
			case <-timer.C:
				errs <- h.strike(ctx, byKind[planned.Kind], planned)
			case <-ctx.Done():
				errs <- nil
			}
		})
	}
	group.Wait()
	for range plan {
		if err := <-errs; err != nil {
			return err
		}
	}
	return ctx.Err()
}

// strike injects one fault, heals it and writes it down.
func (h *hurt) strike(ctx context.Context, f fault, planned nemesis.Fault) error {
	record := history.Fault{Kind: planned.Kind, Target: planned.Target, Since: time.Now()}
	injectCtx, cancel := context.WithTimeout(ctx, injectTimeout)
	end, err := f.inject(injectCtx, planned.Target)
	cancel()
	record.Injected = time.Now()
	if err != nil {
		record.Error = err.Error()
	}
	if end != nil {
		timer := time.NewTimer(planned.For)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
		if err := h.heal(ctx, end); err != nil {
			return fmt.Errorf("%s of %s cannot be healed: %w", planned.Kind, planned.Target, err)
		}
	}
	if record.Error == "" {
		h.mu.Lock()
		h.count[planned.Kind]++
		h.mu.Unlock()
	}
	return h.history.Add(history.Record{Event: history.EventFault, Fault: &record})
}

func (h *hurt) heal(ctx context.Context, end heal) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), healTimeout)
	defer cancel()
	return insist(ctx, end)
}

// insist repeats do until it succeeds or ctx ends.
func insist(ctx context.Context, do func(context.Context) error) error {
	for {
		err := do(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(300 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// plan returns the plan of a run.
func (h *hurt) plan(o options) ([]nemesis.Fault, error) {
	if o.calm || o.cluster != "" {
		return nil, nil
	}
	only, err := regexp.Compile(o.only)
	if err != nil {
		return nil, err
	}
	var kinds []nemesis.Kind
	for _, f := range h.faults() {
		f.Targets = slices.DeleteFunc(slices.Clone(f.Targets), h.absent)
		if len(f.Targets) > 0 && only.MatchString(f.Name) {
			kinds = append(kinds, f.Kind)
		}
	}
	if len(kinds) == 0 {
		return nil, fmt.Errorf("no kind of fault matches %q", o.only)
	}
	return nemesis.Plan(o.seed, o.time, kinds), nil
}

// absent reports whether a target is a process that this run does not have.
func (h *hurt) absent(target string) bool {
	return slices.Contains(everybody, target) && h.processes[target] == nil
}

// takeTurns injects the faults of a cluster one after the other, each round in another order,
// and lets the cluster recover from each, until the next would end too late. If it may last 0, it
// is one round.
func (h *hurt) takeTurns(ctx context.Context, lasts time.Duration, nodes cluster, only string) error {
	matches, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	chance := rand.New(rand.NewPCG(h.seed, 4))
	until := time.Now().Add(lasts)
	for {
		turns := slices.DeleteFunc(nodes.turns(), func(t turn) bool { return !matches.MatchString(t.name) })
		if len(turns) == 0 {
			return fmt.Errorf("no kind of fault matches %q", only)
		}
		chance.Shuffle(len(turns), func(i, j int) { turns[i], turns[j] = turns[j], turns[i] })
		for _, t := range turns {
			if lasts > 0 && time.Until(until) < t.lasts+2*betweenTurns {
				return nil
			}
			if !sleep.For(ctx, betweenTurns) {
				return ctx.Err()
			}
			planned := nemesis.Fault{Kind: t.name, Target: check.Cluster, For: t.lasts}
			inject := func(ctx context.Context, _ string) (heal, error) { return t.inject(ctx) }
			if err := h.strike(ctx, fault{inject: inject}, planned); err != nil {
				return err
			}
			if err := nodes.awaitHealth(ctx); err != nil {
				return err
			}
		}
		if lasts == 0 {
			sleep.For(ctx, betweenTurns)
			return ctx.Err()
		}
	}
}

const betweenTurns = 3 * time.Second
