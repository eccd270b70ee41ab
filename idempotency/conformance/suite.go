package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Target is the service to test.
type Target struct {
	// URLs are those of the service's processes, at least one, without a trailing slash.
	URLs []string

	// Plain is a real operation of a service that has no Probe. Default: none; the service
	// has a Probe.
	Plain *Plain

	// Processes are those behind URLs, at least two, in the same order. Default: none; cases
	// in which a process is killed or stopped are skipped.
	Processes []Process

	// Header is sent with every request, for example Authorization.
	Header http.Header

	// OptionalKey means that the service accepts requests without a key.
	OptionalKey bool

	// KeyHeader is the name of the key's header. Default: "Idempotency-Key".
	KeyHeader string

	// Client sends the requests; its Transport must not retry by itself. Default: a client
	// of the suite's own.
	Client *http.Client
}

// Plain is an operation of a service without a [Probe].
type Plain struct {
	Path        string // for example /orders
	ContentType string // default application/json
	Body        []byte // of a valid request
	Other       []byte // of another valid one; empty leaves out the cases that need it
}

// Result is the outcome of one case.
type Result struct {
	Name    string
	Err     error  // nil: passed
	Skipped string // why it does not apply, if so
	Took    time.Duration
}

// Case is one case of the suite.
type Case struct {
	Name string

	plain   bool // needs nothing but an operation
	other   bool // needs a second body of it
	tx      bool // only for transactional engines
	two     bool // needs two processes
	control bool // needs two processes that can be killed
	raw     bool // only where bodies are compared as bytes
	key     bool // only where a key is required
	test    func(x *session)
}

// Cases returns all cases, in order.
func Cases() []Case {
	var all []Case
	for _, group := range [][]Case{replayCases(), keyCases(), sameCases(), flightCases(), failureCases(), sizeCases(), effectCases(), processCases()} {
		all = append(all, group...)
	}
	return all
}

// caseTimeout ends a case that hangs.
const caseTimeout = 3 * time.Minute

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
	if n := len(target.Processes); n > 0 && (n < 2 || n != len(target.URLs)) {
		return nil, fmt.Errorf("conformance: %d processes for %d URLs; name each, and at least two", n, len(target.URLs))
	}
	for i, address := range target.URLs {
		if u, err := url.Parse(address); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return nil, fmt.Errorf("conformance: URL %d is not an http or https URL", i+1) // it may hold a password
		}
	}
	if target.KeyHeader == "" {
		target.KeyHeader = "Idempotency-Key"
	}
	s := &Suite{target: target, http: target.Client}
	if s.http == nil {
		s.http = &http.Client{
			Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true, ExpectContinueTimeout: 10 * time.Second},
			CheckRedirect: func(*http.Request, []*http.Request) error {
				return http.ErrUseLastResponse
			},
		}
	}
	if target.Plain != nil {
		return s, nil
	}
	if err := s.get(ctx, target.URLs[0]+"/capabilities", &s.capabilities); err != nil {
		return nil, fmt.Errorf("conformance: there is no probe at %s (name an operation with --path and --body instead): %w", redacted(target.URLs[0]), err)
	}
	return s, nil
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
	switch {
	case s.target.Plain != nil && !c.plain:
		result.Skipped = "needs a probe"
	case s.target.Plain != nil && c.other && len(s.target.Plain.Other) == 0:
		result.Skipped = "needs another body"
	case c.tx && !s.capabilities.Transactional:
		result.Skipped = "is about transactions"
	case c.raw && s.capabilities.Canonical:
		result.Skipped = "is about bodies compared as bytes"
	case c.key && s.target.OptionalKey:
		result.Skipped = "takes requests without a key"
	case c.two && len(s.target.URLs) < 2:
		result.Skipped = "needs two processes"
	case c.control && len(s.target.Processes) == 0:
		result.Skipped = "needs processes that can be killed"
	}
	if result.Skipped != "" {
		return result
	}
	ctx, cancel := context.WithTimeout(ctx, caseTimeout)
	defer cancel()
	x := &session{Suite: s, ctx: ctx, name: unique(), key: unique()}
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

func (s *Suite) get(ctx context.Context, address string, value any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return err
	}
	for name, values := range s.target.Header {
		request.Header[name] = values
	}
	response, err := s.http.Do(request)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(response.Body)
	if err := errors.Join(err, response.Body.Close()); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: answered with %d: %s", redacted(address), response.StatusCode, strings.TrimSpace(string(body)))
	}
	return json.Unmarshal(body, value)
}

// redacted returns an address without its password.
func redacted(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return "the URL"
	}
	return u.Redacted()
}
