package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/examples/shop"
	idempotency "github.com/oncemill/oncemill/idempotency/client"
)

const (
	customersAtOnce = 16 // customers that order at the same time

	// repeatEvery is for impatient customers: one order in so many is posted
	// again although it was answered.
	repeatEvery = 40
)

// client posts orders as shops see it in life: many customers at a time, each
// sending the next order after the last was answered, and repeating what was not.
type client struct {
	http    http.Client
	gate    gate
	address atomic.Pointer[string] // of the API; changes with its restarts
	taken   atomic.Int64           // orders answered with success
	retries atomic.Int64           // requests that were sent again
}

func newClient() *client {
	return &client{http: http.Client{
		Timeout:   10 * time.Second,
		Transport: &http.Transport{MaxIdleConnsPerHost: customersAtOnce},
	}}
}

func (c *client) post(ctx context.Context, orders []shop.Order) error {
	queues := make([][]shop.Order, customersAtOnce)
	for _, order := range orders {
		hash := fnv.New32a()
		_, _ = io.WriteString(hash, order.Customer) // hashes take everything
		queue := hash.Sum32() % customersAtOnce
		queues[queue] = append(queues[queue], order)
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, queue := range queues {
		group.Go(func() error {
			for n, order := range queue {
				if err := c.gate.pass(ctx); err != nil {
					return err
				}
				if err := c.order(ctx, order, n%repeatEvery == 0); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// order posts until the order is taken. Its id, and with it the key of the request,
// was chosen before the first try. Whoever repeats a request gets the first answer.
func (c *client) order(ctx context.Context, order shop.Order, again bool) error {
	body, err := json.Marshal(order)
	if err != nil {
		return fmt.Errorf("encode order %s: %w", order.ID, err)
	}
	first, err := c.untilTaken(ctx, order.ID, body)
	if err != nil {
		return fmt.Errorf("order %s: %w", order.ID, err)
	}
	c.taken.Add(1)
	if !again {
		return nil
	}
	second, err := c.untilTaken(ctx, order.ID, body)
	if err != nil {
		return fmt.Errorf("order %s, repeated: %w", order.ID, err)
	}
	if second.status != first.status || second.body != first.body || !second.replayed {
		return fmt.Errorf("order %s, repeated: answered with %d %q, replayed %t, and not with %d %q again",
			order.ID, second.status, second.body, second.replayed, first.status, first.body)
	}
	return nil
}

// answer is what the API said.
type answer struct {
	status   int
	body     string
	replayed bool
}

func (c *client) untilTaken(ctx context.Context, key string, body []byte) (got answer, err error) {
	pause := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(20*time.Millisecond),
		backoff.WithMaxInterval(500*time.Millisecond),
		backoff.WithMaxElapsedTime(2*time.Minute),
	)
	err = backoff.RetryNotify(func() error {
		got, err = c.try(ctx, key, body)
		return err
	}, backoff.WithContext(pause, ctx), func(error, time.Duration) { c.retries.Add(1) })
	return got, err
}

func (c *client) try(ctx context.Context, key string, body []byte) (answer, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, *c.address.Load()+"/orders", bytes.NewReader(body))
	if err != nil {
		return answer{}, backoff.Permanent(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", key)
	response, err := c.http.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return answer{}, err
	case response.StatusCode < 300:
		return answer{response.StatusCode, string(text), idempotency.Replayed(response)}, nil
	case response.StatusCode < 500 && response.StatusCode != http.StatusConflict: // that is a copy in progress
		return answer{}, backoff.Permanent(fmt.Errorf("refused with %d: %s", response.StatusCode, text))
	}
	return answer{}, fmt.Errorf("answered with %d: %s", response.StatusCode, text)
}
