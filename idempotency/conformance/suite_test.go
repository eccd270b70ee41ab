package conformance_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/internal/testserver"
)

// target is a service of two processes, the second of which hooks kill and stop.
func (s *service) target(t *testing.T) conformance.Target {
	t.Helper()
	first, second := s.start(t, ""), s.start(t, "")
	t.Cleanup(func() {
		first.kill()
		second.kill()
	})
	nothing := func(do func()) func(context.Context) error {
		return func(context.Context) error {
			do()
			return nil
		}
	}
	return conformance.Target{
		URLs: []string{"http://" + first.address, "http://" + second.address},
		Hooks: conformance.Hooks{
			Kill:   nothing(func() { second.kill() }),
			Start:  nothing(func() { second = s.start(t, second.address) }),
			Freeze: nothing(func() { second.freeze() }),
			Thaw:   nothing(func() { second.thaw() }),
			Expire: nothing(s.expire),
			Purge:  nothing(s.purge),
		},
	}
}

// operation makes the target one of a real operation.
func (s *service) operation(target conformance.Target) conformance.Target {
	target.Operation = &conformance.Operation{
		Path:        "/orders",
		Body:        []byte(`{"id": "{{unique}}", "payment": "{{uuid}}", "number": {{number}}}`),
		Other:       []byte(`{"id": "{{unique}}", "payment": "{{uuid}}", "number": 0}`),
		OtherPaths:  []string{"/payments", "/orders?discount=1"},
		OtherMethod: http.MethodPut,
		Tenant:      &conformance.Caller{Path: "/tenants/b/orders"},
		User:        &conformance.Caller{Header: http.Header{"X-User": {"b"}}},
	}
	target.OptionalKey = s.optional
	target.Hooks.Effects = func(_ context.Context, v conformance.Values) (int, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.placed[v.Unique], nil
	}
	return target
}

// expectAll runs all cases and checks that none fails, and that at least so many run.
func expectAll(t *testing.T, target conformance.Target, atLeast int) {
	t.Helper()
	suite, err := conformance.New(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	defer suite.Close()
	passed := 0
	for _, result := range suite.RunAll(t.Context()) {
		switch {
		case result.Err != nil:
			t.Errorf("%s: %v", result.Name, result.Err)
		case result.Skipped != "":
			t.Logf("%s: skipped: %s", result.Name, result.Skipped)
		default:
			passed++
		}
	}
	if passed < atLeast {
		t.Errorf("only %d cases passed", passed)
	}
}

func TestSuite_PassesASoundProbe(t *testing.T) {
	t.Parallel()
	expectAll(t, newService(sound).target(t), 110)
}

func TestSuite_PassesASoundOperation(t *testing.T) {
	t.Parallel()
	for _, optional := range []bool{false, true} {
		t.Run(fmt.Sprintf("optional keys %t", optional), func(t *testing.T) {
			t.Parallel()
			s := newService(sound)
			s.optional = optional
			expectAll(t, s.operation(s.target(t)), 40)
		})
	}
}

// A request that the service could not register is sent again.
func TestSuite_PassesABusyProbe(t *testing.T) {
	t.Parallel()
	s := newService(sound)
	s.busy = true
	expectAll(t, s.target(t), 110)
}

// A service that can register nothing fails the suite, which reports how it refuses.
func TestSuite_FailsAServiceThatRegistersNothing(t *testing.T) {
	t.Parallel()
	s := newService(sound)
	s.down = true
	target := s.target(t)
	target.Patience = 300 * time.Millisecond
	for name, want := range map[string]string{
		"a client that breaks off gets the answer on its retry":       "waited",
		"copies that come at once run once":                           "waited",
		"a failure that declares to have had no effect may run again": "store-unavailable",
	} {
		if result := runCase(t, target, name); result.Err == nil || !strings.Contains(result.Err.Error(), want) {
			t.Errorf("%s: %v, skipped %q, want %s", name, result.Err, result.Skipped, want)
		}
	}
}

// A suite ends with its context, also while requests of a case wait to be registered: it reports that
// the case did not end.
func TestSuite_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a client that breaks off gets the answer on its retry", "copies that come at once run once"} {
		s := newService(sound)
		s.down = true
		target := s.target(t)
		suite, err := conformance.New(t.Context(), target)
		if err != nil {
			t.Fatal(err)
		}
		defer suite.Close()
		c := caseOf(t, name)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan conformance.Result, 1)
		go func() { ended <- suite.Run(ctx, c) }()
		testserver.Eventually(t, "requests are refused", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.downs > 40
		})
		cancel()
		if result := <-ended; result.Err == nil || !strings.Contains(result.Err.Error(), context.Canceled.Error()) {
			t.Errorf("%s: %v, skipped %q", name, result.Err, result.Skipped)
		}
	}
}

// Callers differ by header, query or path.
func TestSuite_SeparatesTenantsByWhateverNamesThem(t *testing.T) {
	t.Parallel()
	for by, tenant := range map[string]conformance.Caller{
		"header": {Header: http.Header{"X-Tenant": {"b"}}},
		"query":  {Path: "/orders?tenant=b"},
		"path":   {Path: "/tenants/b/orders"},
	} {
		for _, b := range []bug{sound, mixesTenants} {
			t.Run(by+" "+string(b), func(t *testing.T) {
				t.Parallel()
				s := newService(b)
				target := s.operation(s.target(t))
				target.Operation.Tenant = &tenant
				if result := runCase(t, target, "two tenants share no key"); (result.Err == nil) != (b == sound) || result.Skipped != "" {
					t.Errorf("%v %s", result.Err, result.Skipped)
				}
			})
		}
	}
}

// rounds is how often a bug has to be noticed: chance does not do.
var rounds = testserver.Rounds(1, 5)

func TestSuite_NoticesPlantedBugs(t *testing.T) {
	t.Parallel()
	for _, planted := range plants {
		t.Run(strings.ReplaceAll(string(planted.bug), " ", "_"), func(t *testing.T) {
			t.Parallel()
			for range rounds {
				s := newService(planted.bug)
				target := s.target(t)
				if planted.stuck {
					target.Patience = 2 * time.Second
				}
				expectNoticed(t, target, planted.probe)
				if planted.operation != "" {
					expectNoticed(t, s.operation(target), planted.operation)
				}
			}
		})
	}
}

func expectNoticed(t *testing.T, target conformance.Target, name string) {
	t.Helper()
	result := runCase(t, target, name)
	if result.Err == nil {
		t.Errorf("%q passes or is skipped: %s", name, result.Skipped)
		return
	}
	t.Logf("%s: %v", name, result.Err)
}

// runCase runs the case of this name.
func runCase(t *testing.T, target conformance.Target, name string) conformance.Result {
	t.Helper()
	suite, err := conformance.New(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	defer suite.Close()
	return suite.Run(t.Context(), caseOf(t, name))
}

func caseOf(t *testing.T, name string) conformance.Case {
	t.Helper()
	for _, c := range conformance.Cases() {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("there is no case %q", name)
	return conformance.Case{}
}

// A skipped case names what it needs.
func TestSuite_NamesWhatASkippedCaseNeeds(t *testing.T) {
	t.Parallel()
	s := newService(sound)
	target := s.target(t)
	bare := conformance.Target{URLs: target.URLs[:1], Operation: &conformance.Operation{Path: "/orders", Body: []byte(`"{{unique}}"`)}}
	for name, want := range map[string]string{
		"an answer is replayed though its process dies behind it": "--kill-command",
		"an expired key runs again, or is refused as expired":     "--expire-command",
		"a purge keeps what has not expired":                      "--purge-command",
		"another body is refused":                                 "--other",
		"another path or query is another request":                "--other-path",
		"another method is another request":                       "--other-method",
		"two tenants share no key":                                "--tenant",
		"two users share no key":                                  "--user",
		"a body with a name twice is not one with it once":        "--body",
		"without a key every request runs":                        "--optional-key",
		"another process replays":                                 "two processes",
		"401 is not stored: the request runs again":               "probe",
	} {
		if result := runCase(t, bare, name); !strings.Contains(result.Skipped, want) {
			t.Errorf("%s: skipped %q, want %s; %v", name, result.Skipped, want, result.Err)
		}
	}
	if result := runCase(t, conformance.Target{URLs: target.URLs}, "a process that is paused beyond its lease and resumes has no effect beside its successor's"); !strings.Contains(result.Skipped, "--freeze-command") {
		t.Errorf("skipped %q; %v", result.Skipped, result.Err)
	}
}

// Without marks and without a hook that counts, equal answers show nothing; the suite does
// not pass what it cannot see.
func TestSuite_SkipsWhatItCannotSee(t *testing.T) {
	t.Parallel()
	s := newService(marksNothing)
	target := s.operation(s.target(t))
	target.Operation.Body, target.Operation.Other, target.Hooks = []byte(`{"id": "same"}`), nil, conformance.Hooks{}
	if result := runCase(t, target, "the case of a key matters"); !strings.Contains(result.Skipped, "--replayed-header") {
		t.Errorf("skipped %q; %v", result.Skipped, result.Err)
	}
}

func TestNew_RefusesWhatItCannotUse(t *testing.T) {
	t.Parallel()
	s := newService(sound)
	target := s.target(t)
	nothing := func(context.Context) error { return nil }
	count := func(context.Context, conformance.Values) (int, error) { return 0, nil }
	for want, change := range map[string]func(*conformance.Target){
		"Kill and Start":  func(t *conformance.Target) { t.Hooks = conformance.Hooks{Kill: nothing} },
		"Freeze and Thaw": func(t *conformance.Target) { t.Hooks = conformance.Hooks{Thaw: nothing} },
		"two URLs": func(t *conformance.Target) {
			t.URLs, t.Hooks = t.URLs[:1], conformance.Hooks{Freeze: nothing, Thaw: nothing}
		},
		"Effects needs":         func(t *conformance.Target) { t.Hooks = conformance.Hooks{Effects: count} },
		"does not begin with /": func(t *conformance.Target) { t.Operation = &conformance.Operation{Path: "orders"} },
		"Tenant differs": func(t *conformance.Target) {
			t.Operation = &conformance.Operation{Path: "/", Tenant: &conformance.Caller{}}
		},
		"Other and Body": func(t *conformance.Target) {
			t.Operation = &conformance.Operation{Path: "/", Body: []byte("a"), Other: []byte("a")}
		},
		"a URL is needed":   func(t *conformance.Target) { t.URLs = nil },
		"there is no probe": func(t *conformance.Target) { t.URLs = []string{t.URLs[0] + "/nothing"} },
		"no answer from http://12": func(t *conformance.Target) {
			t.URLs, t.Operation = []string{"http://127.0.0.1:1"}, &conformance.Operation{Path: "/"}
		},
	} {
		changed := conformance.Target{URLs: target.URLs}
		change(&changed)
		if _, err := conformance.New(t.Context(), changed); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
