package check

import (
	"slices"
	"strings"
	"time"
)

// judge knows which times are excused.
type judge struct {
	in     *Input
	common []Window // no way was free: servers, tables that everybody needs, all relays
	cache  map[string][]Window
	owners map[int][]Window // by lane: when it belonged to a relay at fault, merged
}

func newJudge(in *Input) *judge {
	j := &judge{in: in, cache: map[string][]Window{}, owners: map[int][]Window{}}
	relays := map[string][]Window{}
	for _, f := range slices.Concat(in.Faults, in.Slow) {
		switch {
		case f.Target == "postgres", f.Target == "rabbitmq", f.Target == "crucible", slices.Contains(vital, f.Target):
			j.common = append(j.common, f.Window)
		case strings.HasPrefix(f.Target, "relay-"):
			// Its lanes are free for others when its lease has expired.
			relays[f.Target] = append(relays[f.Target], Window{f.From, f.To.Add(in.Lease)})
		}
	}
	j.common = append(j.common, intersect(relays, in)...)
	for lane, tenures := range tenures(in.LaneWrites) {
		for _, t := range tenures {
			for _, f := range slices.Concat(in.Faults, in.Slow) {
				if f.Target == t.relay && f.To.After(t.From) && f.From.Before(t.To) {
					j.owners[lane] = append(j.owners[lane], f.Window)
				}
			}
		}
		j.owners[lane] = merge(j.owners[lane])
	}
	return j
}

// tenure is how long a lane belonged to a relay.
type tenure struct {
	Window

	relay string
}

// tenures returns, for each lane, to which relays it belonged, one after the other.
func tenures(writes []LaneWrite) map[int][]tenure {
	all := map[int][]tenure{}
	for _, w := range writes {
		if w.Kind != LaneTaken {
			continue
		}
		if n := len(all[w.Lane]); n > 0 {
			all[w.Lane][n-1].To = w.At
		}
		relay, _, _ := strings.Cut(w.Writer, "/")
		all[w.Lane] = append(all[w.Lane], tenure{Window{w.At, forever}, relay})
	}
	return all
}

var forever = time.Unix(1<<40, 0)

// excusesOf returns the times in which a group may stand, as far as they matter for a wait in w.
//
// One fault of the relay that has a lane excuses nothing: within a lease another one takes the
// lane. Each further one in the same wait may cost a lease again, for as long as it lasts.
func (j *judge) excusesOf(group string, lane int, w Window) []Window {
	all := j.excuses(group)
	if lane < 0 || w.To.Sub(w.From) <= 2*j.in.Lease {
		return all
	}
	all = slices.Clone(all)
	first := true
	for _, f := range j.owners[lane] {
		if f.To.Before(w.From) || f.From.After(w.To) {
			continue
		}
		if to := f.From.Add(j.in.Lease); f.To.After(to) {
			f.To = to
		}
		if !first {
			all = append(all, f)
		}
		first = false
	}
	return merge(all)
}

// vital are the tables that no worker can do without.
var vital = []string{"table outbox", "table relay_leases", "table relay_workers"}

// intersect returns the times in which all relays were at fault.
func intersect(relays map[string][]Window, in *Input) []Window {
	const workers = 2
	if len(relays) < workers {
		return nil
	}
	var both []Window
	first, second := merge(relays["relay-1"]), merge(relays["relay-2"])
	for _, a := range first {
		for _, b := range second {
			w := Window{a.From, a.To}
			if b.From.After(w.From) {
				w.From = b.From
			}
			if b.To.Before(w.To) {
				w.To = b.To
			}
			if w.To.After(w.From) {
				both = append(both, w)
			}
		}
	}
	return both
}

// excuses returns the times in which a lane, topic or consumer may stand still, merged.
func (j *judge) excuses(group string) []Window {
	kind, name, _ := strings.Cut(group, " ")
	if kind == "lane" {
		name = ""
	}
	key := kind + " " + name
	if merged, ok := j.cache[key]; ok {
		return merged
	}
	all := slices.Clone(j.common)
	for _, f := range slices.Concat(j.in.Faults, j.in.Slow) {
		if j.concerns(f, kind, name) {
			all = append(all, f.Window)
		}
	}
	j.cache[key] = merge(all)
	return j.cache[key]
}

// concerns reports whether a fault stops this topic or consumer.
func (j *judge) concerns(f Fault, kind, name string) bool {
	switch kind {
	case "topic": // the second hop's messages begin to wait before their handler has committed
		return f.Target == "topic "+name || name == secondHop && strings.HasPrefix(f.Target, firstHop+"-")
	case "consumer":
		return strings.HasPrefix(f.Target, name+"-") || f.Target == "consumer "+name || slices.Contains(inboxTables, f.Target) ||
			name == firstHop && f.Target == "table mirror"
	}
	return false
}

var inboxTables = []string{"table inbox", "table inbox_failures", "table inbox_sequences"}

// merge joins windows that overlap.
func merge(windows []Window) (merged []Window) {
	slices.SortFunc(windows, func(a, b Window) int { return a.From.Compare(b.From) })
	for _, w := range windows {
		if n := len(merged); n > 0 && !w.From.After(merged[n-1].To) {
			if w.To.After(merged[n-1].To) {
				merged[n-1].To = w.To
			}
			continue
		}
		merged = append(merged, w)
	}
	return merged
}

// covered returns how much of w lies in merged windows.
func covered(w Window, merged []Window) (sum time.Duration) {
	for _, m := range merged {
		from, to := m.From, m.To
		if from.Before(w.From) {
			from = w.From
		}
		if to.After(w.To) {
			to = w.To
		}
		if to.After(from) {
			sum += to.Sub(from)
		}
	}
	return sum
}

// longestFree returns the longest part of w that lies in no merged window.
func longestFree(w Window, merged []Window) (longest time.Duration) {
	from := w.From
	for _, m := range merged {
		if m.From.After(from) {
			to := m.From
			if to.After(w.To) {
				to = w.To
			}
			longest = max(longest, to.Sub(from))
		}
		if m.To.After(from) {
			from = m.To
		}
	}
	if w.To.After(from) {
		longest = max(longest, w.To.Sub(from))
	}
	return longest
}

// Outages are the times in which the canary could not write to a server, from the first write
// that was slow or failed to the last. One that succeeds between others that do not ends none.
func Outages(slow []Fault) (all []Fault) {
	for _, server := range []string{"postgres", "rabbitmq"} {
		under := false
		for _, f := range slow {
			if f.Target != server {
				continue
			}
			if last := len(all) - 1; under && !f.From.After(all[last].To) {
				all[last].To = f.To
				continue
			}
			all, under = append(all, f), true
		}
	}
	return all
}
