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

// order posts until the order is taken. Its id was chosen before the first try.
func (c *client) order(ctx context.Context, order shop.Order, again bool) error {
	body, err := json.Marshal(order)
	if err != nil {
		return fmt.Errorf("encode order %s: %w", order.ID, err)
	}
	if _, err := c.untilTaken(ctx, body); err != nil {
		return fmt.Errorf("order %s: %w", order.ID, err)
	}
	c.taken.Add(1)
	if !again {
		return nil
	}
	status, err := c.untilTaken(ctx, body)
	if err != nil {
		return fmt.Errorf("order %s, repeated: %w", order.ID, err)
	}
	if status != http.StatusOK {
		return fmt.Errorf("order %s, repeated: answered with %d, as if it were new", order.ID, status)
	}
	return nil
}

func (c *client) untilTaken(ctx context.Context, body []byte) (status int, err error) {
	pause := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(20*time.Millisecond),
		backoff.WithMaxInterval(500*time.Millisecond),
		backoff.WithMaxElapsedTime(2*time.Minute),
	)
	err = backoff.RetryNotify(func() error {
		status, err = c.try(ctx, body)
		return err
	}, backoff.WithContext(pause, ctx), func(error, time.Duration) { c.retries.Add(1) })
	return status, err
}

func (c *client) try(ctx context.Context, body []byte) (int, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, *c.address.Load()+"/orders", bytes.NewReader(body))
	if err != nil {
		return 0, backoff.Permanent(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := c.http.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return 0, err
	case response.StatusCode < 300:
		return response.StatusCode, nil
	case response.StatusCode < 500:
		return 0, backoff.Permanent(fmt.Errorf("refused with %d: %s", response.StatusCode, text))
	}
	return 0, fmt.Errorf("answered with %d: %s", response.StatusCode, text)
}
