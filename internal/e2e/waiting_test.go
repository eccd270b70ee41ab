package e2e

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// TestWaiting relays messages beside very many that wait, as many as in the documents.
func TestWaiting(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	const topics, rows, mebibytes, each = 100_000, 300_000, 2048, time.Minute
	// A message with a route of its own is refused, and its key is held.
	refused := func(key string) *message.Message {
		msg := message.NewMessage(watermill.NewUUID(), nil)
		msg.Metadata.Set("CC", "elsewhere")
		outbox.SetKey(msg, key)
		return msg
	}
	behind := func(key string, size int) *message.Message {
		msg := message.NewMessage(watermill.NewUUID(), bytes.Repeat([]byte("x"), size))
		outbox.SetKey(msg, key)
		return msg
	}
	type kind struct {
		name string
		fill func(t *testing.T, w *waiting)
	}
	cases := []kind{
		{fmt.Sprintf("%d topics without a queue", topics), func(t *testing.T, w *waiting) {
			for i := range topics {
				w.topics++
				w.add(t, "nowhere."+strconv.Itoa(i), message.NewMessage(watermill.NewUUID(), make([]byte, 256)))
			}
		}},
		{fmt.Sprintf("%d messages behind a held key", rows), func(t *testing.T, w *waiting) {
			w.add(t, "healthy", refused("held"))
			for range rows {
				w.add(t, "healthy", behind("held", 256))
			}
		}},
		{fmt.Sprintf("%d MiB behind 64 held keys", mebibytes), func(t *testing.T, w *waiting) {
			for i := range 64 {
				w.add(t, "healthy", refused("held"+strconv.Itoa(i)))
			}
			for i := range mebibytes {
				w.add(t, "healthy", behind("held"+strconv.Itoa(i%64), 1<<20))
			}
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { // one after the other: each is measured
			w := newWaiting(t)
			c.fill(t, w)
			w.flush(t)
			w.measure(t, each)
		})
	}
}

// waiting is a place with messages that wait.
type waiting struct {
	pg    testserver.PG
	uri   string
	box   *outbox.Outbox
	batch map[string][]*message.Message // by topic, not committed yet
	bytes int
	rows  int
	// topics without a queue
	topics int
}

func newWaiting(t *testing.T) *waiting {
	t.Helper()
	pg, uri := testserver.Postgres(t), testserver.RabbitMQ(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(pg.DB, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	return &waiting{pg: pg, uri: uri, box: box, batch: map[string][]*message.Message{}}
}

// add publishes a message before the worker starts.
func (w *waiting) add(t *testing.T, topic string, msg *message.Message) {
	t.Helper()
	w.batch[topic] = append(w.batch[topic], msg)
	w.bytes += len(msg.Payload)
	w.rows++
	if w.bytes > 8<<20 || w.rows%1000 == 0 {
		w.flush(t)
	}
}

func (w *waiting) flush(t *testing.T) {
	t.Helper()
	err := w.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		for topic, msgs := range w.batch {
			if err := w.box.Publisher(tx).Publish(topic, msgs...); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	clear(w.batch)
	w.bytes = 0
}

// measure starts a worker, publishes healthy messages for some time, and looks at
// how late they came, at the worker's memory, and at what was published in vain.
func (w *waiting) measure(t *testing.T, lasting time.Duration) {
	t.Helper()
	const (
		rate       = 100 // healthy messages a second
		mostWasted = 250 // a second; the relay's own bound is 100, and probes of 64 topics come to it
		mostLate   = time.Second
		mostMemory = 256 << 10 // KiB
	)
	consumer := w.consume(t)
	worker := startWorker(t, workerSpec{
		DSN: w.pg.URL(t, "binary_parameters=yes"), Database: w.pg.Config, AMQP: w.uri, Queues: true,
		Retry: relay.Retry{MaxAttempts: 2, Initial: 10 * time.Millisecond, Exhausted: relay.ExhaustedHoldKey},
	})
	begin := time.Now()
	sent := map[string]time.Time{}
	tick := time.NewTicker(10 * time.Second / rate)
	defer tick.Stop()
	for time.Since(begin) < lasting {
		<-tick.C
		var msgs []*message.Message
		for range 10 {
			msg := message.NewMessage(watermill.NewUUID(), make([]byte, 256))
			outbox.SetKey(msg, msg.UUID)
			msgs = append(msgs, msg)
			sent[msg.UUID] = time.Now()
		}
		err := w.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			return w.box.Publisher(tx).Publish("healthy", msgs...)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the healthy messages arrive", func() bool { return consumer.count() == len(sent) })
	seconds := time.Since(begin).Seconds()
	var late []time.Duration
	for id, at := range sent {
		late = append(late, consumer.at(id).Sub(at))
	}
	slices.Sort(late)
	p50, p99, most := late[len(late)/2], late[len(late)*99/100], late[len(late)-1]
	// Each topic is tried once before it is known.
	memory, wasted := worker.peakMemory(), float64(w.returned(t)-w.topics)/seconds
	owed := count(t, w.pg.DB, "select (select count(*) from "+database.Of(w.box.Config().Database).Table("outbox")+") + (select count(*) from "+database.Of(w.box.Config().Database).Table("parked")+")")
	t.Logf("%d messages wait; %d healthy ones came after %v (median), %v (99th percentile), %v (maximum); the worker took at most %d MiB; %.0f were published in vain a second",
		owed, len(sent), p50.Round(time.Millisecond), p99.Round(time.Millisecond), most.Round(time.Millisecond), memory>>10, wasted)
	if owed < w.rows {
		t.Errorf("%d messages wait of %d", owed, w.rows)
	}
	if memory > mostMemory {
		t.Errorf("the worker took %d KiB", memory)
	}
	if wasted > mostWasted {
		t.Errorf("%.0f messages were published in vain a second", wasted)
	}
	if p99 > mostLate {
		t.Errorf("99 of 100 messages came within %v", p99)
	}
	worker.end()
}

// arrivals is when each message arrived.
type arrivals struct {
	mu   sync.Mutex
	when map[string]time.Time
}

func (a *arrivals) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.when)
}

func (a *arrivals) at(id string) time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.when[id]
}

// consume declares the queue of the healthy messages and takes what comes.
func (w *waiting) consume(t *testing.T) *arrivals {
	t.Helper()
	conn, err := amqp091.Dial(w.uri)
	if err != nil {
		t.Fatal(err)
	}
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclare("healthy", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	deliveries, err := ch.Consume("healthy", "", true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	a := &arrivals{when: map[string]time.Time{}}
	var group sync.WaitGroup
	group.Go(func() {
		for d := range deliveries {
			a.mu.Lock()
			if id, _ := d.Headers["_watermill_message_uuid"].(string); a.when[id].IsZero() {
				a.when[id] = time.Now()
			}
			a.mu.Unlock()
		}
	})
	t.Cleanup(func() { _ = conn.Close(); group.Wait() })
	return a
}

// returned is how many messages RabbitMQ had no queue for.
func (w *waiting) returned(t *testing.T) int {
	t.Helper()
	uri, err := url.Parse(w.uri)
	if err != nil {
		t.Fatal(err)
	}
	testserver.Pause(t.Context(), 6*time.Second) // the server counts every five seconds
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, os.Getenv("ONCEMILL_TEST_AMQP_ADMIN")+"/api/vhosts"+uri.Path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var vhost struct {
		Stats struct {
			Returned int `json:"return_unroutable"`
			Publish  int `json:"publish"`
		} `json:"message_stats"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&vhost); err != nil || vhost.Stats.Publish == 0 {
		t.Fatalf("the server has counted nothing: %v", err)
	}
	return vhost.Stats.Returned
}

// peakMemory returns the most that was resident, in KiB.
func (p *process) peakMemory() (kib int) {
	p.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			if _, err := fmt.Sscan(rest, &kib); err != nil {
				p.t.Fatal(err)
			}
		}
	}
	return kib
}
