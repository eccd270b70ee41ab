package verify

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/oncemill/oncemill/cmd/oncemill/internal/verify/check"
	"github.com/oncemill/oncemill/internal/sleep"
)

// customers send the requests: some in several copies at once, each until it is answered, and
// some once more afterwards.
type customers struct {
	services []*process
	seed     uint64
	rate     float64 // requests a second
	http     http.Client

	mu       sync.Mutex
	requests []*check.Request
	open     int // requests that are not done
	answers  int
	atOnce   int // requests of which several copies were sent at once
}

// answerTimeout is how long a copy waits for its answer before it is sent again.
const answerTimeout = 8 * time.Second

// run begins requests until open ends, and returns when all are answered or ctx ends.
func (c *customers) run(ctx, open context.Context) {
	workers := 8 + int(c.rate/10)
	c.http = http.Client{Timeout: answerTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: 2 * workers}}
	defer c.http.CloseIdleConnections()
	numbers := make(chan uint64)
	var group sync.WaitGroup
	for range workers {
		group.Go(func() {
			for n := range numbers {
				c.serve(ctx, n)
			}
		})
	}
	ticker := time.NewTicker(time.Duration(float64(time.Second) / c.rate))
	defer ticker.Stop()
	for n := uint64(1); ; n++ {
		select {
		case <-ticker.C:
			numbers <- n
			continue
		case <-open.Done():
		}
		break
	}
	close(numbers)
	group.Wait()
}

// serve sends one request.
func (c *customers) serve(ctx context.Context, n uint64) {
	r := rand.New(rand.NewPCG(c.seed, n)) //nolint:gosec // not a secret
	key := fmt.Sprintf("request-%d", n)
	o := order{MessageID: fmt.Sprintf("order-%d", n), Account: account(r), Kind: kind(r), Payload: payload(r)}
	request := &check.Request{Key: key, MessageID: o.MessageID, RollsBack: o.Kind == kindRollBack, Poison: o.Kind == kindPoison}
	copies, again := 1, chance(r, 0.1)
	if chance(r, 0.2) {
		copies += 1 + r.IntN(2)
	}
	c.mu.Lock()
	c.requests = append(c.requests, request)
	c.open++
	if copies > 1 {
		c.atOnce++
	}
	c.mu.Unlock()
	body, err := json.Marshal(o)
	if err != nil {
		panic(err) // strings, numbers and bytes
	}
	send := func(copies int) {
		var group sync.WaitGroup
		for range copies {
			r := rand.New(rand.NewPCG(r.Uint64(), n)) //nolint:gosec // not a secret
			group.Go(func() { c.insist(ctx, r, request, body) })
		}
		group.Wait()
	}
	send(copies)
	if again {
		send(1)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
}

// insist sends a copy of a request until it has a final answer.
func (c *customers) insist(ctx context.Context, r *rand.Rand, request *check.Request, body []byte) {
	for {
		answer, rolledBack, err := c.send(ctx, c.services[r.IntN(len(c.services))].at(), request.Key, body)
		if err == nil && rolledBack {
			return
		}
		if err == nil && final(answer.Status) {
			c.mu.Lock()
			defer c.mu.Unlock()
			request.Answers = append(request.Answers, answer)
			c.answers++
			return
		}
		if !sleep.For(ctx, time.Duration(10+r.IntN(200))*time.Millisecond) {
			c.mu.Lock()
			defer c.mu.Unlock()
			request.Open++
			return
		}
	}
}

// final reports whether an answer does not ask for a retry.
func final(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return status < 500
}

func (c *customers) send(ctx context.Context, address, key string, body []byte) (answer check.Answer, rolledBackNow bool, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/orders", bytes.NewReader(body))
	if err != nil {
		return answer, false, err
	}
	request.Header.Set("Idempotency-Key", key)
	response, err := c.http.Do(request)
	if err != nil {
		return answer, false, err
	}
	defer response.Body.Close() //nolint:errcheck // it was read to its end
	text, err := io.ReadAll(response.Body)
	return check.Answer{Status: response.StatusCode, Body: string(text)}, response.Header.Get(rolledBack) != "", err
}

func chance(r *rand.Rand, p float64) bool { return r.Float64() < p }

// account draws an account. A few have most of the traffic.
func account(r *rand.Rand) int {
	if chance(r, 0.3) {
		return r.IntN(3)
	}
	return r.IntN(accounts)
}

func kind(r *rand.Rand) string {
	switch p := r.Float64(); {
	case p < 0.05:
		return kindRollBack
	case p < 0.07:
		return kindFlaky
	case p < 0.08:
		return kindPoison
	}
	return kindPlain
}

// payload draws binary content: mostly small, sometimes empty, rarely 64 KiB.
func payload(r *rand.Rand) []byte {
	size := r.IntN(1024)
	switch p := r.Float64(); {
	case p < 0.02:
		size = 0
	case p < 0.025:
		size = 64 << 10
	}
	content := make([]byte, size)
	for i := range content {
		content[i] = byte(r.Uint32())
	}
	return content
}

// progress is how far the customers have come.
func (c *customers) progress() (began, open, answers int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.requests), c.open, c.answers
}
