package conformance_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/internal/testserver"
)

// service is idempotent HTTP in memory, written without package idempotency, so that a
// mistake of the library cannot hide one of the suite. It is what survives its processes:
// keys and effects. It is sound, but for its bug.
type service struct {
	bug      bug
	optional bool // keys, for orders
	busy     bool // it cannot register a request when it comes first
	down     bool // nor later

	mu      sync.Mutex
	records map[string]*record
	ids     []string // of records, the oldest first
	effects map[string]conformance.Counts
	placed  map[string]int // how often an order was placed, by id
	refused map[string]bool
	downs   int // requests that came while it was down
}

// record is what is known of a key.
type record struct {
	id, fingerprint, token, caller string

	owner   *process // that runs it
	since   time.Time
	ended   chan struct{} // closed when it does not run any more
	answer  *answer       // nil: it runs
	ran     bool          // its answer was too large to be replayed
	expired bool
}

var limits = conformance.Capabilities{Transactional: true, Timeout: 3 * time.Second, MaxBody: 2 << 20, MaxResponse: 200_000}

func newService(b bug) *service {
	return &service{bug: b, records: map[string]*record{}, effects: map[string]conformance.Counts{}, placed: map[string]int{}, refused: map[string]bool{}}
}

// keyed is the middleware.
func (p *process) keyed(optional bool, next func(*attempt)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "https://shop.example")
		w.Header().Set("Vary", "Origin")
		values := r.Header["Idempotency-Key"]
		if p.bug == takesTheFirstKey && len(values) > 1 {
			values = values[:1]
		}
		safe := r.Method == http.MethodGet || r.Method == http.MethodHead
		if safe && (p.bug != storesReads || len(values) == 0) || len(values) == 0 && optional {
			p.bare(w, r, next)
			return
		}
		key, ok := p.parse(values)
		switch {
		case len(values) == 0:
			problem(w, http.StatusBadRequest, "key-missing", "")
			return
		case !ok && p.bug == echoesKeys:
			problem(w, http.StatusBadRequest, "key-invalid", "/"+strings.Trim(values[0], `"`))
			return
		case !ok:
			problem(w, http.StatusBadRequest, "key-invalid", "")
			return
		}
		body, ok := read(w, r)
		if !ok {
			return
		}
		fingerprint, err := p.fingerprint(r, body)
		if err != nil {
			problem(w, http.StatusUnsupportedMediaType, "unsupported-body", "")
			return
		}
		tenant, user := caller(r)
		id := p.id(tenant, user, key)
		if p.refuse(id) {
			problem(w, http.StatusServiceUnavailable, "store-unavailable", "")
			return
		}
		rec, mine := p.claim(&record{id: id, fingerprint: fingerprint, caller: fmt.Sprintf("%q %q", tenant, user)})
		if p.bug == waitsForever && !mine {
			select {
			case <-rec.ended:
			case <-r.Context().Done():
				return
			}
		}
		if mine {
			p.run(w, r, rec, body, next)
			return
		}
		p.known(w, r, rec, fingerprint)
	}
}

// refuse reports whether the service is too busy to register a request.
func (p *process) refuse(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		p.downs++
		return true
	}
	if !p.busy || p.refused[id] {
		return false
	}
	p.refused[id] = true
	return true
}

// bare runs a request without a key.
func (p *process) bare(w http.ResponseWriter, r *http.Request, next func(*attempt)) {
	body, ok := read(w, r)
	if !ok {
		return
	}
	a := &attempt{process: p, r: r, ctx: r.Context(), body: body, recorder: recorder{out: w, header: w.Header().Clone()}}
	next(a)
	p.mu.Lock()
	a.commit()
	p.mu.Unlock()
	a.result().send(w)
}

// known answers a request whose key is known.
func (p *process) known(w http.ResponseWriter, r *http.Request, rec *record, fingerprint string) {
	p.mu.Lock()
	answer, ran := rec.answer, rec.ran
	p.mu.Unlock()
	differs := rec.fingerprint != fingerprint
	if p.bug == comparesWhenEnded && answer == nil {
		differs = false
	}
	switch {
	case differs:
		problem(w, http.StatusUnprocessableEntity, "key-reused", "")
	case answer == nil:
		if p.bug != saysNotWhen {
			w.Header().Set("Retry-After", "1")
		}
		problem(w, http.StatusConflict, "in-progress", "/status/"+rec.token)
	case ran:
		w.Header().Set("Location", answer.header.Get("Location"))
		problem(w, http.StatusConflict, "response-not-stored", "")
	default:
		p.replay(w, r, answer)
	}
}

// claim returns the record of a key, and whether the caller has to run it.
func (p *process) claim(fresh *record) (rec *record, mine bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fresh.owner, fresh.since, fresh.ended = p, time.Now(), make(chan struct{})
	fresh.token = token(fresh.id)
	rec = p.records[fresh.id]
	if rec != nil && !p.free(rec) {
		return rec, false
	}
	if p.bug == claimsNothing {
		return fresh, true
	}
	if p.bug == checksThenActs {
		p.mu.Unlock()
		testserver.Pause(context.Background(), time.Millisecond) // as a database takes to answer
		p.mu.Lock()
	}
	p.put(fresh)
	return fresh, true
}

func (p *process) put(rec *record) {
	p.records[rec.id] = rec
	p.ids = append(p.ids, rec.id)
	if p.bug == evicts && len(p.ids) > 100 {
		delete(p.records, p.ids[0])
		p.ids = p.ids[1:]
	}
}

// lease is how long a process keeps its keys when it stands still.
const lease = 500 * time.Millisecond

// free reports whether the key of a record may run again. The caller holds the lock.
func (p *process) free(rec *record) bool {
	switch {
	case rec.answer == nil:
		dead := rec.owner.life.Err() != nil && p.bug != keepsKeysOfTheDead
		late := rec.owner.frozen != nil && time.Since(rec.owner.frozenAt) > lease
		return dead || late || p.bug == hasShortLeases && time.Since(rec.since) > time.Second
	case p.bug == forgets:
		return time.Since(rec.since) > time.Second
	}
	return rec.expired && p.bug != neverExpires
}

// run runs a request, and answers it when it has ended or its time is up.
func (p *process) run(w http.ResponseWriter, r *http.Request, rec *record, body []byte, next func(*attempt)) {
	ctx, cancel := context.WithTimeout(p.life, limits.Timeout)
	if p.bug == stopsWithItsClient {
		ctx, cancel = context.WithTimeout(r.Context(), limits.Timeout)
	}
	a := &attempt{process: p, r: r, ctx: ctx, body: body, recorder: recorder{out: w, header: w.Header().Clone()}}
	done := make(chan struct{})
	go func() { // it goes on when its time is up
		defer close(done)
		defer cancel()
		a.run(next)
		p.stand()
		p.end(rec, a)
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) && p.giveUp(a) || p.stale(a) {
		w.Header().Set("Retry-After", "1")
		problem(w, http.StatusServiceUnavailable, "execution-timeout", "")
		return
	}
	<-done
	if a.panicked {
		panic(http.ErrAbortHandler)
	}
	answer := a.result()
	if p.bug == marksFirsts {
		answer.header.Set("Idempotency-Replayed", "true")
	}
	answer.send(w)
}

// giveUp gives up an attempt, unless it has had its effect.
func (p *process) giveUp(a *attempt) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	a.given = !a.ended || a.status >= http.StatusInternalServerError
	return a.given
}

// stale reports whether another process has had the key when an attempt ended.
func (p *process) stale(a *attempt) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return a.stale
}

// end stores what an attempt has done, or gives the key back.
func (p *process) end(rec *record, a *attempt) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a.ended = true
	close(rec.ended)
	if p.life.Err() != nil {
		return // the process is dead
	}
	fenced := p.bug != finishesLate && p.bug != checksThenActs && p.bug != hasShortLeases && p.bug != claimsNothing
	if fenced && p.records[rec.id] != rec {
		a.stale = true // somebody else has the key
		return
	}
	if a.panicked && p.bug == keepsKeysOfPanics {
		return
	}
	if a.given || a.panicked || !p.stores(a.status) {
		if p.bug == keepsEffectsOfFailures {
			a.commit()
		}
		delete(p.records, rec.id)
		return
	}
	if a.status < http.StatusBadRequest {
		a.commit()
	}
	rec.answer = p.kept(a.result())
	rec.ran = len(rec.answer.body) > limits.MaxResponse && p.bug != storesAnySize
	if p.bug == claimsNothing {
		p.put(rec)
	}
}

// stores reports whether answers with this status are stored.
func (p *process) stores(status int) bool {
	switch status {
	case http.StatusUnauthorized:
		return p.bug == storesUnauthorized
	case http.StatusNotFound:
		return p.bug != forgetsRefusals
	case http.StatusBadRequest, http.StatusConflict, http.StatusGone, http.StatusPreconditionFailed, http.StatusUnprocessableEntity:
		return true
	}
	return status < http.StatusBadRequest || status >= http.StatusInternalServerError && p.bug == storesFailures
}

// id is a key with its caller.
func (p *process) id(tenant, user, key string) string {
	switch p.bug {
	case cutsKeys:
		key = key[:min(len(key), 100)]
	case foldsKeys:
		key = strings.ToLower(key)
	case mixesTenants:
		tenant = ""
	case mixesUsers:
		user = ""
	case joinsCallers:
		tenant, user = tenant+user, ""
	case keepsKeysToProcesses:
		tenant += p.address
	}
	return fmt.Sprintf("%q %q %q", tenant, user, key)
}

var (
	bareKey    = regexp.MustCompile(`^[\x21-\x7e]+$`)
	quotedKey  = regexp.MustCompile(`^"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"(.*)$`)
	parameters = regexp.MustCompile(`^(?:; *[a-z*][a-z0-9_.*-]*(?:=(?:"[^"]*"|[^ ";,]+))?)*$`)
)

// parse returns the key of a header.
func (p *process) parse(values []string) (key string, ok bool) {
	if len(values) != 1 {
		return "", false
	}
	key = strings.Trim(values[0], " \t")
	if p.bug == takesQuotesAsPart {
		return key, key != "" && key != `""` && len(key) <= 255
	}
	if m := quotedKey.FindStringSubmatch(key); m != nil {
		key = regexp.MustCompile(`\\(.)`).ReplaceAllString(m[1], "$1")
		ok = parameters.MatchString(m[2])
	} else {
		ok = bareKey.MatchString(key) && !strings.ContainsAny(key, `,"\`)
	}
	return key, ok && key != "" && (len(key) <= 255 || p.bug == takesLongKeys)
}

// caller returns who sends a request: by headers, query or path.
func caller(r *http.Request) (tenant, user string) {
	tenant = cmp.Or(r.Header.Get("X-Tenant"), r.URL.Query().Get("tenant"), r.PathValue("tenant"), "public")
	return tenant, r.Header.Get("X-User")
}

// read reads a body, or refuses it.
func read(w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	if r.ContentLength > limits.MaxBody {
		problem(w, http.StatusRequestEntityTooLarge, "body-too-large", "")
		return nil, false
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, limits.MaxBody+1))
	switch {
	case err != nil:
		problem(w, http.StatusBadRequest, "body-broken", "")
		return nil, false
	case int64(len(body)) > limits.MaxBody:
		problem(w, http.StatusRequestEntityTooLarge, "body-too-large", "")
		return nil, false
	}
	return body, true
}

func problem(w http.ResponseWriter, status int, kind, statusURL string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Link", `<https://shop.example/problems>; rel="describedby"`)
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{ // a client that is gone needs no answer
		"type": "https://shop.example/problems#" + kind, "title": kind, "status": strconv.Itoa(status), "status_url": statusURL,
	})
}
