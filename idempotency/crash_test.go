package idempotency_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/internal/testserver"
)

// points of a request at which a process may die or be paused.
var points = []string{
	"after claim", "inside the handler", "after effect", "before commit", "after commit", "before answer", "after answer",
}

// request is one logical request of a test. Its plan is no part of what makes
// copies the same, so each copy asks for another body: those who end with the same
// bytes have got the answer of one run.
type request struct{ name, key string }

func newRequest() request { return request{name: rand.Text(), key: rand.Text()} }

type answer struct {
	status int
	body   string
}

// send sends a copy.
func (q request) send(ctx context.Context, client *http.Client, url, body string) (answer, error) {
	plan, err := json.Marshal(conformance.Plan{Name: q.name, Effects: 1, Messages: 1, Body: []byte(body)})
	if err != nil {
		return answer{}, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/probe/orders", bytes.NewReader([]byte(`{"order": 1}`)))
	if err != nil {
		return answer{}, err
	}
	r.Header.Set("Idempotency-Key", q.key)
	r.Header.Set("Probe-Plan", string(plan))
	response, err := client.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, string(text)}, err
}

// settle sends until a handler answers. Any 2xx counts as its answer. It pauses longer each
// time, as clients should: hundreds of them keep a slow machine busy.
func (q request) settle(ctx context.Context, client *http.Client, url func() string, body string) (answer, error) {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		a, err := q.send(ctx, client, url(), body)
		switch {
		case err == nil && a.status < 300:
			return a, nil
		case err == nil && a.status != http.StatusConflict && a.status != http.StatusServiceUnavailable:
			return a, fmt.Errorf("answered with %d: %s", a.status, a.body)
		case ctx.Err() != nil:
			return a, errors.Join(err, ctx.Err(), fmt.Errorf("last answer %d: %s", a.status, a.body))
		}
		testserver.Pause(ctx, pause)
	}
}

func (q request) expectOnce(t *testing.T, p *testDB) {
	t.Helper()
	if n := p.count(t, `select count(*) from effects where name = $1`, q.name); n != 1 {
		t.Errorf("%d effects", n)
	}
	if n := p.count(t, `select count(*) from {{outbox}} where topic = $1`, q.name); n != 1 {
		t.Errorf("%d messages", n)
	}
}

const shortTimeout, shortLease = time.Second, 1200 * time.Millisecond

func (p *testDB) settings() serveSettings {
	return serveSettings{Driver: p.driver, DSN: p.dsn, Database: p.cfg, Transactional: true, Timeout: shortTimeout, Lease: shortLease}
}

// shapes are the group sizes that tests use.
var shapes = map[string]int{"alone": 1, "in groups": 50}

// In a short run each point is met on one database alone, and on the other in groups.
func TestTxMiddleware_KilledAtAnyPointHasOneEffectAndOneAnswer(t *testing.T) {
	t.Parallel()
	for shape, size := range shapes {
		t.Run(shape, func(t *testing.T) {
			onEachDB(t, func(t *testing.T, p *testDB) {
				for i, point := range points {
					first := (size > 1) == (p.cfg.Dialect == oncemill.SQLite)
					if !testserver.Long() && first != (i%2 == 0) {
						continue
					}
					t.Run(point, func(t *testing.T) {
						t.Parallel()
						expectOnceThoughKilled(t, p, size, point)
					})
				}
			})
		})
	}
}

// expectOnceThoughKilled sends copies of requests, of one where none share a
// transaction, and kills the process at the point.
func expectOnceThoughKilled(t *testing.T, p *testDB, groupSize int, point string) {
	t.Helper()
	settings := p.settings()
	settings.GroupSize = groupSize
	var mu sync.Mutex
	s := startServer(t, settings)
	current := s
	url := func() string {
		mu.Lock()
		defer mu.Unlock()
		return current.url
	}
	s.arm(syscall.SIGKILL, point)
	ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait)
	defer cancel()
	const copies = 8
	requests := make([]request, min(groupSize, 6))
	answers := make([][copies]answer, len(requests))
	var sending sync.WaitGroup
	for r := range requests {
		requests[r] = newRequest()
		for i := range copies {
			// Each with Go's own Transport, which by itself repeats a request
			// that carries a key when a connection that was used before breaks.
			client := &http.Client{Transport: &http.Transport{}}
			sending.Go(func() {
				defer client.CloseIdleConnections()
				a, err := requests[r].settle(ctx, client, url, fmt.Sprintf("answer to copy %d", i))
				if err != nil {
					t.Errorf("copy %d of %d: %v", i, r, err)
				}
				answers[r][i] = a
			})
		}
	}
	select {
	case <-s.ended:
	case <-ctx.Done():
		t.Error("the process did not come to the point")
	}
	restarted := startServer(t, settings)
	mu.Lock()
	current = restarted
	mu.Unlock()
	sending.Wait()
	for r, q := range requests {
		for i, a := range answers[r] {
			if a != answers[r][0] || !strings.HasPrefix(a.body, "answer to copy") {
				t.Errorf("copy %d of %d got %v, copy 0 %v", i, r, a, answers[r][0])
			}
		}
		q.expectOnce(t, p)
	}
}

// The owner is paused past its lease, another process takes the key over and answers, and
// the owner resumes: its effects are rolled back, and its client gets the other's answer.
func TestTxMiddleware_AStaleOwnerIsRolledBack(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		for shape, size := range shapes {
			t.Run(isolation.String()+", "+shape, func(t *testing.T) {
				t.Parallel()
				settings := p.settings()
				settings.Isolation, settings.GroupSize = isolation, size
				stale, taker := startServer(t, settings), startServer(t, settings)
				for _, point := range []string{"after claim", "inside the handler", "after effect", "before commit"} {
					t.Run(point, func(t *testing.T) {
						stale.arm(syscall.SIGSTOP, point)
						expectTakeover(t, p, stale, taker)
					})
				}
			})
		}
	}
}

// A process that holds SQLite's write lock cannot be taken over from; here it does not.
func TestTxMiddleware_AStaleOwnerIsRolledBackOnSQLite(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	stale, taker := startServer(t, p.settings()), startServer(t, p.settings())
	stale.arm(syscall.SIGSTOP, "after claim")
	expectTakeover(t, p, stale, taker)
}

func expectTakeover(t *testing.T, p *testDB, stale, taker *server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	q := newRequest()
	var late answer
	var lateErr error
	var sending sync.WaitGroup
	var stopped atomic.Bool
	sending.Go(func() {
		for { // a busy machine may use up its time before it comes to the point
			late, lateErr = q.send(ctx, client, stale.url, "of the stale owner")
			if stopped.Load() || lateErr != nil || late.status != http.StatusServiceUnavailable && late.status != http.StatusConflict {
				return
			}
		}
	})
	stale.awaitStopped()
	stopped.Store(true)
	a, err := q.settle(ctx, client, func() string { return taker.url }, "of the taker")
	if err != nil || a.body != "of the taker" {
		t.Errorf("%v %v", a, err)
	}
	q.expectOnce(t, p)
	stale.signal(syscall.SIGCONT)
	sending.Wait()
	// By then its time is up; what it must not do is to answer for itself.
	if lateErr != nil || late.body != "of the taker" && late.status != http.StatusServiceUnavailable {
		t.Errorf("the stale owner answered %v %v", late, lateErr)
	}
	again, err := q.settle(ctx, client, func() string { return stale.url }, "again")
	if err != nil || again != a {
		t.Errorf("then %v %v", again, err)
	}
	q.expectOnce(t, p)
}
