package main

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

	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/crucible/work"
)

// customers send requests with idempotency keys: several copies at once, again until they are
// answered, and sometimes once more afterwards.
type customers struct {
	addresses []string
	history   *history.Writer
	seed      uint64
	http      http.Client
}

const (
	customersAtOnce = 6

	// longestWait is how long a request is repeated. No fault lasts for half of it.
	longestWait = time.Minute
)

// run sends requests while the bank is open, and then waits for the answers to those that have
// begun.
func (c *customers) run(ctx, open context.Context) error {
	c.http = http.Client{Timeout: 8 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 2 * customersAtOnce}}
	defer c.http.CloseIdleConnections()
	var group sync.WaitGroup
	errs := make(chan error, customersAtOnce)
	for n := range customersAtOnce {
		group.Go(func() {
			r := rand.New(rand.NewPCG(c.seed, uint64(100+n)))
			for i := 0; open.Err() == nil; i++ {
				if err := c.serve(ctx, r, fmt.Sprintf("key-%d-%d-%d", c.seed, n, i)); err != nil {
					errs <- err
					return
				}
				select {
				case <-time.After(time.Duration(r.Int64N(int64(400 * time.Millisecond)))):
				case <-open.Done():
				}
			}
		})
	}
	group.Wait()
	close(errs)
	return <-errs
}

// serve is one customer's wish: copies of a request, each until it is answered.
func (c *customers) serve(ctx context.Context, r *rand.Rand, key string) error {
	body, err := json.Marshal(work.Order{Seed: r.Uint64()})
	if err != nil {
		return err
	}
	copies, again, other := 1+r.IntN(3), r.Float64() < 0.3, r.Float64() < 0.05
	errs := make([]error, copies)
	var group sync.WaitGroup
	for i := range copies {
		order := rand.New(rand.NewPCG(r.Uint64(), 0))
		group.Go(func() { errs[i] = c.insist(ctx, order, key, body, false) })
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	if again {
		if err := c.insist(ctx, r, key, body, false); err != nil {
			return err
		}
	}
	if !other {
		return nil
	}
	if body, err = json.Marshal(work.Order{Seed: r.Uint64()}); err != nil {
		return err
	}
	return c.insist(ctx, r, key, body, true)
}

// insist repeats a request until it has a final answer. other says that the key was used for
// another request before.
func (c *customers) insist(ctx context.Context, r *rand.Rand, key string, body []byte, other bool) error {
	for begin := time.Now(); time.Since(begin) < longestWait; {
		status, answer, err := c.send(ctx, c.addresses[r.IntN(len(c.addresses))], key, body)
		if err == nil && status < 500 && status != http.StatusConflict {
			return c.history.Add(history.Record{Event: history.EventAnswer, Answer: &history.Answer{
				Key: key, Status: status, Sum: history.SumOfPayload(answer), Other: other,
			}})
		}
		select {
		case <-time.After(time.Duration(r.Int64N(int64(300 * time.Millisecond)))):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return c.history.Add(history.Record{Event: history.EventAnswer, Answer: &history.Answer{Key: key, Other: other}})
}

func (c *customers) send(ctx context.Context, address, key string, body []byte) (status int, answer []byte, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/transfers", bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Idempotency-Key", key)
	request.Header.Set("Content-Type", "application/json")
	response, err := c.http.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close() //nolint:errcheck // it was read to its end
	answer, err = io.ReadAll(response.Body)
	return response.StatusCode, answer, err
}
