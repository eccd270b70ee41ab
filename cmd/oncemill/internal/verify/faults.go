package verify

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/oncemill/oncemill/internal/sleep"
)

// Fault is a kind of fault in the certificate.
type Fault struct {
	Kind     string `json:"kind"`
	Injected int    `json:"injected"`
	Skipped  string `json:"skipped,omitempty"` // why it could not be injected
}

// Kinds of faults, as the certificate shows them.
const (
	faultKill   = "processes killed (SIGKILL)"
	faultTerm   = "processes asked to stop (SIGTERM)"
	faultFreeze = "processes frozen for longer than the lease (SIGSTOP)"
	faultEnd    = "database connections of a process ended by the server"
	faultCut    = "RabbitMQ connections of a process closed"
	faultCopies = "messages published a second time"
	faultAtOnce = "requests sent in several copies at once"
)

var faultKinds = []string{faultKill, faultTerm, faultFreeze, faultEnd, faultCut, faultCopies}

const copiesAtATime = 10

// processNames are the processes of a run. The first ones are services, which have no connection
// to RabbitMQ.
var processNames = []string{"service-1", "service-2", "relay-1", "relay-2", "first-1", "first-2", "second-1", "second-2"}

const services = 2

// strike is a planned fault.
type strike struct {
	at     time.Duration
	kind   string
	target string // a process; none for faultCopies
}

// planFaults draws the faults of a run. Each kind has its turn before another has its second.
func planFaults(seed uint64, length time.Duration, kinds []string) (plan []strike) {
	r := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // not a secret
	every := min(time.Second, length/time.Duration(2+len(kinds)))
	for at := every; at < length-every; {
		for _, n := range r.Perm(len(kinds)) {
			targets := processNames
			if kinds[n] == faultCut {
				targets = processNames[services:]
			}
			plan = append(plan, strike{at: at, kind: kinds[n], target: targets[r.IntN(len(targets))]})
			at += every*4/5 + time.Duration(r.Int64N(int64(every/5)))
		}
	}
	return slices.DeleteFunc(plan, func(s strike) bool { return s.at > length })
}

// faults injects the faults of a run, and counts them.
type faults struct {
	processes map[string]*process
	wire      *wire
	lease     time.Duration
	seed      uint64

	mu      sync.Mutex
	count   map[string]int
	skipped map[string]string
}

// run follows the plan until open ends, and returns when every process runs again.
func (f *faults) run(ctx, open context.Context, plan []strike) {
	var frozen sync.WaitGroup
	defer frozen.Wait()
	r := rand.New(rand.NewPCG(f.seed, 1)) //nolint:gosec // not a secret
	begin := time.Now()
	for _, s := range plan {
		if !sleep.For(open, time.Until(begin.Add(s.at))) {
			return
		}
		p := f.processes[s.target]
		// A process that is starting has nothing to lose, and there must be messages to copy.
		for !p.isReady() || s.kind == faultCopies && f.wire.received() == 0 {
			if !sleep.For(open, 20*time.Millisecond) {
				return
			}
		}
		switch s.kind {
		case faultKill:
			_, err := p.signal(syscall.SIGKILL, true)
			f.note(s.kind, 1, err)
		case faultTerm:
			_, err := p.signal(syscall.SIGTERM, true)
			f.note(s.kind, 1, err)
		case faultFreeze:
			thaw, err := p.signal(freezeSignal, false)
			f.note(s.kind, 1, err)
			frozen.Go(func() {
				sleep.For(ctx, f.lease*3/2)
				thaw(thawSignal)
			})
		case faultEnd:
			p.tell(commandEnd) // the process reports the outcome
		case faultCut:
			p.tell(commandCut)
		case faultCopies:
			n, err := f.wire.publishAgain(ctx, r, copiesAtATime)
			f.note(s.kind, n, err)
		}
	}
}

// outcome takes what a process reports about a command.
func (f *faults) outcome(command, problem string) {
	kind := map[string]string{commandEnd: faultEnd, commandCut: faultCut}[command]
	if problem != "" {
		f.note(kind, 0, errors.New(problem))
		return
	}
	f.note(kind, 1, nil)
}

// note counts a fault, or keeps why there was none. A failure may be due to another fault, so
// the kind is tried again.
func (f *faults) note(kind string, n int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		f.skipped[kind] = err.Error()
		return
	}
	f.count[kind] += n
}

func (f *faults) total() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, injected := range f.count {
		n += injected
	}
	return n
}

// list returns all kinds, for the certificate.
func (f *faults) list(atOnce int) (list []Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, kind := range faultKinds {
		fault := Fault{Kind: kind, Injected: f.count[kind]}
		if fault.Injected == 0 {
			fault.Skipped = cmp.Or(f.skipped[kind], "none took effect; a longer run has more")
		}
		list = append(list, fault)
	}
	return append(list, Fault{Kind: faultAtOnce, Injected: atOnce})
}
