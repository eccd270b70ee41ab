package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Target is the service to test.
type Target struct {
	// URLs are those of the service's processes, at least one, without a trailing slash.
	URLs []string

	// Operation is a real operation of a service that has no Probe. Default: none; the
	// service has a Probe.
	Operation *Operation

	// Hooks let the suite kill a process, let answers expire, and so on.
	Hooks Hooks

	// Header is sent with every request, for example Authorization.
	Header http.Header

	// OptionalKey means that the service accepts requests without a key.
	OptionalKey bool

	// KeyHeader is the name of the key's header. Default: "Idempotency-Key".
	KeyHeader string

	// ReplayedHeader is the name of the header that marks replays. A service with an
	// Operation may do without. Default: "Idempotency-Replayed".
	ReplayedHeader string

	// Patience is how long the suite waits for an answer, or for a key that is in progress,
	// before it fails a case. It must be longer than a lease. Default: 2 min.
	Patience time.Duration

	// Client sends the requests; its Transport must not retry by itself. Default: a client
	// of the suite's own.
	Client *http.Client
}

// Result is the outcome of one case.
type Result struct {
	Name    string
	Err     error  // nil: passed
	Skipped string // why it was skipped, if so: what it needs, or why it does not apply
	Took    time.Duration
}

// Case is one case of the suite.
type Case struct {
	Name string

	operation bool // runs on an operation too, which must have what given reports
	given     func(o *Operation) (missing string)

	tx  bool // only for transactional engines
	two bool // needs two processes
	raw bool // only where bodies are compared as bytes

	required, optional bool // only where a key is required, or is not

	kill, freeze, expire, purge bool // needs these hooks

	test func(x *session)
}

// Cases returns all cases, in order.
func Cases() []Case {
	var all []Case
	for _, group := range [][]Case{
		replayCases(), keyCases(), sameCases(), callerCases(), flightCases(), failureCases(), sizeCases(), effectCases(),
		statusCases(), expiryCases(), processCases(),
	} {
		all = append(all, group...)
	}
	return all
}

// caseTimeout ends a case that hangs.
const caseTimeout = 5 * time.Minute

// Suite runs cases against one target.
type Suite struct {
	target       Target
	capabilities Capabilities
	http         *http.Client
}

// New returns a suite for target, after requesting its capabilities.
func New(ctx context.Context, target Target) (*Suite, error) {
	if len(target.URLs) == 0 {
		return nil, errors.New("conformance: a URL is needed")
	}
	for i, address := range target.URLs {
		if u, err := url.Parse(address); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return nil, fmt.Errorf("conformance: URL %d is not an http or https URL", i+1) // it may hold a password
		}
	}
	if target.Operation != nil {
		if err := target.Operation.check(); err != nil {
			return nil, err
		}
	}
	if err := target.Hooks.check(target); err != nil {
		return nil, err
	}
	target.KeyHeader = cmp.Or(target.KeyHeader, "Idempotency-Key")
	target.ReplayedHeader = cmp.Or(target.ReplayedHeader, "Idempotency-Replayed")
	target.Patience = cmp.Or(target.Patience, 2*time.Minute)
	s := &Suite{target: target, http: target.Client}
	if s.http == nil {
		s.http = &http.Client{
			Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true, ExpectContinueTimeout: 10 * time.Second},
			CheckRedirect: func(*http.Request, []*http.Request) error {
				return http.ErrUseLastResponse
			},
		}
	}
	if target.Operation != nil {
		return s, s.answers(ctx)
	}
	if err := s.get(ctx, target.URLs[0]+"/capabilities", &s.capabilities); err != nil {
		return nil, fmt.Errorf("conformance: there is no probe at %s (name an operation with --path and --body instead): %w", redacted(target.URLs[0]), err)
	}
	return s, nil
}

// answers checks that each URL has a server, whatever it answers with.
func (s *Suite) answers(ctx context.Context) error {
	for _, address := range s.target.URLs {
		request, err := http.NewRequestWithContext(ctx, http.MethodHead, address+"/", nil)
		if err != nil {
			return fmt.Errorf("conformance: %w", err)
		}
		response, err := s.http.Do(request)
		if err != nil {
			return fmt.Errorf("conformance: no answer from %s: %w", redacted(address), err)
		}
		_ = response.Body.Close() // it is empty
	}
	return nil
}

// Close closes idle connections.
func (s *Suite) Close() { s.http.CloseIdleConnections() }

// RunAll runs all cases, one after another.
func (s *Suite) RunAll(ctx context.Context) []Result {
	var results []Result
	for _, c := range Cases() { //nolint:contextcheck // a case gets its context when it runs
		results = append(results, s.Run(ctx, c))
	}
	return results
}

// Run runs one case.
func (s *Suite) Run(ctx context.Context, c Case) (result Result) {
	result.Name = c.Name
	began := time.Now()
	defer func() { result.Took = time.Since(began) }()
	if result.Skipped = s.skips(c); result.Skipped != "" {
		return result
	}
	ctx, cancel := context.WithTimeout(ctx, caseTimeout)
	defer cancel()
	x := &session{Suite: s, ctx: ctx}
	x.next()
	defer func() {
		v := recover()
		switch v := v.(type) {
		case nil:
		case failure:
			result.Err = v.err
		case skipped:
			result.Skipped = string(v)
		default:
			panic(v)
		}
	}()
	c.test(x)
	return result
}

// skips returns why a case cannot run, or what it needs to; empty if it can.
func (s *Suite) skips(c Case) string {
	hooks := s.target.Hooks
	if o := s.target.Operation; o != nil {
		if !c.operation {
			return "needs a probe"
		}
		if c.given != nil {
			if missing := c.given(o); missing != "" {
				return "needs " + missing
			}
		}
	}
	switch {
	case c.tx && !s.capabilities.Transactional:
		return "is about transactions"
	case c.raw && s.capabilities.Canonical:
		return "is about bodies compared as bytes"
	case c.required && s.target.OptionalKey:
		return "is about services that require a key"
	case c.optional && !s.target.OptionalKey:
		return "is about services with optional keys (Target.OptionalKey, --optional-key)"
	case c.two && len(s.target.URLs) < 2:
		return "needs the URLs of two processes"
	case c.kill && hooks.Kill == nil:
		return "needs Hooks.Kill and Start (--kill-command, --start-command)"
	case c.freeze && hooks.Freeze == nil:
		return "needs Hooks.Freeze and Thaw (--freeze-command, --thaw-command)"
	case c.expire && hooks.Expire == nil:
		return "needs Hooks.Expire (--expire-command)"
	case c.purge && hooks.Purge == nil:
		return "needs Hooks.Purge (--purge-command)"
	}
	return ""
}

func (s *Suite) get(ctx context.Context, address string, value any) error {
	status, body, err := s.fetch(ctx, address, nil)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("%s: answered with %d: %s", redacted(address), status, strings.TrimSpace(string(body)))
	}
	return json.Unmarshal(body, value)
}

// fetch sends a GET request with the target's headers, and others in place of them.
func (s *Suite) fetch(ctx context.Context, address string, header http.Header) (status int, body []byte, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return 0, nil, err
	}
	maps.Copy(request.Header, s.target.Header)
	maps.Copy(request.Header, header)
	response, err := s.http.Do(request)
	if err != nil {
		return 0, nil, err
	}
	body, err = io.ReadAll(response.Body)
	return response.StatusCode, body, errors.Join(err, response.Body.Close())
}

// redacted returns an address without its password.
func redacted(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return "the URL"
	}
	return u.Redacted()
}
