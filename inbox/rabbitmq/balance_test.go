package rabbitmq

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// line is the consumers of a shard in the order in which they came; the first is active.
type line []int

// Processes that only see the length of the line come to equal shares, whatever the order in
// which they look, come and go. Some shards have no messages for long.
func TestExcess_EachProcessSoonHasItsShare(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // a simulation
		count := 1 + random.IntN(24)
		lines := make([]line, count)
		since := map[int][]int64{} // by process
		before, first := map[int]int{}, map[int]int{}
		now := int64(0)
		join := func(process, i int) {
			lines[i] = append(lines[i], process)
			since[process][i] = 0
		}
		leave := func(process, i int) {
			lines[i] = slices.DeleteFunc(lines[i], func(p int) bool { return p == process })
		}
		start := func(process int) {
			since[process], first[process] = make([]int64, count), random.IntN(count)
			for i := range lines {
				join(process, i)
			}
		}
		stop := func(process int) {
			delete(since, process)
			for i := range lines {
				leave(process, i)
			}
		}
		deliver := func(busy int) { // the shards before busy have messages
			for i := range busy {
				if active := lines[i][0]; since[active][i] == 0 {
					now++
					since[active][i] = now
				}
			}
		}
		look := func(process int) (moved int) {
			n := len(lines[0])
			for _, i := range excess(since[process], n, n > before[process], first[process]) {
				leave(process, i)
				join(process, i)
				moved++
			}
			before[process] = n
			return moved
		}
		processes := func() (all []int) {
			for process := range since {
				all = append(all, process)
			}
			slices.Sort(all)
			return all
		}
		settled := func(busy int) bool {
			for range 4 + 2*len(since) { // rounds
				deliver(busy)
				moved := 0
				all := processes()
				for _, k := range random.Perm(len(all)) {
					moved += look(all[k])
					deliver(busy)
				}
				if moved == 0 {
					return true
				}
			}
			return false
		}
		next := 0
		for range 10 {
			if len(since) == 0 || random.IntN(3) > 0 {
				next++
				start(next)
			} else {
				all := processes()
				stop(all[random.IntN(len(all))])
			}
			if len(since) == 0 {
				continue
			}
			busy := count
			if random.IntN(3) == 0 {
				busy = random.IntN(count + 1)
			}
			if !settled(busy) {
				t.Fatalf("seed %d: %d shards are still handed over between %d processes", seed, count, len(since))
			}
			share := (count + len(since) - 1) / len(since)
			has := map[int]int{}
			for i := range busy {
				has[lines[i][0]]++
			}
			for process, n := range has {
				if n > share {
					t.Fatalf("seed %d: process %d of %d has %d of %d shards", seed, process, len(since), n, count)
				}
			}
		}
	}
}

// A process that was alone gives up shards that have had no messages yet.
func TestExcess_AlsoSilentShardsWhenAProcessIsAdded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		since     []int64
		processes int
		added     bool
		first     int
		want      []int
	}{
		{[]int64{0, 0, 0, 0}, 2, true, 0, []int{2, 3}},
		{[]int64{0, 0, 0, 0}, 2, true, 3, []int{1, 2}},
		{[]int64{0, 0, 0, 0}, 2, false, 0, nil},
		{[]int64{0, 7, 5, 6}, 2, false, 0, []int{1}},
		{[]int64{0, 7, 0, 0}, 2, true, 0, []int{2, 3}},
		{[]int64{absent, 7, 5, absent}, 2, true, 0, nil},
		{[]int64{1, 2, 3, 4, 5}, 4, false, 0, []int{2, 3, 4}},
		{[]int64{1, 2, 3}, 7, false, 0, []int{1, 2}},
		{[]int64{1, 2, 3}, 1, true, 0, nil},
	} {
		if got := excess(c.since, c.processes, c.added, c.first); !slices.Equal(got, c.want) {
			t.Errorf("%v of %d, added %t, from %d: got %v, want %v", c.since, c.processes, c.added, c.first, got, c.want)
		}
	}
}
