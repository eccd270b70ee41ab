package relay

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

const (
	shareTerm  = 15 // beats that a lease lasts
	shareDelay = 3  // beats that a lane takes to drain, at most
)

// cluster is a model of the leases and of workers that follow divide.
type cluster struct {
	rng     *rand.Rand
	now     int
	owner   [outbox.Lanes]string
	until   [outbox.Lanes]int
	workers []*member
	moves   int // lanes taken
}

type member struct {
	relaystore.Worker
	dead     bool
	drains   map[int]int // lane to the beat at which it has drained
	unfit    map[int]int // lanes of which it still has something, until then
	lastSeen int
}

func newCluster(seed uint64) *cluster {
	c := &cluster{rng: rand.New(rand.NewPCG(seed, 3))}
	for i := range c.until {
		c.until[i] = -1
	}
	return c
}

func (c *cluster) join() *member {
	m := &member{Worker: relaystore.Worker{Owner: fmt.Sprint("w", len(c.workers)), Ready: true}, drains: map[int]int{}, unfit: map[int]int{}, lastSeen: c.now}
	c.workers = append(c.workers, m)
	return m
}

// held returns the lanes that m works on, and those that it drains.
func (c *cluster) held(m *member) (active, draining []int) {
	for lane, owner := range c.owner {
		if owner != m.Owner || c.until[lane] < c.now {
			continue
		}
		if _, ok := m.drains[lane]; ok {
			draining = append(draining, lane)
		} else {
			active = append(active, lane)
		}
	}
	return active, draining
}

// beat is one heartbeat of m, and checks what divide tells it.
func (c *cluster) beat(t *testing.T, m *member) {
	t.Helper()
	m.lastSeen = c.now
	_, draining := c.held(m)
	var released []int
	for _, lane := range draining {
		if c.now >= m.drains[lane] {
			c.owner[lane], c.until[lane] = "", c.now-1
			delete(m.drains, lane)
			released = append(released, lane)
		}
	}
	active, draining := c.held(m)
	for _, lane := range slices.Concat(active, draining) {
		c.until[lane] = c.now + shareTerm
	}
	var leases []relaystore.Lease
	for lane, owner := range c.owner {
		leases = append(leases, relaystore.Lease{Lane: lane, Owner: owner, Left: time.Duration(c.until[lane]-c.now) * time.Second})
	}
	var peers []relaystore.Worker
	for _, w := range c.workers {
		if w.lastSeen >= c.now-shareTerm {
			peers = append(peers, w.Worker)
		}
	}
	mayHold := func(lane int) bool { return m.unfit[lane] <= c.now && !slices.Contains(released, lane) }
	s := divide(m.Owner, peers, leases, active, mayHold, nil, shareTerm*time.Second)
	c.check(t, m, active, s)
	for _, lane := range s.give {
		m.drains[lane] = c.now + c.rng.IntN(shareDelay+1)
	}
	for _, lane := range s.take[:max(0, min(s.most, len(s.take)))] {
		c.owner[lane], c.until[lane] = m.Owner, c.now+shareTerm
		c.moves++
	}
}

func (c *cluster) check(t *testing.T, m *member, active []int, s shares) {
	t.Helper()
	if len(s.give) > 0 && len(s.take) > 0 {
		t.Errorf("%s gives %v and takes %v in one beat", m.Owner, s.give, s.take)
	}
	for _, lane := range s.give {
		if !slices.Contains(active, lane) {
			t.Errorf("%s gives lane %d, which it does not hold", m.Owner, lane)
		}
	}
	for _, lane := range s.take {
		if c.until[lane] >= c.now || m.unfit[lane] > c.now {
			t.Errorf("%s takes lane %d, which is not free or not for it", m.Owner, lane)
		}
	}
	if eligible := c.eligible(); !slices.Contains(eligible, m) && len(eligible) > 0 && len(s.take) > 0 {
		t.Errorf("%s takes lanes although it has no share", m.Owner)
	}
}

// eligible are the living workers that have a share.
func (c *cluster) eligible() []*member {
	anyReady := slices.ContainsFunc(c.workers, func(m *member) bool { return !m.dead && m.Ready && !m.Stopping })
	var all []*member
	for _, m := range c.workers {
		if !m.dead && !m.Stopping && (m.Ready || !anyReady) {
			all = append(all, m)
		}
	}
	return all
}

// pass lets every living worker beat once, in random order.
func (c *cluster) pass(t *testing.T) {
	t.Helper()
	c.now++
	for _, i := range c.rng.Perm(len(c.workers)) {
		if m := c.workers[i]; !m.dead {
			c.beat(t, m)
		}
	}
}

// change does something to the cluster.
func (c *cluster) change() {
	alive := c.eligible()
	victim := func() *member { return alive[c.rng.IntN(len(alive))] }
	switch what := c.rng.IntN(6); {
	case what == 0 || len(alive) < 2:
		c.join()
	case what == 1:
		victim().dead = true // its leases expire
	case what == 2:
		victim().Stopping = true
	case what == 3:
		victim().Ready = false
	case what == 4:
		for _, m := range c.workers {
			m.Ready = true
		}
	case what == 5:
		victim().unfit[c.rng.IntN(outbox.Lanes)] = c.now + c.rng.IntN(2*shareTerm)
	}
	for _, m := range c.workers {
		if _, draining := c.held(m); m.Stopping && len(draining) == 0 {
			if active, _ := c.held(m); len(active) == 0 {
				m.dead = true
			}
		}
	}
}

// settled reports whether every lane is worked and the shares are fair.
func (c *cluster) settled() error {
	eligible := c.eligible()
	if len(eligible) == 0 {
		return nil
	}
	up, down := (outbox.Lanes+len(eligible)-1)/len(eligible), outbox.Lanes/len(eligible)
	total := 0
	for _, m := range eligible {
		active, draining := c.held(m)
		if total += len(active); len(draining) > 0 {
			return fmt.Errorf("%s still drains", m.Owner)
		}
		if len(active) < down || len(active) > up {
			return fmt.Errorf("%s holds %d lanes, %d to %d are fair", m.Owner, len(active), down, up)
		}
	}
	if total != outbox.Lanes {
		return fmt.Errorf("%d lanes are worked", total)
	}
	return nil
}
