package relay_test

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// seed returns the seed of a random test, printed so that a run can be repeated
// with ONCEMILL_SEED.
func seed(t testing.TB) uint64 {
	s := rand.Uint64()
	if text := os.Getenv("ONCEMILL_SEED"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("ONCEMILL_SEED: %v", err)
		}
		s = n
	}
	t.Logf("ONCEMILL_SEED=%d", s)
	return s
}

// ordeal is one run of the property test: writers of all kinds against worker
// processes that are killed, stopped and replaced.
type ordeal struct {
	testDB
	seed     uint64
	history  time.Duration
	duration time.Duration
	writers  int
	hold     time.Duration // longest transaction; every second writer is fast
	bulk     int
	late     int64    // rows that commit behind rows that are gone, at least
	kinds    []string // of transactions, at least one of each
	spec     workerSpec

	faultless bool // the broker takes everything
}

func (o ordeal) random(stream string) *rand.Rand {
	h := fnv.New64a()
	h.Write([]byte(stream))
	return rand.New(rand.NewPCG(o.seed, h.Sum64()))
}

func TestRelay_KeepsItsPromisesOnPostgreSQL(t *testing.T) {
	t.Parallel()
	o := ordeal{
		testDB: onPostgres(t), seed: seed(t), history: 24 * time.Hour, duration: 4 * time.Second,
		writers: testserver.Rounds(6, 8), hold: 600 * time.Millisecond, bulk: 60, late: leastLate,
		kinds: []string{"rolled back", "rolled back prepared", "prepared", "savepoint", "held"},
		spec:  workerSpec{Lease: time.Second, Window: 64, Batch: 16},
	}
	if testserver.Long() {
		o.duration = 3 * time.Minute
	}
	b, naive := o.run(t)

	for _, kind := range o.kinds {
		if b.seen(kind) == 0 {
			t.Errorf("no transaction was %s: the run says nothing", kind)
		}
	}
	if late := b.late.Load(); late < leastLate {
		t.Errorf("%d rows committed behind rows that were gone: the run says nothing", late)
	}
	if v := judge(b.journal(t, 0, math.MaxInt32), naive.deliveries(), nil); v.lost+v.reordered == 0 {
		t.Error("a reader that goes by the last id lost nothing: the run says nothing")
	} else {
		t.Logf("a reader that goes by the last id: lost=%d reordered=%d", v.lost, v.reordered)
	}
}

// SQLite has one writer at a time, so nothing commits late there.
func TestRelay_KeepsItsPromisesOnSQLite(t *testing.T) {
	t.Parallel()
	o := ordeal{
		testDB: onSQLite(t), seed: seed(t), history: outbox.NoHistory, duration: 4 * time.Second,
		writers: testserver.Rounds(2, 3), hold: 30 * time.Millisecond, bulk: 20, kinds: []string{"rolled back", "savepoint"},
		spec: workerSpec{Lease: 2 * time.Second, Window: 64, Batch: 8},
	}
	if testserver.Long() {
		o.duration = 3 * time.Minute
	}
	b, _ := o.run(t)
	for _, kind := range o.kinds {
		if b.seen(kind) == 0 {
			t.Errorf("no transaction was %s: the run says nothing", kind)
		}
	}
}

// The other modes lose nothing and give nothing up; a pipeline keeps the order too
// as long as its broker takes what it is given, whatever becomes of the workers.
func TestRelay_KeepsItsPromisesInOtherOrders(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]ordeal{
		"pipelined":            {spec: workerSpec{Order: relay.OrderPerKeyPipelined}},
		"pipelined, no faults": {spec: workerSpec{Order: relay.OrderPerKeyPipelined}, faultless: true},
		"none":                 {spec: workerSpec{Order: relay.OrderNone}},
	} {
		if o.faultless && !testserver.Long() {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.testDB, o.seed, o.history, o.duration = onPostgres(t), seed(t), 24*time.Hour, 2*time.Second
			o.writers, o.hold, o.bulk = testserver.Rounds(2, 4), 10*time.Millisecond, 30
			o.spec.Lease, o.spec.Window, o.spec.Batch = time.Second, 64, 16
			if testserver.Long() {
				o.duration = time.Minute
			}
			o.run(t)
		})
	}
}

// run returns what was written, and a naive reader's view of it.
func (o ordeal) run(t *testing.T) (*business, *naiveReader) {
	// Slow and fast writers have keys of their own in the same lanes.
	var slow, fast []string
	for lane := 0; lane < outbox.Lanes; lane += 4 {
		keys := keysOfLane(lane, 5)
		slow, fast = append(slow, keys[:2]...), append(fast, keys[2:]...)
	}
	keys := slices.Concat(slow, fast)
	o.watchTakeovers(t)
	b := newBusiness(t, o.testDB, o.history, keys)
	if o.history > 0 {
		makeHistory(t, b.box)
	}
	decide := o.misbehave()
	if o.faultless {
		decide = confirmAfter(20 * time.Millisecond)
	}
	broker := startBroker(t, decide)
	o.spec.History = o.history

	ctx, cancel := context.WithCancel(t.Context())
	var writers, others sync.WaitGroup
	others.Go(func() {
		defer cancel()
		o.await(t, b)
	})
	for i := range o.writers {
		w := &writer{business: b, rng: o.random(fmt.Sprint("writer", i)), hold: o.hold, bulk: o.bulk, keys: slow}
		if i%2 == 1 {
			w.hold, w.keys = 3*time.Millisecond, fast
		}
		writers.Go(func() { w.run(ctx, t) })
	}
	naive := &naiveReader{business: b}
	others.Go(func() {
		for ctx.Err() == nil {
			naive.step(t)
			testserver.Pause(ctx, 20*time.Millisecond)
		}
	})
	workers := o.nemesis(ctx, t, broker)
	writers.Wait()
	others.Wait()
	naive.step(t)
	o.awaitNothingOwed(t)
	for _, w := range workers {
		w.end()
	}
	takeovers := o.takeovers(t)
	journal := b.journal(t, 0, math.MaxInt32)
	v := judge(journal, broker.all(), takeovers)
	t.Logf("rows=%d late=%d takeovers=%d %v", len(journal), b.late.Load(), len(takeovers), v)
	if !o.faultless && o.spec.Order != relay.OrderPerKey {
		v.reordered = 0 // nothing is promised
	}
	if v.lost+v.invented+v.reordered+v.unexplained > 0 {
		t.Error("promises broken")
	}
	// No message is refused as often as it takes.
	if n := o.count(t, `select count(*) from {{dead_letters}}`); n > 0 {
		t.Errorf("%d dead letters", n)
	}
	if len(takeovers) == 0 {
		t.Error("no takeover: the run says nothing")
	}
	return b, naive
}

// await waits for the end of the run. A machine that is so slow that the run
// would say nothing gets more time.
func (o ordeal) await(t *testing.T, b *business) {
	enough := func() bool {
		return o.count(t, `select count(*) from takeovers where lane >= 0`) > 0 && b.late.Load() >= o.late &&
			!slices.ContainsFunc(o.kinds, func(kind string) bool { return b.seen(kind) == 0 })
	}
	begin := time.Now()
	for time.Since(begin) < o.duration || !enough() && time.Since(begin) < 12*o.duration {
		testserver.Pause(t.Context(), 50*time.Millisecond)
	}
}

// leastLate is how many rows a run has to see that commit behind rows that are
// gone.
var leastLate = testserver.Rounds[int64](20, 100)

func makeHistory(t testing.TB, box *outbox.Outbox) {
	t.Helper()
	if _, err := outboxqueue.Of(box).Maintain(t.Context(), unguarded); err != nil {
		t.Fatal(err)
	}
}

// misbehave is a broker that is slow at random and fails at times.
func (o ordeal) misbehave() func(frame) (outcome, time.Duration) {
	rng := o.random("broker")
	var mu sync.Mutex
	return func(frame) (outcome, time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		after := time.Duration(rng.Int64N(int64(3 * time.Millisecond)))
		switch rng.IntN(400) {
		case 0:
			return refused, after
		case 1, 2:
			return unavailable, after
		case 3:
			return unknown, after
		case 4:
			if rng.IntN(4) == 0 {
				return silence, 0
			}
		}
		return confirmed, after
	}
}

// nemesis keeps three workers and kills, stops and replaces them until ctx ends.
// It returns those that are left.
func (o ordeal) nemesis(ctx context.Context, t *testing.T, broker *broker) []*process {
	rng := o.random("nemesis")
	started := 0
	begin := func() *process {
		spec := o.spec
		spec.Name = fmt.Sprint("worker", started)
		started++
		return startProcess(t, o.testDB, broker, spec)
	}
	workers := []*process{begin(), begin(), begin()}
	eventually(t, "every worker has lanes", func() bool {
		shares := o.shares(t)
		return len(shares) == len(workers) && !slices.Contains(slices.Collect(maps.Values(shares)), 0)
	})
	wait := func(least, most time.Duration) {
		select {
		case <-time.After(least + time.Duration(rng.Int64N(int64(most-least)))):
		case <-ctx.Done():
		}
	}
	for round := 0; ; round++ {
		wait(700*time.Millisecond, 1500*time.Millisecond)
		if ctx.Err() != nil {
			return workers
		}
		victim := rng.IntN(len(workers))
		switch round % 3 {
		case 0:
			workers[victim].kill()
			workers[victim] = begin()
		case 1:
			o.outsideTransactions(t, func() { workers[victim].signal(syscall.SIGSTOP) })
			wait(o.spec.Lease*3/2, o.spec.Lease*2)
			workers[victim].signal(syscall.SIGCONT)
		case 2:
			workers[victim].end()
			workers[victim] = begin()
		}
	}
}
