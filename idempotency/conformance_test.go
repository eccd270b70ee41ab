package idempotency_test

import (
	"context"
	"fmt"
	"net/http/httptest"
	"slices"
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
	if passed.Load() < 95 {
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
	inModes(t, []mode{{false, "postgresql"}}, func(t *testing.T, p *testDB, transactional bool) {
		s := serveSettings{Driver: p.driver, DSN: p.dsn, Database: p.cfg, Transactional: transactional}
		runSuite(t, p.atOnce(transactional), startServer(t, s).url, startServer(t, s).url)
	})
}

// The suite kills and stops the second one.
func TestConformance_OfProcessesThatDieAndStandStill(t *testing.T) {
	t.Parallel()
	inModes(t, []mode{{true, "postgresql"}, {false, "sqlite"}}, func(t *testing.T, p *testDB, transactional bool) {
		settings := p.settings()
		settings.Transactional = transactional
		settings.Timeout, settings.Lease = 3*time.Second, 4*time.Second // a busy machine answers in time
		first := startServer(t, settings)
		second := startProcess(t, settings)
		hooks := second.hooks()
		hooks.Freeze, hooks.Thaw = second.freeze, second.thaw
		want := 7
		switch { // a frozen process may keep all others from writing
		case p.cfg.Dialect == oncemill.SQLite && transactional:
			want = 5
		case p.cfg.Dialect == oncemill.SQLite:
			want = 6
		}
		runOnly(t, conformance.Target{URLs: []string{first.url, second.server.url}, Hooks: hooks}, want, "process")
	})
}

// The suite kills the only one.
func TestConformance_OfOneProcessThatDies(t *testing.T) {
	t.Parallel()
	inModes(t, []mode{{false, "postgresql"}, {true, "sqlite"}}, func(t *testing.T, p *testDB, transactional bool) {
		settings := p.settings()
		settings.Transactional = transactional
		settings.Timeout, settings.Lease = 3*time.Second, 4*time.Second
		process := startProcess(t, settings)
		runOnly(t, conformance.Target{URLs: []string{process.server.url}, Hooks: process.hooks()}, 3, "process")
	})
}

// The suite lets answers expire and purges them.
func TestConformance_OfAnswersThatExpire(t *testing.T) {
	t.Parallel()
	for name, refuse := range map[string]time.Duration{"run again": 0, "are refused": time.Hour} {
		t.Run(name, func(t *testing.T) {
			inModes(t, []mode{{true, "postgresql"}, {false, "sqlite"}}, func(t *testing.T, p *testDB, transactional bool) {
				url, _ := p.probe(t, transactional, func(c *idempotency.Config) { c.Expiry.RefuseFor = refuse })
				hooks := conformance.Hooks{
					Expire: func(context.Context) error {
						p.expire(t, refuse == 0)
						return nil
					},
					Purge: func(ctx context.Context) error {
						for {
							if n, err := p.store.Purge(ctx, 100); n < 100 || err != nil {
								return err
							}
						}
					},
				}
				words := []string{"an expired key", "a purge"}
				if p.cfg.Dialect == oncemill.PostgreSQL || !transactional { // else the hook waits for the handler
					words = append(words, "outlives expiry")
				}
				runOnly(t, conformance.Target{URLs: []string{url}, Hooks: hooks}, 1+len(words), words...)
			})
		})
	}
}

// expire moves the times of all records into the past: that of their expiry, and with all
// that until which an expired key is refused.
func (p *testDB) expire(t *testing.T, all bool) {
	t.Helper()
	past := "clock_timestamp()"
	if p.cfg.Dialect == oncemill.SQLite {
		past = "0"
	}
	p.exec(t, `update {{idempotency}} set expires_at = `+past)
	if all {
		p.exec(t, `update {{idempotency}} set forget_at = `+past)
	}
}

// runOnly runs the cases whose name contains one of some words, so many of which have to pass.
func runOnly(t *testing.T, target conformance.Target, want int, words ...string) {
	t.Helper()
	suite, err := conformance.New(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	defer suite.Close()
	ran := 0
	for _, c := range conformance.Cases() {
		if !slices.ContainsFunc(words, func(word string) bool { return strings.Contains(c.Name, word) }) {
			continue
		}
		switch result := suite.Run(t.Context(), c); {
		case result.Err != nil:
			t.Errorf("%s: %v", result.Name, result.Err)
		case result.Skipped == "":
			ran++
		}
	}
	if ran != want && !t.Failed() {
		t.Errorf("%d cases, want %d", ran, want)
	}
}

// process is a server whose process the suite controls.
type process struct {
	t        *testing.T
	settings serveSettings
	server   *server
}

func startProcess(t *testing.T, settings serveSettings) *process {
	t.Helper()
	p := &process{t: t, settings: settings, server: startServer(t, settings)}
	p.settings.Address = p.server.address
	return p
}

func (p *process) hooks() conformance.Hooks {
	return conformance.Hooks{
		Kill: func(context.Context) error {
			p.server.kill()
			return nil
		},
		Start: func(context.Context) error {
			p.server = startServer(p.t, p.settings)
			return nil
		},
	}
}

func (p *process) freeze(context.Context) error {
	p.server.signal(syscall.SIGSTOP)
	p.server.awaitStopped()
	return nil
}

func (p *process) thaw(context.Context) error {
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
	t.Parallel()
	for _, name := range testserver.Rounds([]string{"sqlite"}, []string{"postgresql", "sqlite"}) { // see also OneProcess
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, _ := testDBs[name](t).probe(t, true, grouped)
			// One case at a time: a handler that is held delays its group, whose members then
			// run again, alone.
			runSuite(t, 1, url)
		})
	}
}
