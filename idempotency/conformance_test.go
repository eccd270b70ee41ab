package idempotency_test

import (
	"context"
	"fmt"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/internal/testserver"
)

// severalAtOnce is for runSuite where no case keeps others waiting.
const severalAtOnce = 4

// runSuite runs all cases, some at once: each has keys of its own, and most of them wait.
func runSuite(t *testing.T, atOnce int, urls ...string) {
	t.Helper()
	suite, err := conformance.New(t.Context(), conformance.Target{URLs: urls})
	if err != nil {
		t.Fatal(err)
	}
	defer suite.Close()
	var passed atomic.Int64
	var running sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	for _, c := range conformance.Cases() {
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			switch result := suite.Run(t.Context(), c); {
			case result.Err != nil:
				t.Errorf("%s: %v", result.Name, result.Err)
			case result.Skipped != "":
				t.Logf("%s: left out: %s", result.Name, result.Skipped)
			default:
				passed.Add(1)
			}
		})
	}
	running.Wait()
	t.Logf("%d cases passed", passed.Load())
	if passed.Load() < 60 {
		t.Errorf("only %d cases", passed.Load())
	}
}

// atOnce returns how many cases may run at once: on SQLite a handler that stands still in
// its transaction keeps all others waiting.
func (p *testDB) atOnce(transactional bool) int {
	if transactional && p.cfg.Dialect == oncemill.SQLite {
		return 1
	}
	return severalAtOnce
}

// mode is a cell of the matrix of modes and databases.
type mode struct {
	transactional bool
	database      string
}

// inModes is inEachMode for some cells only, unless the run is a long one: the others are
// those of another test.
func inModes(t *testing.T, some []mode, test func(t *testing.T, p *testDB, transactional bool)) {
	t.Helper()
	if testserver.Long() {
		inEachMode(t, test)
		return
	}
	for _, m := range some {
		t.Run(fmt.Sprintf("transactional %t, %s", m.transactional, m.database), func(t *testing.T) {
			t.Parallel()
			test(t, testDBs[m.database](t), m.transactional)
		})
	}
}

// inEachMode runs test on a separate database for each mode: on SQLite a handler that is
// paused in its transaction makes all others of its database wait.
func inEachMode(t *testing.T, test func(t *testing.T, p *testDB, transactional bool)) {
	t.Helper()
	for name, transactional := range map[string]bool{"transactional": true, "snapshot": false} {
		t.Run(name, func(t *testing.T) {
			onEachDB(t, func(t *testing.T, p *testDB) { test(t, p, transactional) })
		})
	}
}

func TestConformance_InOneProcess(t *testing.T) {
	t.Parallel()
	inModes(t, []mode{{true, "postgresql"}, {false, "sqlite"}}, func(t *testing.T, p *testDB, transactional bool) {
		url, _ := p.probe(t, transactional, nil)
		runSuite(t, p.atOnce(transactional), url)
	})
}

func TestConformance_OfTwoProcesses(t *testing.T) {
	t.Parallel()
	inModes(t, []mode{{false, "postgresql"}, {true, "sqlite"}}, func(t *testing.T, p *testDB, transactional bool) {
		s := serveSettings{Driver: p.driver, DSN: p.dsn, Database: p.cfg, Transactional: transactional}
		runSuite(t, p.atOnce(transactional), startServer(t, s).url, startServer(t, s).url)
	})
}

// The suite kills and stops the second one.
func TestConformance_OfProcessesThatDieAndStandStill(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, p *testDB, transactional bool) {
		settings := p.settings()
		settings.Transactional = transactional
		settings.Timeout, settings.Lease = 3*time.Second, 4*time.Second // a busy machine answers in time
		first, second := &process{t: t, settings: settings}, &process{t: t, settings: settings}
		target := conformance.Target{Processes: []conformance.Process{first, second}}
		for _, p := range []*process{first, second} {
			p.server = startServer(t, settings)
			p.settings.Address = p.server.address
			target.URLs = append(target.URLs, p.server.url)
		}
		suite, err := conformance.New(t.Context(), target)
		if err != nil {
			t.Fatal(err)
		}
		defer suite.Close()
		ran := 0
		for _, c := range conformance.Cases() {
			if !strings.Contains(c.Name, "process dies") && !strings.HasPrefix(c.Name, "a process that") {
				continue
			}
			result := suite.Run(t.Context(), c)
			if result.Err != nil {
				t.Errorf("%s: %v", result.Name, result.Err)
			}
			if result.Skipped == "" {
				ran++
			}
		}
		if oneWriter := p.cfg.Dialect == oncemill.SQLite && transactional; ran != map[bool]int{true: 2, false: 3}[oneWriter] {
			t.Errorf("%d cases", ran)
		}
	})
}

// process is a server whose process the suite controls.
type process struct {
	t        *testing.T
	settings serveSettings
	server   *server
}

func (p *process) Kill(context.Context) error {
	p.server.kill()
	return nil
}

func (p *process) Start(context.Context) error {
	p.server = startServer(p.t, p.settings)
	return nil
}

func (p *process) Freeze(context.Context) error {
	p.server.signal(syscall.SIGSTOP)
	p.server.awaitStopped()
	return nil
}

func (p *process) Thaw(context.Context) error {
	p.server.signal(syscall.SIGCONT)
	return nil
}

func TestConformance_InMemory(t *testing.T) {
	t.Parallel()
	cfg := probeConfig()
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { *c = cfg })
	server := httptest.NewServer(conformance.NewProbe(engine, &conformance.MemoryEffects{}, capabilitiesOf(cfg, false)))
	defer server.Close()
	runSuite(t, severalAtOnce, server.URL)
}

// Clients cannot see whether requests share transactions.
func TestConformance_InGroups(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		url, _ := p.probe(t, true, grouped)
		// One case at a time: a handler that is held delays its group, whose members then
		// run again, alone.
		runSuite(t, 1, url)
	})
}
