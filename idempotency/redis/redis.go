// Package redis keeps completed idempotency records in Redis, so that replays do not reach
// the database:
//
//	cache, err := redis.New(client, redis.Config{})
//	engine, err := idempotency.New(store, idempotency.Config{
//		Scope:     scope,
//		Responses: idempotency.ResponseConfig{Cache: cache},
//	})
//
// A record is written after its commit and expires with it. Redis never grants the right
// to run: a request whose record is not in Redis goes to the store. So correctness does
// not depend on what Redis loses. An error, a flush, a failover that loses writes, or the loss of all
// data in the middle of a run only costs a query of the database.
//
// If the database itself loses commits (a restore, a failover to a standby that had not
// received them), Redis still answers for effects that are gone, until the records expire.
// Delete the keys with Config.Prefix before services use that database.
//
// The records contain responses. If Config.Responses.Encryption of the engine is set, they are
// encrypted and bound to key, caller and request. Otherwise, whatever can write to this
// Redis can forge replays.
package redis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
)

// Config configures a Cache. The zero value is right for most services.
type Config struct {
	// Prefix is the prefix of the keys. Default: "oncemill:idempotency:".
	Prefix string

	// Timeout bounds each command. If a command takes longer, the store is queried instead.
	// Default: 50 ms.
	Timeout time.Duration

	// Rest is how long Redis is not used after an error, so that an outage does not cost
	// each request a timeout. Default: 1 s. A longer one sends more replays to the store.
	Rest time.Duration

	// MaxResponse is the largest response in bytes that is kept. Default: 64 KiB.
	MaxResponse int

	// Logger receives errors. Default: slog.Default().
	Logger *slog.Logger
}

// Cache is an idempotency.Cache. It is safe for concurrent use, by any number of engines.
type Cache struct {
	client redis.Cmdable
	cfg    Config
	began  time.Time
	until  atomic.Int64 // when Redis is used again, in nanoseconds since began
}

var (
	_ idempotency.Cache        = (*Cache)(nil)
	_ idempotency.CacheRemover = (*Cache)(nil)
)

// New returns a cache. It does no I/O. All bad values of cfg are reported at once, each as
// an [*oncemill.ConfigError]. The caller keeps ownership of client.
func New(client redis.Cmdable, cfg Config) (*Cache, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "redis." + field, Value: value, Problem: problem})
	}
	if client == nil {
		bad("New client", "nil", "a client is needed")
	}
	if cfg.Prefix == "" {
		cfg.Prefix = "oncemill:idempotency:"
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 50 * time.Millisecond
	}
	if cfg.Timeout < 0 {
		bad("Config.Timeout", cfg.Timeout.String(), "must not be negative; 0 means 50ms")
	}
	if cfg.Rest == 0 {
		cfg.Rest = time.Second
	}
	if cfg.Rest < 0 {
		bad("Config.Rest", cfg.Rest.String(), "must not be negative; 0 means 1s")
	}
	if cfg.MaxResponse == 0 {
		cfg.MaxResponse = 64 << 10
	}
	if cfg.MaxResponse < 0 {
		bad("Config.MaxResponse", strconv.Itoa(cfg.MaxResponse), "must not be negative; 0 means 64 KiB")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Cache{client: client, cfg: cfg, began: time.Now()}, nil
}

// entry is the stored form of a record. It contains its id, so that an entry under a wrong
// key is detected.
type entry struct {
	ID          []byte `json:"id"`
	Caller      []byte `json:"caller"`
	Fingerprint []byte `json:"fingerprint"`
	Endpoint    string `json:"endpoint"`
	Status      int    `json:"status"`
	Response    []byte `json:"response"`
	Location    string `json:"location,omitempty"`
	ResourceID  string `json:"resource_id,omitempty"`
	Sum         uint32 `json:"sum"` // of the response: what is damaged is not replayed
}

func sum(response []byte) uint32 { return crc32.ChecksumIEEE(response) }

// Get implements idempotency.Cache.
func (c *Cache) Get(ctx context.Context, id idempotency.ID) (record idempotency.Record, ok bool) {
	if c.resting() {
		return record, false
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	text, err := c.client.Get(ctx, c.key(id)).Bytes()
	if errors.Is(err, redis.Nil) {
		return record, false
	}
	if err != nil {
		c.rest(ctx, "get", err)
		return record, false
	}
	var e entry
	if err := json.Unmarshal(text, &e); err != nil || len(e.Response) == 0 || e.Sum != sum(e.Response) ||
		copy(record.ID[:], e.ID) != len(record.ID) || record.ID != id ||
		copy(record.Caller[:], e.Caller) != len(record.Caller) ||
		copy(record.Fingerprint[:], e.Fingerprint) != len(record.Fingerprint) {
		return idempotency.Record{}, false // not ours, or damaged: the store knows
	}
	record.State, record.Endpoint, record.Status = idempotency.StateCompleted, e.Endpoint, e.Status
	record.Response, record.Location, record.ResourceID = e.Response, e.Location, e.ResourceID
	return record, true
}

// Put implements idempotency.Cache.
func (c *Cache) Put(ctx context.Context, r idempotency.Record) {
	if r.State != idempotency.StateCompleted || r.ExpiresIn < time.Second || len(r.Response) > c.cfg.MaxResponse || c.resting() {
		return
	}
	text, err := json.Marshal(entry{r.ID[:], r.Caller[:], r.Fingerprint[:], r.Endpoint, r.Status, r.Response, r.Location, r.ResourceID, sum(r.Response)})
	if err != nil {
		return // it is made of strings and bytes
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.Timeout)
	defer cancel()
	if err := c.client.Set(ctx, c.key(r.ID), text, r.ExpiresIn).Err(); err != nil {
		c.rest(ctx, "set", err)
	}
}

// Remove implements idempotency.CacheRemover. It also tries while Redis is not used after
// an error: what is not removed is replayed.
func (c *Cache) Remove(ctx context.Context, ids []idempotency.ID) error {
	const some = 500
	for part := range slices.Chunk(ids, some) {
		keys := make([]string, len(part))
		for i, id := range part {
			keys[i] = c.key(id)
		}
		if err := c.remove(ctx, keys); err != nil {
			return fmt.Errorf("redis: remove records: %w", err)
		}
	}
	return nil
}

// remove removes keys by a command each, since those of a cluster are on several nodes. It
// has longer than a replay, because somebody waits for it to be done.
func (c *Cache) remove(ctx context.Context, keys []string) error {
	ctx, cancel := context.WithTimeout(ctx, max(c.cfg.Timeout, removeTimeout))
	defer cancel()
	_, err := c.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, key := range keys {
			p.Unlink(ctx, key)
		}
		return nil
	})
	return err
}

const removeTimeout = 5 * time.Second

func (c *Cache) key(id idempotency.ID) string { return c.cfg.Prefix + string(id[:]) }

func (c *Cache) resting() bool { return time.Since(c.began).Nanoseconds() < c.until.Load() }

func (c *Cache) rest(ctx context.Context, command string, err error) {
	c.until.Store((time.Since(c.began) + c.cfg.Rest).Nanoseconds())
	c.cfg.Logger.WarnContext(ctx, "redis not reached; the store answers", "command", command, "error", err)
}
