package relay_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// crowd is a database with a changing number of worker processes.
type crowd struct {
	testDB
	t       *testing.T
	rng     *rand.Rand
	broker  *broker
	spec    workerSpec
	workers []*attendant
	started int
	gone    map[string]time.Time // owner to when it was killed
	pulse   *pulse

	slowest time.Duration // to fair shares
	did     map[string]int
}

type attendant struct {
	*process
	away bool
}

// Workers start, stop, die, and lose their broker, at random. The lanes are shared
// fairly again soon, none of them is without an owner for longer than a lease and
// a beat, or two leases if another worker dies meanwhile, and nothing is sent twice but
// what a dead worker had in flight.
func TestRelay_SharesLanesWhateverBecomesOfItsWorkers(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	o := ordeal{seed: seed(t)}
	eachDatabase(t, func(t *testing.T, p testDB) {
		c := &crowd{
			testDB: p, t: t, rng: o.random("crowd"), broker: startBroker(t, confirmAfter(2*time.Millisecond)),
			spec: workerSpec{Lease: time.Second, Window: 16, Batch: 8}, gone: map[string]time.Time{}, did: map[string]int{},
		}
		sizes := []int{1, 2, 4, 8}
		if !p.postgres() {
			sizes, c.spec.Lease = []int{1, 2, 4}, 2*time.Second // one writer at a time
		}
		p.watchTakeovers(t)
		p.watchOwners(t)
		stop := stream(t, p.box(t))
		c.pulse = startPulse(t, p)
		for begin, i := time.Now(), 0; i < len(sizes) || time.Since(begin) < 2*time.Minute; i++ {
			size := sizes[c.rng.IntN(len(sizes))]
			if i < len(sizes) {
				size = sizes[i] // each once
			}
			for len(c.workers) != size || i > 0 && c.rng.IntN(3) > 0 {
				c.change(size)
			}
			c.awaitFairShares()
		}
		for _, w := range c.workers {
			c.plug(w, true)
		}
		all := stop()
		p.awaitNothingOwed(t)
		for _, w := range c.workers {
			w.end()
		}
		w := wireOf(c.broker)
		w.check(t, all, len(all))
		repeats := c.checkRepeats()
		orphaned := c.checkOwners()
		t.Logf("%v; fair within %v; longest without an owner %v; %d messages, %d repeats; the machine kept us waiting for up to %v",
			c.did, c.slowest, orphaned, len(all), repeats, c.pulse.longest())
		for _, what := range []string{"started", "killed", "stopped", "unplugged"} {
			if c.did[what] == 0 {
				t.Errorf("no worker was %s: the run says nothing", what)
			}
		}
	})
}

// change does one random thing on the way to a number of workers.
func (c *crowd) change(size int) {
	switch victim := c.rng.IntN(max(1, len(c.workers))); {
	case len(c.workers) < size, len(c.workers) == 1:
		c.begin()
	case len(c.workers) > size || c.rng.IntN(2) == 0:
		w := c.workers[victim]
		if !w.away && c.ready() == 1 {
			return // nobody would be left to take over
		}
		c.workers = slices.Delete(c.workers, victim, victim+1)
		if c.rng.IntN(2) == 0 {
			c.did["stopped"]++
			w.end()
			return
		}
		c.did["killed"]++
		c.gone[c.owner(w.name)] = time.Now()
		w.kill()
	default:
		c.plug(c.workers[victim], c.workers[victim].away)
	}
}

// begin starts a worker and waits until it takes part.
func (c *crowd) begin() {
	c.started++
	c.did["started"]++
	c.spec.Name = fmt.Sprint("worker", c.started)
	w := &attendant{process: startProcess(c.t, c.testDB, c.broker, c.spec)}
	c.workers = append(c.workers, w)
	eventually(c.t, w.name+" takes part", func() bool { return c.owner(w.name) != "" })
}

// ready counts the workers that reach their broker.
func (c *crowd) ready() (n int) {
	for _, w := range c.workers {
		if !w.away {
			n++
		}
	}
	return n
}

// plug lets a worker reach its broker, or not.
func (c *crowd) plug(w *attendant, reach bool) {
	if w.away != reach || !reach && c.ready() == 1 {
		return
	}
	if !reach {
		c.did["unplugged"]++
	}
	w.away = !reach
	w.signal(syscall.SIGUSR1)
	eventually(c.t, w.name+" knows", func() bool { // two signals at once would be one
		return c.count(c.t, `select count(*) from {{relay_workers}} where name = $1 and ready = $2`, w.name, reach) == 1
	})
}

func (c *crowd) owner(name string) (owner string) {
	_ = c.db.QueryRowContext(c.t.Context(), database.Of(c.cfg).Expand(`select owner from {{relay_workers}} where name = $1`), name).Scan(&owner) // no row: empty
	return owner
}

func (c *crowd) awaitFairShares() {
	c.t.Helper()
	n := c.ready()
	fair := func() bool {
		shares := c.shares(c.t)
		for _, w := range c.workers {
			share := shares[w.name]
			if w.away && share > 0 || !w.away && (share < outbox.Lanes/n || share > (outbox.Lanes+n-1)/n) {
				return false
			}
			delete(shares, w.name)
		}
		return !slices.ContainsFunc(slices.Collect(maps.Values(shares)), func(n int) bool { return n > 0 })
	}
	for begin := time.Now(); !fair(); testserver.Pause(c.t.Context(), 20*time.Millisecond) {
		took := time.Since(begin)
		c.slowest = max(c.slowest, took)
		if took > 10*time.Second+c.pulse.slack() {
			for _, w := range c.workers {
				c.t.Logf("%s away=%v died=%v", w.name, w.away, w.died())
			}
			c.t.Fatalf("%d workers do not share fairly after %v: %v", n, took, c.shares(c.t))
		}
	}
}

// checkRepeats returns how many messages were sent again. Each time a worker had
// taken the lane from one that was dead, after it had been sent; or the confirm
// had come too late.
func (c *crowd) checkRepeats() (repeats int) {
	takeovers := c.takeovers(c.t)
	earlier := map[string]delivery{}
	for _, d := range c.broker.all() {
		before, again := earlier[d.MessageID]
		earlier[d.MessageID] = d
		if !again {
			continue
		}
		repeats++
		between := func(o takeover) bool {
			return o.lane == d.Lane && o.at.After(before.at.Add(-c.spec.Lease)) && o.at.Before(d.at)
		}
		if !before.expired && (before.By == d.By || !d.expired && !slices.ContainsFunc(takeovers, between)) {
			c.t.Errorf("%s was sent by %s and by %s although nobody took lane %d over", d.MessageID, before.By, d.By, d.Lane)
		}
	}
	return repeats
}

// watchOwners makes the database itself write down every change of a lane's owner.
func (p testDB) watchOwners(t testing.TB) {
	t.Helper()
	if !p.postgres() {
		p.execute(t, `create table owners (id integer primary key, lane integer not null, at integer not null, before text not null, after text not null)`)
		p.execute(t, `create trigger owners_change after update of owner on {{relay_leases}} when new.owner <> old.owner
			begin insert into owners (lane, at, before, after) values (new.lane, cast(unixepoch('subsec') * 1000000 as integer), old.owner, new.owner); end`)
		return
	}
	p.execute(t, `create table owners (id bigserial primary key, lane integer not null, at bigint not null, before text not null, after text not null)`)
	p.execute(t, `create function owners_change() returns trigger language plpgsql set search_path from current as $$
		begin
			insert into owners (lane, at, before, after) values (new.lane, extract(epoch from clock_timestamp()) * 1000000, old.owner, new.owner);
			return null;
		end $$`)
	p.execute(t, `create trigger owners_change after update on {{relay_leases}} for each row
		when (new.owner <> old.owner) execute function owners_change()`)
}

// checkOwners returns how long a lane was nobody's, or a dead worker's, at most.
func (c *crowd) checkOwners() (longest time.Duration) {
	rows, err := c.db.QueryContext(c.t.Context(), `select lane, at, before, after from owners where lane >= 0 order by id`)
	if err != nil {
		c.t.Fatal(err)
	}
	defer rows.Close()
	free := map[int]time.Time{} // since when
	for rows.Next() {
		var lane int
		var micros int64
		var before, after string
		if err := rows.Scan(&lane, &micros, &before, &after); err != nil {
			c.t.Fatal(err)
		}
		at := time.UnixMicro(micros)
		since, wasFree := free[lane]
		if killed, dead := c.gone[before]; dead {
			since, wasFree = killed, true
		}
		delete(free, lane)
		if after == "" {
			free[lane] = at
			continue
		}
		if !wasFree {
			continue
		}
		alone := at.Sub(since)
		longest = max(longest, alone)
		most := c.spec.Lease + c.spec.Lease/15 + c.pulse.slack()
		if c.someoneDied(since, since.Add(most)) {
			most += c.spec.Lease // a share was kept for the dead; see divide
		}
		if alone > most {
			c.t.Errorf("lane %d had no owner for %v, more than %v", lane, alone, most)
		}
	}
	if err := rows.Err(); err != nil {
		c.t.Fatal(err)
	}
	return longest
}

// someoneDied reports whether a worker was killed after since and before until.
func (c *crowd) someoneDied(since, until time.Time) bool {
	for _, at := range c.gone {
		if at.After(since) && at.Before(until) {
			return true
		}
	}
	return false
}

// pulse tells how long this machine lets a process wait that wants to run a
// statement: bounds in time are to be exceeded by workers, not by their machine.
type pulse struct {
	statements int // that slack is for

	mu  sync.Mutex
	max time.Duration
}

func startPulse(t *testing.T, p testDB) *pulse {
	u := &pulse{statements: 6}
	if !p.postgres() {
		u.statements = 12
	}
	p.execute(t, `create table pulse (n integer not null)`)
	end := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		ticker := time.NewTicker(20 * time.Millisecond)
		defer ticker.Stop()
		for last := time.Now(); ; last = time.Now() {
			select {
			case <-end:
				return
			case <-ticker.C:
			}
			if _, err := p.db.ExecContext(t.Context(), `insert into pulse values (1)`); err != nil {
				return // the test has ended
			}
			u.mu.Lock()
			u.max = max(u.max, time.Since(last))
			u.mu.Unlock()
		}
	})
	t.Cleanup(sync.OnceFunc(func() { close(end); group.Wait() }))
	return u
}

func (u *pulse) longest() time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.max
}

// slack is for a handful of statements, one after another. On SQLite each of them, and
// there are larger ones than that of the pulse, waits for those of other workers too.
func (u *pulse) slack() time.Duration {
	return 100*time.Millisecond + time.Duration(u.statements)*u.longest()
}
