package idempotency_test

import (
	"net/http/httptest"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/conformance"
)

func runSuite(t *testing.T, urls ...string) {
	t.Helper()
	suite, err := conformance.New(t.Context(), conformance.Target{URLs: urls})
	if err != nil {
		t.Fatal(err)
	}
	defer suite.Close()
	passed := 0
	for _, c := range conformance.Cases() {
		switch result := suite.Run(t.Context(), c); {
		case result.Err != nil:
			t.Errorf("%s: %v", result.Name, result.Err)
		case result.Skipped != "":
			t.Logf("%s: left out: %s", result.Name, result.Skipped)
		default:
			passed++
		}
	}
	t.Logf("%d cases passed", passed)
	if passed < 60 {
		t.Errorf("only %d cases", passed)
	}
}

// inEachMode runs test on a database of its own for each mode: on SQLite a handler
// that stands still in its transaction makes all others of its database wait.
func inEachMode(t *testing.T, test func(t *testing.T, p *place, transactional bool)) {
	t.Helper()
	for name, transactional := range map[string]bool{"transactional": true, "snapshot": false} {
		t.Run(name, func(t *testing.T) {
			onEachPlace(t, func(t *testing.T, p *place) { test(t, p, transactional) })
		})
	}
}

func TestConformance_InOneProcess(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, p *place, transactional bool) {
		url, _ := p.probe(t, transactional, nil)
		runSuite(t, url)
	})
}

func TestConformance_OfTwoProcesses(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, p *place, transactional bool) {
		s := serveSettings{Driver: p.driver, DSN: p.dsn, Database: p.cfg, Transactional: transactional}
		runSuite(t, startServer(t, s).url, startServer(t, s).url)
	})
}

func TestConformance_InMemory(t *testing.T) {
	t.Parallel()
	cfg := probeConfig()
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { *c = cfg })
	server := httptest.NewServer(conformance.NewProbe(engine, &conformance.MemoryEffects{}, capabilitiesOf(cfg, false)))
	defer server.Close()
	runSuite(t, server.URL)
}

// What a client sees does not tell whether requests share transactions.
func TestConformance_InGroups(t *testing.T) {
	onEachPlace(t, func(t *testing.T, p *place) {
		url, _ := p.probe(t, true, grouped)
		runSuite(t, url)
	})
}
