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

	tenures map[int][]tenure // by lane
	owners  map[int][]Window // by lane: when it belonged to a relay at fault, each for a lease at most
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
	faults := map[string][]Window{}
	for _, f := range in.Faults {
		faults[f.Target] = append(faults[f.Target], f.Window)
	}
	for target, windows := range faults {
		faults[target] = merge(windows)
	}
	j.tenures = tenures(in.LaneWrites)
	for lane, all := range j.tenures {
		for _, t := range all {
			for _, f := range faults[t.relay] {
				w := Window{latest(f.From, t.From), earliest(f.To, t.To)}
				if w.To = earliest(w.To, w.From.Add(in.Lease)); w.To.After(w.From) {
					j.owners[lane] = append(j.owners[lane], w)
				}
			}
		}
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

// stall returns for how long a group stood in w without an excuse.
//
// Of a lane (-1: the group is none), the longest fault of a relay that has it excuses nothing:
// within a lease another one takes the lane. Each other one in the same wait may cost a lease
// again, for as long as it lasts.
func (j *judge) stall(group string, lane int, w Window) time.Duration {
	free := longestFree(w, j.excuses(group))
	length := free.To.Sub(free.From)
	if length <= 2*j.in.Lease {
		return length
	}
	var longest Window
	var others []Window
	for _, f := range j.owners[lane] {
		if f.To.Before(w.From) || f.From.After(w.To) {
			continue
		}
		if f.To.Sub(f.From) > longest.To.Sub(longest.From) {
			f, longest = longest, f
		}
		others = append(others, f)
	}
	return length - covered(free, others)
}

// takenBetween reports whether a relay took a lane between two times.
func (j *judge) takenBetween(lane int, from, to time.Time) bool {
	all := j.tenures[lane]
	n, _ := slices.BinarySearchFunc(all, from, func(t tenure, at time.Time) int { return t.From.Compare(at) })
	return n < len(all) && !all[n].From.After(to)
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
func longestFree(w Window, merged []Window) (longest Window) {
	consider := func(from, to time.Time) {
		if to.Sub(from) > longest.To.Sub(longest.From) {
			longest = Window{from, to}
		}
	}
	from := w.From
	for _, m := range merged {
		if m.From.After(w.To) {
			break
		}
		consider(from, m.From)
		from = latest(from, m.To)
	}
	consider(from, w.To)
	return longest
}

func latest(times ...time.Time) time.Time   { return slices.MaxFunc(times, time.Time.Compare) }
func earliest(times ...time.Time) time.Time { return slices.MinFunc(times, time.Time.Compare) }

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
