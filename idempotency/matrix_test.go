package idempotency_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A mishap is what happens to the first run of a key, after its effect.
type mishap string

const (
	panics     mishap = "panic"
	fails      mishap = "5xx"
	timesOut   mishap = "time-out"
	isLate     mishap = "late success"
	losesClaim mishap = "lost claim answer" // before the effect
	losesEnd   mishap = "lost commit"
	dies       mishap = "process death"
	isStale    mishap = "stale owner"
)

// Answers that a caller gets.
const (
	ran                = "ran"
	replayed           = "replayed"
	panicked           = "panicked"
	errored            = "failed"
	unavailable        = "unavailable" // nothing is known: ask again
	outcomeUnknown     = "unknown"     // 409 outcome-unknown, ErrOutcomeUnknown
	decisionInProgress = "in progress"
	lost               = "lost" // ErrStaleOwner
	nothing            = "nothing"
)

// promised are the answers that callers get: the first one, and one that asks again after it
// (or its lease) has ended. There is one effect in all cases.
type promised struct{ first, again string }

// A failure in a transaction has had no effect, and runs again.
var inTransaction = map[mishap]promised{
	panics: {panicked, ran}, fails: {errored, ran}, timesOut: {unavailable, ran}, isLate: {unavailable, ran},
	losesClaim: {unavailable, ran}, losesEnd: {ran, replayed}, dies: {nothing, ran}, isStale: {replayed, ran},
}

// Elsewhere the effect stays, and nothing runs again.
var elsewhere = map[mishap]promised{
	panics: {panicked, outcomeUnknown}, fails: {errored, outcomeUnknown}, timesOut: {unavailable, outcomeUnknown}, isLate: {unavailable, replayed},
	losesClaim: {unavailable, ran}, losesEnd: {ran, replayed}, dies: {nothing, outcomeUnknown}, isStale: {ran, outcomeUnknown},
}

// entrance is a way into the engine.
type entrance struct {
	name     string
	tx       bool
	command  bool
	groups   int
	promises map[mishap]promised
}

func (e entrance) promised(m mishap) promised {
	p := e.promises[m]
	switch {
	case e.command && !e.tx && m == isLate:
		p.first = ran // it has waited
	case e.command && e.tx && m == isStale:
		p.first = lost
	}
	return p
}

var entrances = []entrance{
	{name: "TxMiddleware", tx: true, promises: inTransaction},
	{name: "TxMiddleware in groups", tx: true, groups: 50, promises: inTransaction},
	{name: "Middleware", promises: elsewhere},
	{name: "Do in a transaction", tx: true, command: true, promises: inTransaction},
	{name: "Do elsewhere", command: true, promises: elsewhere},
}

// The whole table: every mishap, in every mode, on one of the databases, or in a long run on every
// store.
func TestRunner_KeepsWhatItPromises(t *testing.T) {
	t.Parallel()
	for _, way := range entrances {
		for m := range way.promises {
			t.Run(way.name+"/"+string(m), func(t *testing.T) {
				t.Parallel()
				stores := testserver.OneOf(t, "postgresql", "sqlite")
				if !way.tx {
					stores = append(stores, "memory")
				}
				for _, store := range stores {
					t.Run(store, func(t *testing.T) {
						t.Parallel()
						newTrial(t, store, way, m).run()
					})
				}
			})
		}
	}
}

// trial is one cell of the table.
type trial struct {
	loseEnd atomic.Bool // the answer of the next commit of a run
	*testing.T
	way    entrance
	mishap mishap
	db     *testDB // nil in memory
	spy    *spy
	engine *idempotency.Engine
	lossy  *lossy

	runs    atomic.Int64  // of the key that something happens to
	struck  atomic.Bool   // its handler has run once
	told    atomic.Bool   // the first caller has been
	stands  chan struct{} // closed when it stands still
	goOn    chan struct{}
	claimed atomic.Int64

	mu      sync.Mutex
	effects map[string]int // elsewhere
}

const victim = "victim"

func newTrial(t *testing.T, store string, way entrance, m mishap) *trial {
	t.Helper()
	x := &trial{T: t, way: way, mishap: m, stands: make(chan struct{}), goOn: make(chan struct{}), effects: map[string]int{}}
	var s idempotency.Store = &idempotency.MemoryStore{}
	if open := testDBs[store]; open != nil {
		x.db, x.lossy = open(t).through(t)
		s = x.db.store
	}
	if !way.tx {
		x.spy = &spy{Store: s}
		s = x.spy
	}
	x.engine = newEngine(t, s, func(c *idempotency.Config) {
		c.Transactions.GroupSize = max(1, way.groups)
		if m == timesOut || m == isLate {
			c.Timeout, c.Failures.Lease = 2*time.Second, 3*time.Second
		}
	})
	x.engine.At(x.at)
	return x
}

// at is where the process dies or is paused: after the effect, or, where SQLite would keep
// all others from writing, before it.
func (x *trial) at(point string) {
	if point == "before commit" && x.loseEnd.CompareAndSwap(true, false) {
		x.lossy.armed.Store(true)
	}
	early := x.mishap == isStale && x.way.tx && x.db.cfg.Dialect == oncemill.SQLite
	switch {
	case point == "after claim":
		if x.claimed.Add(1) != 1 || !early {
			return
		}
	case point != "after effect" || early || !x.struck.CompareAndSwap(true, false):
		return
	}
	switch x.mishap {
	case dies:
		runtime.Goexit()
	case isStale:
		close(x.stands)
		<-x.goOn
	}
}

func (x *trial) run() {
	want := x.way.promised(x.mishap)
	x.arm()
	first := make(chan string, 1)
	var sending sync.WaitGroup
	companions := x.companions(&sending)
	sending.Go(func() {
		kind := nothing
		defer func() {
			x.told.Store(true)
			first <- kind
		}()
		testserver.Poll(x.Context(), func() bool { // a claim without an answer in time is no mishap of this table
			kind = x.send(victim)
			return kind != unavailable || x.mishap == losesClaim || x.runs.Load() > 0
		})
	})
	if x.mishap == isStale {
		select {
		case <-x.stands:
		case kind := <-first:
			x.Fatalf("the first is told %q, and never stood still", kind)
		}
		x.endLeases()
	}
	if x.mishap != isStale {
		x.expect("the first", <-first, want.first)
		if x.mishap == dies {
			x.endLeases()
		}
	}
	again := x.settle(victim)
	x.expect("the next", again, want.again)
	if x.mishap == isStale {
		close(x.goOn)
		x.expect("the first", <-first, want.first)
	}
	sending.Wait()
	last := replayed
	if again == outcomeUnknown && x.mishap != isStale {
		last = outcomeUnknown
	}
	x.expect("the last", x.settle(victim), last)
	for _, key := range append(companions, victim) {
		if n := x.count(key); n != 1 {
			x.Errorf("%s: %d effects", key, n)
		}
	}
}

func (x *trial) expect(who, got, want string) {
	x.Helper()
	if got != want {
		x.Errorf("%s is told %q, want %q", who, got, want)
	}
}

// arm loses an answer of the store.
func (x *trial) arm() {
	switch {
	case x.mishap == losesClaim && x.spy != nil:
		x.spy.loseClaim.Store(true)
	case x.mishap == losesClaim && x.db.cfg.Dialect == oncemill.SQLite:
		x.lossy.armed.Store(true) // it has committed
	case x.mishap == losesClaim:
		x.lossy.text.Store(new("idempotency_claim"))
	case x.mishap == losesEnd && x.spy != nil:
		x.spy.loseEnd.Store(true)
	case x.mishap == losesEnd: // and not that of the claim, which on SQLite has a transaction too
		x.loseEnd.Store(true)
	}
}

// companions share the transaction of the victim, where it shares any. They are sent while
// a first one runs, and whatever happens to the victim they have their effect once.
func (x *trial) companions(sending *sync.WaitGroup) (keys []string) {
	if x.way.groups == 0 || x.mishap == losesClaim || x.mishap == losesEnd || x.mishap == isStale || x.mishap == dies {
		return nil // these happen to the victim alone; for others see the tests with processes, and of groups
	}
	running := make(chan struct{})
	runs := sync.OnceFunc(func() { close(running) })
	keys = []string{"occupant"}
	handler := x.engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		runs()
		claimed, cancel := context.WithTimeout(r.Context(), time.Second)
		defer cancel()
		testserver.Poll(claimed, func() bool { return x.claimed.Load() >= 7 })
		testserver.Pause(r.Context(), 20*time.Millisecond) // from the claim to the group
		if err := addNamed(r.Context(), "occupant"); err != nil {
			x.Error(err)
		}
		w.WriteHeader(http.StatusCreated)
	}))
	sending.Go(func() {
		defer runs()
		testserver.Poll(x.Context(), func() bool {
			return do(x.T, handler, post("/", "occupant", withKey("occupant"))).Code == http.StatusCreated
		})
	})
	<-running
	for i := range 5 {
		key := fmt.Sprint("companion-", i)
		keys = append(keys, key)
		sending.Go(func() { x.settle(key) })
	}
	return keys
}

// settle asks until there is an answer.
func (x *trial) settle(key string) (kind string) {
	eventually(x.T, key+" is answered", func() bool {
		kind = x.send(key)
		return kind != unavailable && kind != decisionInProgress
	})
	return kind
}

func (x *trial) send(key string) string {
	if x.way.command {
		return x.do(key)
	}
	wrap := x.engine.Middleware
	if x.way.tx {
		wrap = x.engine.TxMiddleware
	}
	w := httptest.NewRecorder()
	if func() (broken bool) {
		defer func() { broken = recover() != nil }()
		wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := x.handle(r.Context(), key); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.WriteHeader(http.StatusCreated)
		})).ServeHTTP(w, post("/", key, withKey(key)))
		return false
	}() {
		return panicked
	}
	switch problem := problemOf(w); {
	case w.Code == http.StatusCreated && w.Header().Get("Idempotency-Replayed") != "":
		return replayed
	case w.Code == http.StatusCreated:
		return ran
	case problem == "outcome-unknown":
		return outcomeUnknown
	case problem == "in-progress":
		return decisionInProgress
	case w.Code == http.StatusInternalServerError:
		return errored
	case w.Code == http.StatusServiceUnavailable:
		return unavailable
	}
	return fmt.Sprint(w.Code, " ", w.Body)
}

var errHandler = errors.New("the handler failed")

func (x *trial) do(key string) string {
	result, err := idempotency.Do(x.Context(), x.engine, idempotency.Command{Name: "a", Key: key}, func(ctx context.Context) (string, error) {
		return "done", x.handle(ctx, key)
	})
	switch {
	case err == nil && result.Replayed:
		return replayed
	case err == nil:
		return ran
	case errors.As(err, new(*oncemill.PanicError)):
		return panicked
	case errors.Is(err, errHandler):
		return errored
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, driver.ErrBadConn), errors.Is(err, errDead):
		return unavailable
	case errors.Is(err, idempotency.ErrOutcomeUnknown):
		return outcomeUnknown
	case errors.Is(err, idempotency.ErrInProgress):
		return decisionInProgress
	case errors.Is(err, idempotency.ErrStaleOwner):
		return lost
	}
	return err.Error()
}

// handle has one effect, and then, the first time, the mishap.
func (x *trial) handle(ctx context.Context, key string) error {
	if err := x.effect(ctx, key); err != nil {
		return err
	}
	if key != victim {
		return nil
	}
	if x.runs.Add(1) == 1 {
		x.struck.Store(true)
	}
	if x.told.Load() {
		return nil
	}
	switch x.mishap { // again if it runs in a group first, and then alone
	case panics:
		panic(errHandler)
	case fails:
		return errHandler
	case timesOut:
		<-ctx.Done()
		return ctx.Err()
	case isLate:
		<-ctx.Done()
	}
	return nil
}

func (x *trial) effect(ctx context.Context, key string) error {
	if x.way.tx {
		return addNamed(ctx, key)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.effects[key]++
	return nil
}

func (x *trial) count(key string) int {
	if x.way.tx {
		return x.db.count(x.T, `select count(*) from effects where name = $1`, key)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.effects[key]
}

func (x *trial) endLeases() {
	if x.db != nil {
		x.db.endLeases(x.T)
		return
	}
	x.spy.endLease(x.T)
}

// spy knows the last claim, and loses answers.
type spy struct {
	idempotency.Store
	loseClaim, loseEnd atomic.Bool
	last               atomic.Pointer[idempotency.Record]
}

func (s *spy) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, bool, error) {
	r, granted, err := s.Store.Claim(ctx, c)
	if granted {
		s.last.Store(&r)
	}
	if s.loseClaim.CompareAndSwap(true, false) {
		return idempotency.Record{}, false, errDead
	}
	return r, granted, err
}

func (s *spy) Complete(ctx context.Context, id idempotency.ID, owner idempotency.Owner, c idempotency.Completion) error {
	err := s.Store.Complete(ctx, id, owner, c)
	if s.loseEnd.CompareAndSwap(true, false) {
		return errDead
	}
	return err
}

func (s *spy) endLease(t *testing.T) {
	t.Helper()
	r := s.last.Load()
	if err := s.Extend(t.Context(), r.ID, r.Owner, 0); err != nil {
		t.Error(err)
	}
}
