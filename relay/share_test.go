package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestDivide_ReachesFairSharesAndStaysThere(t *testing.T) {
	t.Parallel()
	for seed := range uint64(testserver.Rounds(10, 40)) {
		c := newCluster(seed)
		c.join()
		for range 12 {
			if len(c.workers) < 30 {
				c.change()
			}
			// A crash costs a lease, a worker that still has something of a
			// lane another.
			for range 3*shareTerm + 60 {
				c.pass(t)
			}
			if err := c.settled(); err != nil {
				t.Fatalf("seed %d: not settled: %v", seed, err)
			}
			before := c.moves
			for range 20 {
				c.pass(t)
			}
			if c.moves != before {
				t.Fatalf("seed %d: %d lanes moved although the shares were fair", seed, c.moves-before)
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func TestDivide_MovesFewMoreLanesThanAJoinNeeds(t *testing.T) {
	t.Parallel()
	for _, count := range []int{1, 2, 3, 4, 5, 6, 7, 15, 24} {
		c := newCluster(uint64(count))
		for range count {
			c.join()
		}
		for range 100 {
			c.pass(t)
		}
		before := c.moves
		c.join()
		for range 100 {
			c.pass(t)
		}
		if err := c.settled(); err != nil {
			t.Errorf("%d workers and one more: %v", count, err)
		}
		// Each one gives down to the share rounded down, so some go back up.
		if up := (outbox.Lanes + count) / (count + 1); c.moves-before > up+count {
			t.Errorf("%d workers and one more: %d lanes moved, its share is %d", count, c.moves-before, up)
		}
	}
}

func TestDivide(t *testing.T) {
	t.Parallel()
	all := func(owner string, left time.Duration) (leases []relaystore.Lease) {
		for lane := range outbox.Lanes {
			leases = append(leases, relaystore.Lease{Lane: lane, Owner: owner, Left: left})
		}
		return leases
	}
	upkeep := func(left time.Duration) []relaystore.Lease {
		return append(all("me", 1), relaystore.Lease{Lane: relaystore.UpkeepLane, Left: left, Owner: "other"})
	}
	lanes := func(from, to int) (lanes []int) {
		for lane := from; lane < to; lane++ {
			lanes = append(lanes, lane)
		}
		return lanes
	}
	const term = 15 * time.Second
	me := relaystore.Worker{Owner: "me", Ready: true}
	other := relaystore.Worker{Owner: "other", Ready: true}
	for name, test := range map[string]struct {
		peers  []relaystore.Worker
		leases []relaystore.Lease
		held   []int
		want   shares
	}{
		"a lone worker takes all": {
			[]relaystore.Worker{me}, all("", -1), nil, shares{take: lanes(0, 32), most: 32},
		},
		"one of two takes half of what is free": {
			[]relaystore.Worker{me, other}, all("", -1), nil, shares{take: lanes(0, 32), most: 16},
		},
		"what has been free for longer than a lease is taken above the share": {
			[]relaystore.Worker{me, other}, all("", -term-1), nil, shares{take: lanes(0, 32), most: 32},
		},
		"a newcomer gets half": {
			[]relaystore.Worker{me, other}, all("me", 1), lanes(0, 32), shares{give: lanes(16, 32)},
		},
		"a worker that stops gives all": {
			[]relaystore.Worker{{Owner: "me", Ready: true, Stopping: true}, other}, all("me", 1), lanes(0, 32), shares{give: lanes(0, 32), leave: true},
		},
		"a worker without its broker gives all to one that has it": {
			[]relaystore.Worker{{Owner: "me"}, other}, all("me", 1), lanes(0, 32), shares{give: lanes(0, 32), leave: true},
		},
		"a worker without its broker keeps its share if nobody has it": {
			[]relaystore.Worker{{Owner: "me"}, {Owner: "other"}}, all("me", 1), lanes(0, 32), shares{give: lanes(16, 32)},
		},
		"a worker that is not ready has no share": {
			[]relaystore.Worker{me, {Owner: "other"}}, all("me", 1), lanes(0, 32), shares{},
		},
		"all stop: nobody takes or gives": {
			[]relaystore.Worker{{Owner: "me", Stopping: true}, {Owner: "other", Stopping: true}}, all("me", 1), lanes(0, 32), shares{},
		},
		"one more than the share rounded up goes to one who has fewer": {
			[]relaystore.Worker{me, other, {Owner: "third", Ready: true}},
			slices.Concat(all("me", 1)[:12], all("other", 1)[:10], all("third", 1)[:10]),
			lanes(0, 12),
			shares{give: lanes(11, 12)},
		},
		"the upkeep is free": {
			[]relaystore.Worker{me}, upkeep(-1), lanes(0, 32), shares{upkeep: true},
		},
		"who cannot work leaves the upkeep, too": {
			[]relaystore.Worker{{Owner: "me"}, other}, upkeep(1), lanes(0, 32), shares{give: lanes(0, 32), leave: true},
		},
		"the upkeep is not free": {
			[]relaystore.Worker{me}, upkeep(1), lanes(0, 32), shares{},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := divide("me", test.peers, test.leases, test.held, func(int) bool { return true }, nil, term)
			if len(got.take) == 0 {
				got.most = 0 // of nothing
			}
			if fmt.Sprint(got) != fmt.Sprint(test.want) {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
	nothing := func(int) bool { return false }
	for name, test := range map[string]struct {
		peers []relaystore.Worker
		left  time.Duration
		want  bool
	}{
		"a worker that may not hold the upkeep leaves it to others":     {[]relaystore.Worker{me, other}, -1, false},
		"and takes it if no other one does":                             {[]relaystore.Worker{me, other}, -term/5 - 1, true},
		"one that is alone takes it at once":                            {[]relaystore.Worker{me}, -1, true},
		"and does not count those that stop":                            {[]relaystore.Worker{me, {Owner: "other", Ready: true, Stopping: true}}, -1, true},
		"it does not take what another has, though it may hold nothing": {[]relaystore.Worker{me}, 1, false},
	} {
		if got := divide("me", test.peers, upkeep(test.left), lanes(0, 32), nothing, nil, term); got.upkeep != test.want {
			t.Errorf("%s: %t", name, got.upkeep)
		}
	}
}

// What waits for the upkeep begins when the lease is taken, or ends with its context.
func TestUpkeepLease_WakesWhoeverWaitsForIt(t *testing.T) {
	t.Parallel()
	var u upkeepLease
	took := make(chan int64)
	for range 2 {
		go func() {
			epoch, _ := u.await(t.Context())
			took <- epoch
		}()
	}
	u.hold(0)
	u.hold(4)
	for range 2 {
		if epoch := <-took; epoch != 4 {
			t.Errorf("got epoch %d", epoch)
		}
	}
	u.hold(0)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, ok := u.await(ended); ok {
		t.Error("waited with a context that has ended")
	}
}

// The upkeep is given up by a call without an answer, and left to others for a while.
func TestTending_EndsWithASilence(t *testing.T) {
	t.Parallel()
	const rest = time.Minute
	start := time.Unix(1000, 0)
	answer, silent := errors.New("refused"), bounded.ErrAbandoned
	var u upkeepLease
	expect := func(what string, now time.Time, held int64, mayHold bool) {
		t.Helper()
		if u.held() != held || u.mayHold(now, rest) != mayHold {
			t.Errorf("%s: held %d, may hold %t", what, u.held(), u.mayHold(now, rest))
		}
	}
	expect("new", start, 0, true)
	u.hold(1)
	u.heard(1, start, nil)
	u.heard(1, start, answer)
	expect("answers", start, 1, true)
	u.heard(1, start, silent)
	expect("a silence", start, 0, false)
	u.heard(1, start, nil)
	expect("an answer of the same time", start, 0, false)
	expect("much later", start.Add(rest), 0, true)
	u.hold(2)
	expect("taken again, since nobody else was there", start, 2, false)
	u.heard(1, start, silent)
	expect("a silence of the time before", start, 2, false)
	u.heard(2, start, nil)
	expect("an answer", start, 2, true)
}

func TestOutdated(t *testing.T) {
	t.Parallel()
	me, other := relaystore.Worker{Owner: "me"}, relaystore.Worker{Owner: "other"}
	leases := []relaystore.Lease{{Lane: 1, Owner: "me", Epoch: 4}, {Lane: 2, Owner: "other", Epoch: 7}}
	for _, c := range []struct {
		name   string
		peers  []relaystore.Worker
		epochs map[int]int64
		want   bool
	}{
		{"its own leases", []relaystore.Worker{other, me}, map[int]int64{1: 4}, false},
		{"no leases", []relaystore.Worker{me}, nil, false},
		{"counted no longer", []relaystore.Worker{other}, map[int]int64{1: 4}, true},
		{"one lane taken", []relaystore.Worker{other, me}, map[int]int64{1: 4, 2: 6}, true},
		{"taken and taken back", []relaystore.Worker{other, me}, map[int]int64{1: 3}, true},
	} {
		if got := outdated("me", c.peers, leases, c.epochs); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}
