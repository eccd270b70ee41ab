package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/examples/shop"
	"github.com/oncemill/oncemill/idempotency/client"
)

const (
	customersAtOnce = 16 // customers that order at the same time

	// repeatEvery is for impatient customers: one order in repeatEvery is posted again
	// although it was answered.
	repeatEvery = 40
)

// customers post orders like real ones: many at a time, each sending the next order after the
// last was answered, and repeating unanswered requests.
type customers struct {
	http    http.Client
	address atomic.Pointer[string] // of the API; changes with its restarts
	taken   atomic.Int64           // orders answered with success
	asked   atomic.Int64           // answers waited for
	sent    atomic.Int64           // requests sent
}

func newCustomers() (*customers, error) {
	c := &customers{}
	base := &http.Transport{MaxIdleConnsPerHost: customersAtOnce, ResponseHeaderTimeout: 10 * time.Second}
	var err error
	c.http.Transport, err = client.New(redirect{c, base}, client.Config{Attempts: 100, Pause: 50 * time.Millisecond})
	return c, err
}

// redirect counts requests and sends each to the current address of the API.
type redirect struct {
	*customers
	base http.RoundTripper
}

func (r redirect) RoundTrip(request *http.Request) (*http.Response, error) {
	r.sent.Add(1)
	request = request.Clone(request.Context())
	request.URL.Host = *r.address.Load()
	return r.base.RoundTrip(request)
}

// repeated returns how many requests were sent again.
func (c *customers) repeated() int64 { return c.sent.Load() - c.asked.Load() }

func (c *customers) post(ctx context.Context, orders []shop.Order) error {
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
				if err := c.order(ctx, order, n%repeatEvery == 0); err != nil {
					return fmt.Errorf("order %s: %w", order.ID, err)
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// order posts an order until it is accepted. Its id, and so the key of the request, was chosen
// before the first attempt. A repeated request gets the first answer.
func (c *customers) order(ctx context.Context, order shop.Order, again bool) error {
	body, err := json.Marshal(order)
	if err != nil {
		return err
	}
	first, err := c.send(ctx, order.ID, body)
	if err != nil {
		return err
	}
	c.taken.Add(1)
	if !again {
		return nil
	}
	second, err := c.send(ctx, order.ID, body)
	if err != nil {
		return err
	}
	if second.status != first.status || second.body != first.body || !second.replayed {
		return fmt.Errorf("repeated and answered with %+v, before with %+v", second, first)
	}
	return nil
}

type answer struct {
	status   int
	body     string
	replayed bool
}

func (c *customers) send(ctx context.Context, key string, body []byte) (answer, error) {
	c.asked.Add(1)
	for {
		request, err := http.NewRequestWithContext(client.WithKey(ctx, key), http.MethodPost, "http://api/orders", bytes.NewReader(body))
		if err != nil {
			return answer{}, err
		}
		request.Header.Set("Content-Type", "application/json")
		got, err := c.try(request)
		switch {
		case ctx.Err() != nil:
			return answer{}, ctx.Err()
		case err != nil || got.status >= 500 || got.status == http.StatusConflict: // another hundred attempts
		case got.status >= 300:
			return answer{}, fmt.Errorf("answered with %+v", got)
		default:
			return got, nil
		}
	}
}

func (c *customers) try(request *http.Request) (answer, error) {
	response, err := c.http.Do(request)
	if err != nil {
		return answer{}, err
	}
	body, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, string(body), client.Replayed(response)}, errors.Join(err, response.Body.Close())
}
