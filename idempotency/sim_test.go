package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/metric/noop"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/pgmodel"
)

// simWorld is what the schedules of a bubble share.
type simWorld struct {
	data  *simDatabase
	db    *sql.DB
	store *SQLStore
}

// simulation drives engines through one random schedule: clients that send a request until
// they know its outcome, and a few processes that serve them. Everything that takes time in
// life is a step of its own, and the schedule decides which comes next.
type simulation struct {
	*simWorld
	rng           *rand.Rand
	cfg           Config
	transactional bool
	capacity      int // requests that a process serves at a time
	faults        bool
	processes     []*simProcess
	started       int // processes
	keys          []*simClient
	sent          int // requests
	background    int // calls beside requests
	stats         map[string]int

	mu        sync.Mutex
	runs      int64
	running   int // requests
	finished  []simResult
	dying     []*simProcess
	elsewhere map[string][]int64 // effects outside of the database, by key
}

type simProcess struct {
	number int
	ctx    context.Context
	stop   context.CancelFunc
	serve  func(key *simClient) http.Handler
	busy   int
	delays atomic.Int64
}

// simClient has one request to make, with one key, and what its handler will do: one deed for
// each run. When there is none left, it succeeds.
type simClient struct {
	key     string
	deeds   []simDeed
	always  simDeed
	open    int // requests without an answer
	failed  int // answers that were not the last word
	over    bool
	answers []string
}

type simDeed int

const (
	deedSucceeds simDeed = iota
	deedRefuses          // with an answer that is stored
	deedDeclines         // with one that is not
	deedFails
	deedPanics
	deedIsSlow
	deedOverlooks // the error of a statement
	deedKills     // its process
	deeds
)

// simResult is how a request ended.
type simResult struct {
	number   int
	client   *simClient
	process  int
	status   int // 0: no answer
	body     string
	problem  bool
	panicked bool
}

const (
	simTimeout = time.Second
	simLease   = 2 * time.Second
)

func newSimWorld() *simWorld {
	w := &simWorld{data: newSimDatabase()}
	w.db = w.data.server.DB()
	var err error
	if w.store, err = NewSQLStore(w.db, StoreConfig{Database: oncemill.Config{Dialect: oncemill.PostgreSQL}}); err != nil {
		panic(err)
	}
	return w
}

func (w *simWorld) newSimulation(seed uint64) *simulation {
	w.data.server.Reset()
	w.data.effects = nil
	s := &simulation{simWorld: w, rng: rand.New(rand.NewPCG(seed, 3)), faults: true, stats: map[string]int{}, elsewhere: map[string][]int64{}}
	// Whole seconds, so that a schedule does not depend on those before it.
	time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(time.Second)))
	s.transactional = s.rng.IntN(3) > 0
	s.capacity = 1 + s.rng.IntN(3)
	s.cfg = Config{
		Scope: SingleTenant(), Timeout: simTimeout, Logger: slog.New(slog.DiscardHandler),
		Telemetry: TelemetryConfig{MeterProvider: noop.NewMeterProvider()},
	}
	s.cfg.Keys.MaxOutstanding = Unlimited
	if s.capacity == 1 { // several would race for the count
		s.cfg.Keys.MaxOutstanding = 1 + s.rng.IntN(4)
	}
	s.cfg.Failures.Lease = simLease
	s.cfg.Transactions.Retries = 3
	s.cfg.Answers.InProgress = []InProgressPolicy{InProgressConflict, InProgressWait}[s.rng.IntN(2)]
	s.cfg.Answers.WaitTimeout = 3 * time.Second
	if s.transactional && s.rng.IntN(3) == 0 {
		s.cfg.Transactions.GroupSize = 4
	}
	if !s.transactional {
		s.cfg.Failures.Crashed = CrashPolicy(s.rng.IntN(3))
		if s.cfg.Failures.Crashed == CrashedRecover {
			s.cfg.Failures.Recover = s.recover
		}
	}
	for range 1 + s.rng.IntN(3) {
		s.start()
	}
	for i := range 1 + s.rng.IntN(3) {
		c := &simClient{key: fmt.Sprint("key", i)}
		if s.rng.IntN(2) == 0 {
			for range 1 + s.rng.IntN(3) {
				c.deeds = append(c.deeds, simDeed(s.rng.IntN(int(deeds))))
			}
		}
		if s.rng.IntN(8) == 0 {
			c.always = []simDeed{deedFails, deedRefuses, deedDeclines, deedPanics, deedIsSlow}[s.rng.IntN(5)]
		}
		s.keys = append(s.keys, c)
	}
	return s
}

// start starts a process.
func (s *simulation) start() {
	s.started++
	p := &simProcess{number: s.started}
	ctx, stop := context.WithCancel(context.Background())
	p.ctx, p.stop = ctx, stop
	engine, err := New(s.store, s.cfg)
	if err != nil {
		panic(err)
	}
	engine.draw = func(below time.Duration) time.Duration {
		return below/2 + time.Duration(p.delays.Add(1)) // no two timers end at the same moment
	}
	p.serve = func(c *simClient) http.Handler {
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.run(p, c, w, r) })
		if s.transactional {
			return engine.TxMiddleware(handler)
		}
		return engine.Middleware(handler)
	}
	s.processes = append(s.processes, p)
}

// crash ends a process and starts another one in its place. Its clients get no answer.
func (s *simulation) crash(p *simProcess) {
	s.stats["crashes"]++
	s.data.server.Crash(s.rng, p.number)
	synctest.Wait()
	p.stop()
	s.processes = slices.DeleteFunc(s.processes, func(o *simProcess) bool { return o == p })
	s.start()
}

// killed returns a process that a handler has killed, if there is one.
func (s *simulation) killed() *simProcess {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.dying) == 0 {
		return nil
	}
	p := s.dying[0]
	s.dying = s.dying[1:]
	return p
}

// step does one random thing, each at a moment of its own.
func (s *simulation) step() {
	time.Sleep(time.Duration(1+s.rng.IntN(50)) * time.Microsecond)
	synctest.Wait()
	s.settle()
	if p := s.killed(); p != nil {
		if slices.Contains(s.processes, p) {
			s.stats["killed"]++
			s.crash(p)
		}
		return
	}
	p := s.processes[s.rng.IntN(len(s.processes))]
	switch s.rng.IntN(20) {
	default:
		if !s.data.server.Next(s.rng, s.faults) && !s.send(p) {
			s.pass()
		}
	case 12, 13, 14:
		s.send(p)
	case 15:
		s.pass()
	case 16:
		if s.faults && s.rng.IntN(6) == 0 {
			s.crash(p)
		}
	case 17:
		if s.faults && s.rng.IntN(4) == 0 {
			s.background++
			ctx := pgmodel.WithActor(p.ctx, pgmodel.Actor{Process: p.number, Work: -s.background})
			go func() { _, _ = s.store.Purge(ctx, 10) }() // it is tried again later
		}
	case 18:
		if s.faults && s.rng.IntN(50) == 0 && !s.data.server.Down() {
			s.data.server.Fail(s.rng)
		} else if s.data.server.Down() {
			s.data.server.Restart()
		}
	}
}

// send sends a request of a client that does not know its outcome, or of one that does: the
// answer must stay the same.
func (s *simulation) send(p *simProcess) bool {
	var clients []*simClient
	for _, c := range s.keys {
		if !c.over || s.faults && s.rng.IntN(10) == 0 {
			clients = append(clients, c)
		}
	}
	if len(clients) == 0 || p.busy >= s.capacity {
		return false
	}
	c := clients[s.rng.IntN(len(clients))]
	if c.open >= 3 || !s.faults && c.open > 0 {
		return false
	}
	s.sent++
	s.stats["requests"]++
	c.open++
	p.busy++
	result := simResult{number: s.sent, client: c, process: p.number}
	ctx := pgmodel.WithActor(p.ctx, pgmodel.Actor{Process: p.number, Work: s.sent})
	s.mu.Lock()
	s.running++
	s.mu.Unlock()
	go func() {
		w := httptest.NewRecorder()
		defer func() {
			result.panicked = recover() != nil
			if !result.panicked {
				result.status, result.body = w.Code, w.Body.String()
				result.problem = w.Header().Get("Content-Type") == problemContentType
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.running--
			s.finished = append(s.finished, result)
		}()
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/payments", strings.NewReader("payment of "+c.key))
		r.Header.Set("Idempotency-Key", c.key)
		p.serve(c).ServeHTTP(w, r)
	}()
	return true
}

// settle hands answers to the clients. A process that has crashed gives none.
func (s *simulation) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(s.finished, func(a, b simResult) int { return a.number - b.number })
	for _, r := range s.finished {
		c := r.client
		c.open--
		i := slices.IndexFunc(s.processes, func(p *simProcess) bool { return p.number == r.process })
		if i < 0 {
			continue
		}
		s.processes[i].busy--
		if s.faults && s.rng.IntN(15) == 0 {
			s.stats["answers lost"]++
			continue
		}
		s.stats[fmt.Sprint("answers ", r.status)]++
		switch last := !r.problem && (r.status == http.StatusCreated || r.status == http.StatusNotFound); {
		case last:
			c.over = true
			c.answers = append(c.answers, r.body)
		case r.problem && strings.Contains(r.body, ProblemOutcomeUnknown):
			s.stats["unknown outcomes"]++
			c.over = true // an operator has to find out
		default:
			c.failed++
		}
	}
	s.finished = nil
}

// pass lets time pass.
func (s *simulation) pass() {
	pause := time.Duration(1+s.rng.IntN(40)) * time.Millisecond
	if s.rng.IntN(3) == 0 {
		pause = time.Duration(1+s.rng.IntN(3000)) * time.Millisecond
	}
	time.Sleep(pause)
}

// run is the handler.
func (s *simulation) run(p *simProcess, c *simClient, w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.runs++
	run, deed := s.runs, c.always
	if len(c.deeds) > 0 {
		deed, c.deeds = c.deeds[0], c.deeds[1:]
	}
	s.mu.Unlock()
	switch deed {
	case deedRefuses:
		http.Error(w, fmt.Sprint("refusal ", run), http.StatusNotFound)
		return
	case deedDeclines:
		http.Error(w, "not now", http.StatusTooManyRequests)
		return
	}
	if err := s.effect(r.Context(), p, c, run, deed); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	switch deed {
	case deedFails:
		http.Error(w, "failed", http.StatusInternalServerError)
		return
	case deedPanics:
		panic("on purpose")
	case deedIsSlow:
		<-r.Context().Done()
	case deedKills:
		s.mu.Lock()
		s.dying = append(s.dying, p)
		s.mu.Unlock()
		<-p.ctx.Done()
	}
	w.WriteHeader(http.StatusCreated)
	fmt.Fprint(w, "answer ", run)
}

// effect is what the handler does: in the transaction, or elsewhere.
func (s *simulation) effect(ctx context.Context, p *simProcess, c *simClient, run int64, deed simDeed) error {
	if !s.transactional {
		if run%2 == 0 { // at another moment than its claim
			time.Sleep(time.Duration(run*7) * time.Millisecond)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if p.ctx.Err() == nil { // a dead process does nothing
			s.elsewhere[c.key] = append(s.elsewhere[c.key], run)
		}
		return nil
	}
	tx, ok := TxFromContext(ctx)
	if !ok {
		return errors.New("no transaction")
	}
	if _, err := tx.ExecContext(ctx, simAddEffect, c.key, run); err != nil {
		return err
	}
	for i := range int64(2) { // two requests that touch two rows in different orders may deadlock
		if _, err := tx.ExecContext(ctx, simTouch, fmt.Sprint((run+i)%2)); err != nil && deed != deedOverlooks {
			return err
		}
	}
	if deed == deedOverlooks {
		_, _ = tx.ExecContext(ctx, simFails)
	}
	return nil
}

// recover finds out whether a run had its effect.
func (s *simulation) recover(_ context.Context, record Record) (Recovery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.keys {
		id := hashID(newHasher(oncemill.Secret{}), "oncemill idempotency key", "", "", http.MethodPost, "/payments", c.key)
		if runs := s.elsewhere[c.key]; id == record.ID && len(runs) > 0 {
			return Recovery{Status: http.StatusCreated, Body: fmt.Append(nil, "answer ", runs[0])}, nil
		}
	}
	return Recovery{RunAgain: true}, nil
}
