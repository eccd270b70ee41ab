package main

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
)

// recovery is how long the first confirm and the first effect took after the heal of a fault.
type recovery struct {
	ConfirmP50 time.Duration `json:"confirm_p50_ns"`
	ConfirmMax time.Duration `json:"confirm_max_ns"`
	EffectP50  time.Duration `json:"effect_p50_ns"`
	EffectMax  time.Duration `json:"effect_max_ns"`

	outages []outage
}

// outage is a time in which a server took no writes, or a fault that was healed.
type outage struct {
	check.Window

	after           string        // the fault that began last
	confirm, effect time.Duration // how long each took; negative: none came
}

func recoveries(in *check.Input) (r recovery) {
	var wire, effects []time.Time
	for _, w := range in.Wire {
		wire = append(wire, w.At)
	}
	for _, e := range in.Effects {
		effects = append(effects, e.At)
	}
	slices.SortFunc(wire, time.Time.Compare)
	slices.SortFunc(effects, time.Time.Compare)
	healed := in.Faults
	if slices.ContainsFunc(healed, func(f check.Fault) bool { return f.Target == check.Cluster }) {
		healed = joined(check.Outages(in.Slow)) // the nodes heal themselves
	}
	for _, f := range healed {
		o := outage{Window: f.Window, confirm: until(wire, f.To), effect: until(effects, f.To)}
		for _, cause := range in.Faults { // in the order in which they ended, and clusters have one at a time
			if cause.From.Before(f.To) {
				o.after = cause.Kind
			}
		}
		r.outages = append(r.outages, o)
	}
	r.ConfirmP50, r.ConfirmMax = spread(r.outages, func(o outage) time.Duration { return o.confirm })
	r.EffectP50, r.EffectMax = spread(r.outages, func(o outage) time.Duration { return o.effect })
	return r
}

// lull is how long the servers may take writes between two parts of one outage. A recovery that takes
// longer is measured.
const lull = 2 * time.Second

// joined returns the outages in order of time, those of all servers together.
func joined(outages []check.Fault) (all []check.Fault) {
	slices.SortFunc(outages, func(a, b check.Fault) int { return a.From.Compare(b.From) })
	for _, o := range outages {
		if n := len(all); n > 0 && o.From.Before(all[n-1].To.Add(lull)) {
			if o.To.After(all[n-1].To) {
				all[n-1].To = o.To
			}
			continue
		}
		all = append(all, o)
	}
	return all
}

// until returns how long after a time the first of the events comes; negative: none does.
func until(events []time.Time, after time.Time) time.Duration {
	i, _ := slices.BinarySearchFunc(events, after, time.Time.Compare)
	if i == len(events) {
		return -1
	}
	return events[i].Sub(after).Round(time.Millisecond)
}

func spread(outages []outage, of func(outage) time.Duration) (p50, most time.Duration) {
	var times []time.Duration
	for _, o := range outages {
		if of(o) >= 0 {
			times = append(times, of(o))
		}
	}
	if len(times) == 0 {
		return 0, 0
	}
	slices.Sort(times)
	return times[len(times)/2], times[len(times)-1]
}

func (r recovery) list() {
	say("  outages, and how long the next confirm and the next effect took after each")
	for _, o := range r.outages {
		say("    %s to %s  %-20s %8s %8s", o.From.Format(time.TimeOnly), o.To.Format(time.TimeOnly), o.after, orNone(o.confirm), orNone(o.effect))
	}
}

func orNone(d time.Duration) string {
	if d < 0 {
		return "none"
	}
	return d.String()
}
