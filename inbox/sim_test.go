package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/pgmodel"
)

// simWorld is what the schedules of a bubble share: the model of PostgreSQL, and inboxes that
// the processes of a schedule are copies of.
type simWorld struct {
	data      *simDatabase
	db        *sql.DB
	consumers []*Inbox
}

// simulation drives inboxes through one random schedule: two consumers, a few processes, and a
// broker that delivers at least once. Everything that takes time in life, a statement, a
// commit, its answer, a delivery, is a step of its own, and the schedule decides which comes
// next.
type simulation struct {
	*simWorld
	rng        *rand.Rand
	cfg        Config // what differs between schedules
	grouped    bool
	capacity   int  // messages that a process handles at a time
	outages    bool // of the database
	long       bool // pauses longer than the retention may happen
	faults     bool
	processes  []*simProcess
	started    int // processes
	messages   map[string]*simMessage
	copies     []*simCopy // that are not acknowledged
	made       int        // copies
	background int        // calls beside deliveries
	stats      map[string]int

	mu       sync.Mutex
	runs     int64
	running  int // deliveries
	finished []simResult
	dying    []*simProcess
}

type simProcess struct {
	number  int
	ctx     context.Context
	stop    context.CancelFunc
	inboxes []*Inbox
	busy    int
	delays  atomic.Int64
}

// spread makes delays that differ a little: no two timers end at the same moment, which would
// leave the choice to Go's scheduler.
func (p *simProcess) spread(d time.Duration) time.Duration {
	return d + time.Duration(p.delays.Add(1))*time.Microsecond
}

// simMessage is a message, and what its handlers will do, by consumer: one deed for each run.
// When there is none left, they succeed.
type simMessage struct {
	id, key string
	seq     int64
	created time.Time
	deeds   [2][]simDeed
	always  [2]simDeed
}

type simDeed int

const (
	deedSucceeds simDeed = iota
	deedFails
	deedFailsForGood // marked by Permanent
	deedUnavailable
	deedPanics
	deedExits // ends its goroutine
	deedIsSlow
	deedOverlooks // the error of a statement
	deedKills     // its process
	deeds
)

// simCopy is a copy of a message in the queue of a consumer.
type simCopy struct {
	number      int
	consumer    int
	m           *simMessage
	replay      *message.Message // nil if it is none
	redelivered bool
	at          time.Time // not before
	keeper      int       // the process that has nacked it, and delivers it again; 0: any
	nacks       int
	holder      int // the process that handles it; 0: none
}

// simResult is how a delivery ended.
type simResult struct {
	copy    *simCopy
	process int
	err     error
	wait    time.Duration // until the copy is delivered again
}

// simDelivery is what the subscriber knew of a copy when it delivered it.
type simDelivery struct {
	redelivered bool
	created     time.Time
	nacks       int

	mu   sync.Mutex
	wait time.Duration
}

func (d *simDelivery) Redelivered() bool    { return d.redelivered }
func (d *simDelivery) ArrivedAt() time.Time { return time.Time{} }
func (d *simDelivery) CreatedAt() time.Time { return d.created }
func (d *simDelivery) Nacks() int           { return d.nacks }
func (d *simDelivery) Yield()               {}
func (d *simDelivery) DelayNack(wait time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wait = wait
}

func (d *simDelivery) delay() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.wait
}

const (
	simRetention = time.Hour
	simTimeout   = time.Second
)

func newSimWorld() *simWorld {
	w := &simWorld{data: newSimDatabase()}
	w.db = w.data.server.DB()
	at := oncemill.Config{Dialect: oncemill.PostgreSQL}
	letters, err := dlq.New(w.db, dlq.Config{Database: at})
	if err != nil {
		panic(err)
	}
	for _, consumer := range []string{"stock", "mail"} {
		in, err := New(w.db, Config{
			Consumer: consumer, Database: at, DeadLetters: letters, Retention: simRetention, Timeout: simTimeout,
			Logger: slog.New(slog.DiscardHandler), MeterProvider: noop.NewMeterProvider(),
		})
		if err != nil {
			panic(err)
		}
		w.consumers = append(w.consumers, in)
	}
	return w
}

func (w *simWorld) newSimulation(seed uint64) *simulation {
	w.data.reset()
	s := &simulation{simWorld: w, rng: rand.New(rand.NewPCG(seed, 2)), messages: map[string]*simMessage{}, faults: true, stats: map[string]int{}}
	// Whole seconds, so that a schedule does not depend on those before it.
	time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(time.Second)))
	s.cfg.Retry = Retry{
		Tries: 1 + s.rng.IntN(2), Backoff: 10 * time.Millisecond, Deliveries: 1 + s.rng.IntN(3), Delay: time.Second, DelayMax: 8 * time.Second,
		Unavailable: 1 + s.rng.IntN(3), Crashes: 1 + s.rng.IntN(2),
	}
	s.cfg.GapWait = []time.Duration{2 * time.Second, 5 * time.Minute}[s.rng.IntN(2)]
	s.grouped, s.long = s.rng.IntN(3) == 0, s.rng.IntN(4) == 0
	if s.capacity = 1 + s.rng.IntN(3); s.grouped {
		s.capacity = 4
	}
	s.outages = s.capacity == 1 && s.rng.IntN(3) == 0
	if s.capacity > 1 { // several messages of a process would race for the probe of a closed gate
		w.data.server.Spare(w.data.recordsStart)
	}
	if s.rng.IntN(3) == 0 {
		s.cfg.Sequence = func(msg *message.Message) (int64, bool) { return s.messages[msg.UUID].seq, true }
	}
	s.cfg.Key = func(msg *message.Message) string { return s.messages[msg.UUID].key }
	s.cfg.Fingerprint = []func(*message.Message) []byte{nil, func(msg *message.Message) []byte { return msg.Payload }}[s.rng.IntN(2)]
	for range 1 + s.rng.IntN(3) {
		s.start()
	}
	last := map[string]int64{}
	for i := range 2 + s.rng.IntN(4) {
		m := &simMessage{id: fmt.Sprint("m", i), key: []string{"", "k", "l"}[s.rng.IntN(3)], created: time.Now()}
		last[m.key]++
		m.seq = last[m.key]
		s.messages[m.id] = m
		for consumer := range w.consumers {
			if s.rng.IntN(2) == 0 {
				for range 1 + s.rng.IntN(3) {
					deed := simDeed(s.rng.IntN(int(deeds)))
					if deed == deedUnavailable && s.capacity > 1 {
						deed = deedFails // it closes the gate, too
					}
					m.deeds[consumer] = append(m.deeds[consumer], deed)
				}
			}
			if s.rng.IntN(8) == 0 {
				m.always[consumer] = []simDeed{deedFails, deedFailsForGood, deedKills, deedOverlooks, deedIsSlow}[s.rng.IntN(5)]
			}
			for range 1 + s.rng.IntN(2) {
				s.queue(consumer, m)
			}
		}
	}
	return s
}

// queue adds a copy of a message to the queue of a consumer.
func (s *simulation) queue(consumer int, m *simMessage) *simCopy {
	s.made++
	c := &simCopy{number: s.made, consumer: consumer, m: m, at: time.Now()}
	s.copies = append(s.copies, c)
	return c
}

// start starts a process.
func (s *simulation) start() {
	s.started++
	p := &simProcess{number: s.started}
	ctx, stop := context.WithCancel(context.Background())
	p.ctx, p.stop = ctx, stop
	for _, like := range s.consumers {
		in := &Inbox{db: like.db, given: like.given, cfg: like.cfg, store: like.store, letters: like.letters, telemetry: like.telemetry, tracing: like.tracing}
		in.cfg.Retry, in.cfg.GapWait, in.cfg.Sequence, in.cfg.Key, in.cfg.Fingerprint = s.cfg.Retry, s.cfg.GapWait, s.cfg.Sequence, s.cfg.Key, s.cfg.Fingerprint
		in.reset(p.spread)
		p.inboxes = append(p.inboxes, in)
	}
	s.processes = append(s.processes, p)
}

// crash ends a process and starts another one in its place. The broker delivers again what it
// had.
func (s *simulation) crash(p *simProcess) {
	s.stats["crashes"]++
	s.data.server.Crash(s.rng, p.number)
	synctest.Wait()
	p.stop()
	s.processes = slices.DeleteFunc(s.processes, func(o *simProcess) bool { return o == p })
	for _, c := range s.copies {
		if c.holder == p.number || c.keeper == p.number {
			c.holder, c.keeper, c.nacks, c.redelivered, c.at = 0, 0, 0, true, time.Now()
		}
	}
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
		if !s.data.server.Next(s.rng, s.faults) && !s.deliver(p) {
			s.pass()
		}
	case 11, 12, 13:
		s.deliver(p)
	case 14:
		s.pass()
	case 15:
		if s.faults && s.rng.IntN(8) == 0 {
			s.crash(p)
		}
	case 16:
		if s.faults && s.rng.IntN(3) == 0 {
			m := s.messages[fmt.Sprint("m", s.rng.IntN(len(s.messages)))]
			s.queue(s.rng.IntN(len(s.consumers)), m)
			s.stats["duplicates"]++
		}
	case 17:
		if s.faults {
			s.operate()
		}
	case 18:
		if s.faults && s.rng.IntN(3) == 0 {
			s.purge(p)
		}
	case 19:
		if s.outages && s.faults && s.rng.IntN(10) == 0 && !s.data.server.Down() {
			s.data.server.Fail(s.rng)
		} else if s.data.server.Down() {
			s.data.server.Restart()
		}
	}
}

// settle takes the results of deliveries to the broker.
func (s *simulation) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(s.finished, func(a, b simResult) int { return a.copy.number - b.copy.number })
	for _, r := range s.finished {
		c := r.copy
		if c.holder != r.process {
			continue // it has crashed since
		}
		c.holder, c.at = 0, time.Now().Add(r.wait)
		for _, p := range s.processes {
			if p.number == r.process {
				p.busy--
			}
		}
		switch lost := s.faults && s.rng.IntN(15) == 0; {
		case r.err == nil && !lost:
			s.copies = slices.DeleteFunc(s.copies, func(o *simCopy) bool { return o == c })
		case r.err != nil && s.rng.IntN(3) > 0: // it stays with its process
			c.keeper, c.nacks = r.process, c.nacks+1
		default:
			c.keeper, c.nacks, c.redelivered = 0, 0, true
		}
	}
	s.finished = nil
}

// deliver gives a process a copy that is due, or a bit early.
func (s *simulation) deliver(p *simProcess) bool {
	early := s.faults && s.rng.IntN(10) == 0
	var due []*simCopy
	for _, c := range s.copies {
		if c.holder == 0 && (c.keeper == 0 || c.keeper == p.number) && (early || !c.at.After(time.Now())) {
			due = append(due, c)
		}
	}
	if len(due) == 0 || p.busy >= s.capacity {
		return false
	}
	c := due[s.rng.IntN(len(due))]
	c.holder = p.number
	p.busy++
	s.stats["deliveries"]++
	d := &simDelivery{redelivered: c.redelivered, created: c.m.created, nacks: c.nacks}
	ctx := pgmodel.WithActor(ContextWithDelivery(p.ctx, d), pgmodel.Actor{Process: p.number, Work: c.number})
	msg := message.NewMessageWithContext(ctx, c.m.id, message.Payload("payload of "+c.m.id))
	if c.replay != nil {
		msg = c.replay.CopyWithContext() // with its metadata
		msg.SetContext(ctx)
	}
	in := p.inboxes[c.consumer]
	handler := in.Middleware
	if s.grouped {
		handler = in.GroupMiddleware
	}
	handle := handler(func(msg *message.Message) ([]*message.Message, error) { return nil, s.run(p, c, msg) })
	s.mu.Lock()
	s.running++
	s.mu.Unlock()
	go func() {
		result := simResult{copy: c, process: p.number, err: errSimExited}
		defer func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.running--
			result.wait = d.delay()
			s.finished = append(s.finished, result)
		}()
		_, result.err = handle(msg)
	}()
	return true
}

var errSimExited = errors.New("the handler has ended its goroutine")

// pass lets time pass.
func (s *simulation) pass() {
	waiting, _ := s.data.server.Waiting()
	pause := time.Duration(1+s.rng.IntN(40)) * time.Millisecond
	switch s.rng.IntN(4) {
	case 0:
		pause = time.Duration(1+s.rng.IntN(3000)) * time.Millisecond
	case 1:
		if s.long && s.faults && waiting == 0 && s.rng.IntN(4) == 0 {
			pause = time.Duration(1+s.rng.IntN(90)) * time.Minute
			s.stats["long pauses"]++
		}
	case 2:
		idle := waiting == 0 && !slices.ContainsFunc(s.copies, func(c *simCopy) bool { return c.holder != 0 })
		if idle && len(s.copies) > 0 {
			first := slices.MinFunc(s.copies, func(a, b *simCopy) int { return a.at.Compare(b.at) })
			pause = max(time.Until(first.at), pause)
		}
	}
	time.Sleep(pause)
}

// purge removes old ids in one process, beside everything else.
func (s *simulation) purge(p *simProcess) {
	s.background++
	ctx := pgmodel.WithActor(p.ctx, pgmodel.Actor{Process: p.number, Work: -s.background})
	in := p.inboxes[s.rng.IntN(len(p.inboxes))]
	go func() { _, _ = in.Purge(ctx) }() // it is tried again later
}
