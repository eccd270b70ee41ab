package rabbitmq_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/database"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// outageTime is how long an outage lasts: seconds, or a minute in a long run.
func outageTime(short time.Duration) time.Duration {
	if testserver.Long() {
		return time.Minute
	}
	return short
}

// recovery is how soon after the end of an outage a message must be confirmed, on the
// quiet machine of a long run.
const recovery = 5 * time.Second

// commitTo publishes the next n messages to a topic, spread over keys, or without
// any.
func (p *path) commitTo(t testing.TB, topic string, keys, n int) {
	t.Helper()
	var msgs []*message.Message
	for range n {
		i := p.next
		p.next++
		m := message.NewMessage(watermill.NewUUID(), []byte("payload"))
		if keys > 0 {
			outbox.SetKey(m, fmt.Sprint(topic, " ", i%keys))
		}
		msgs = append(msgs, m)
	}
	for batch := range slices.Chunk(msgs, 5000) {
		err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			return p.box.Publisher(tx).Publish(topic, batch...)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	p.committed = append(p.committed, msgs...)
}

func (p *path) count(t testing.TB, query string) (n int) {
	t.Helper()
	if err := p.box.DB().QueryRowContext(t.Context(), database.Of(p.box.Config().Database).Expand(query)).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func (p *path) owedInAll(t testing.TB) int {
	t.Helper()
	return p.count(t, `select (select count(*) from {{outbox}}) + (select count(*) from {{parked}})`)
}

// tap is a raw consumer of some queues: what has arrived there.
type tap struct {
	mu   sync.Mutex
	ids  []string
	at   []time.Time
	seen map[string]bool // each of ids
}

func (c *tap) consume(t testing.TB, ch *amqp.Channel, queue string) {
	t.Helper()
	deliveries, err := ch.ConsumeWithContext(context.WithoutCancel(t.Context()), queue, "", true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() { // ends with its channel, which the test closes
		for d := range deliveries {
			c.mu.Lock()
			c.ids, c.at = append(c.ids, d.MessageId), append(c.at, time.Now())
			if c.seen == nil {
				c.seen = map[string]bool{}
			}
			c.seen[d.MessageId] = true
			c.mu.Unlock()
		}
	}()
}

func (c *tap) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.ids)
}

// distinct returns how many messages have arrived, repeats not counted.
func (c *tap) distinct() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.seen)
}

// check compares what has arrived with what was committed, with the order of each
// key, and returns how many messages came again.
func (c *tap) check(t testing.TB, committed []*message.Message) (repeats int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	key, want, got := map[string]string{}, map[string][]string{}, map[string][]string{}
	for _, m := range committed {
		k := m.Metadata.Get(outbox.KeyMetadata)
		key[m.UUID] = k
		want[k] = append(want[k], m.UUID)
	}
	seen := map[string]bool{}
	for _, id := range c.ids {
		k, known := key[id]
		switch {
		case !known:
			t.Errorf("%s arrived and was not committed", id)
		case seen[id]:
			repeats++
		default:
			seen[id] = true
			got[k] = append(got[k], id)
		}
	}
	if lost := len(committed) - len(seen); lost != 0 {
		t.Errorf("%d of %d messages are lost", lost, len(committed))
	}
	for k := range want {
		if k != "" && !slices.Equal(got[k], want[k]) {
			t.Errorf("key %s: reordered", k)
		}
	}
	return repeats
}

// mustHaveSpentNothing fails if an outage was counted against any message.
func (p *path) mustHaveSpentNothing(t testing.TB) {
	t.Helper()
	if n := p.count(t, `select count(*) from {{dead_letters}}`); n > 0 {
		t.Errorf("%d dead letters", n)
	}
	if n := p.count(t, `select count(*) from {{parked}} where attempts > 0`); n > 0 {
		t.Errorf("%d messages were charged with an attempt", n)
	}
	for _, kind := range []string{"refused", "unknown"} {
		if n := p.outcomes(t, kind); n > 0 {
			t.Errorf("%d outcomes counted as %s", n, kind)
		}
	}
}

// sitOut commits a backlog, lets an outage begin, and end after a time, in which
// more is committed, and checks that the relay resumes by itself as if nothing had
// been.
func (p *path) sitOut(t testing.TB, arrived *tap, outage time.Duration, begin, end func()) {
	t.Helper()
	const topic = "orders"
	backlog := testserver.Rounds(400, 1000)
	p.commitTo(t, topic, 40, backlog)
	confirmed, failed := p.outcomes(t, "confirmed"), p.outcomes(t, "unavailable")+p.outcomes(t, "unroutable")
	eventually(t, "some are delivered", func() bool { return p.outcomes(t, "confirmed") > confirmed+100 })
	begin()
	p.commitTo(t, topic, 40, backlog)
	eventually(t, "the outage is felt", func() bool {
		return p.outcomes(t, "unavailable")+p.outcomes(t, "unroutable") > failed
	})
	for began := time.Now(); time.Since(began) < outage; testserver.Pause(t.Context(), 100*time.Millisecond) {
		p.commitTo(t, topic, 40, 5)
	}
	p.mustHaveSpentNothing(t)
	owed, confirmed := p.owedInAll(t), p.outcomes(t, "confirmed")
	if owed < backlog {
		t.Errorf("%d messages are owed after the outage: the test shows nothing", owed)
	}
	end()
	ended := time.Now()
	eventually(t, "a message is confirmed", func() bool { return p.outcomes(t, "confirmed") > confirmed })
	took := time.Since(ended)
	testserver.EventuallyMoving(t, "nothing is owed", func() bool { return p.owedInAll(t) == 0 }, func() int { return p.owedInAll(t) })
	t.Logf("%v of outage, %d messages owed: the first is confirmed %v after its end, the last %v",
		outage, owed, took.Round(time.Millisecond), time.Since(ended).Round(time.Millisecond))
	if testserver.Long() && took > recovery {
		t.Errorf("the first message was confirmed %v after the end", took)
	}
	p.mustHaveSpentNothing(t)
}

// One node for outages of the whole broker, one after the other.
func TestRelay_SitsOutOutages(t *testing.T) {
	t.Parallel()
	node := testserver.PrivateRabbitMQ(t)
	t.Run("Alarms", func(t *testing.T) { sitsOutAlarms(t, node) })
	t.Run("ResumesWithoutCountingAFailure", func(t *testing.T) { resumesWithoutCountingAFailure(t, node) })
}

// An alarm of the broker blocks its publishers, to whom a long run shows both kinds.
func sitsOutAlarms(t *testing.T, node *testserver.RabbitServer) {
	admin, arrived := dialAMQP(t, node.URI()), &tap{}
	declareQueue(t, admin, "orders", nil)
	arrived.consume(t, admin, "orders")
	pg := testserver.Postgres(t)
	p := startPath(t, pg.DB, pg.Config, node.URI())
	outage := outageTime(3 * time.Second)
	p.sitOut(t, arrived, outage, node.RaiseDiskAlarm, node.ClearDiskAlarm)
	if testserver.Long() {
		p.sitOut(t, arrived, outage, node.RaiseMemoryAlarm, node.ClearMemoryAlarm)
	}
	p.finish(t, arrived)
	p.end()
	if _, err := admin.QueueDelete("orders", false, false, false); err != nil {
		t.Fatal(err)
	}
}

// finish checks what has arrived when all has been delivered.
func (p *path) finish(t testing.TB, arrived *tap) {
	t.Helper()
	testserver.EventuallyMoving(t, "all arrive", func() bool { return arrived.distinct() >= len(p.committed) }, arrived.distinct)
	// What an outage has cut off is sent again, a window of it at most.
	if repeats := arrived.check(t, p.committed); repeats > 512 {
		t.Errorf("%d repeats", repeats)
	} else {
		t.Logf("%d messages, %d repeats", len(p.committed), repeats)
	}
}

// A queue that is full refuses what comes, until somebody consumes.
func TestRelay_SitsOutAFullQueue(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin, arrived := dialAMQP(t, uri), &tap{}
	declareQueue(t, admin, "orders", amqp.Table{"x-max-length": 300, "x-overflow": "reject-publish"})
	pg := testserver.Postgres(t)
	p := startPath(t, pg.DB, pg.Config, uri)
	p.sitOut(t, arrived, outageTime(4*time.Second), func() {}, func() { arrived.consume(t, admin, "orders") })
	p.finish(t, arrived)
}

// A queue is deleted, and made again.
func TestRelay_SitsOutAMissingQueue(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin, arrived := dialAMQP(t, uri), &tap{}
	declareQueue(t, admin, "orders", nil)
	arrived.consume(t, admin, "orders")
	pg := testserver.Postgres(t)
	p := startPath(t, pg.DB, pg.Config, uri)
	p.sitOut(t, arrived, outageTime(4*time.Second), func() {
		// What the broker has taken must not go with the queue.
		eventually(t, "all arrive", func() bool { return p.owedInAll(t) == 0 && arrived.distinct() >= len(p.committed) })
		if _, err := admin.QueueDelete("orders", false, false, false); err != nil {
			t.Fatal(err)
		}
	}, func() {
		declareQueue(t, admin, "orders", nil)
		arrived.consume(t, admin, "orders")
	})
	p.finish(t, arrived)
}

// Of two topics one has nowhere to go, and far more of it is owed than workers keep
// in memory. The other one's messages, committed after all that, flow all the time.
func TestRelay_DeliversBesideATopicThatIsStuck(t *testing.T) {
	t.Parallel()
	batch, stuck := testserver.Rounds(4, 8), testserver.Rounds(2_300, 30_000)
	memory := 32 * 8 * batch // rows
	if stuck < 2*memory {
		t.Fatalf("%d messages may fit into memory: the test shows nothing", stuck)
	}
	type fault struct {
		keys  int
		queue amqp.Table // nil: there is none
	}
	full := amqp.Table{"x-max-length": 100, "x-overflow": "reject-publish"}
	faults := map[string]fault{"missing queue, keyed": {keys: 2000}}
	if testserver.Long() {
		faults["missing queue, no keys"], faults["full queue, no keys"], faults["full queue, keyed"] = fault{}, fault{queue: full}, fault{keys: 2000, queue: full}
	}
	for name, faulty := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			uri := testserver.RabbitMQ(t)
			admin, bad, good := dialAMQP(t, uri), &tap{}, &tap{}
			declareQueue(t, admin, "good", nil)
			good.consume(t, admin, "good")
			if faulty.queue != nil {
				declareQueue(t, admin, "bad", faulty.queue)
			}
			pg := testserver.Postgres(t)
			p := startPath(t, pg.DB, pg.Config, uri, func(cfg *relay.Config) { cfg.Batch = batch })
			p.commitTo(t, "bad", faulty.keys, stuck)
			stuckOnes := p.committed
			p.committed = nil

			outage := outageTime(4 * time.Second)
			began := time.Now()
			var committed []time.Time
			most := func() bool { return good.count() >= len(committed)*2/3 }
			for time.Since(began) < outage || !most() && time.Since(began) < 10*outage { // more time on a busy machine
				p.commitTo(t, "good", 10, 2)
				committed = append(committed, time.Now(), time.Now())
				testserver.Pause(t.Context(), 20*time.Millisecond)
			}
			p.mustHaveSpentNothing(t)
			good.mu.Lock()
			at := slices.Clone(good.at)
			good.mu.Unlock()
			var slowest, gap time.Duration
			for i := range at {
				slowest = max(slowest, at[i].Sub(committed[i]))
				if i > 0 {
					gap = max(gap, at[i].Sub(at[i-1]))
				}
			}
			if len(at) == 0 {
				t.Fatal("nothing of the other topic arrived")
			}
			t.Logf("%d of %d messages of the other topic arrived meanwhile, the first after %v; the slowest took %v, the longest gap was %v; %d set aside",
				len(at), len(committed), at[0].Sub(committed[0]).Round(time.Millisecond), slowest.Round(time.Millisecond), gap.Round(time.Millisecond),
				p.count(t, `select count(*) from {{parked}}`))

			if len(at) < len(committed)*2/3 || testserver.Long() && gap > recovery {
				t.Errorf("%d of %d messages of the other topic arrived, with a silence of %v", len(at), len(committed), gap)
			}

			if faulty.queue == nil {
				declareQueue(t, admin, "bad", nil)
			}
			bad.consume(t, admin, "bad")
			ended, arrived := time.Now(), bad.count()
			eventually(t, "the topic goes on", func() bool { return bad.count() > arrived })
			resumed := time.Since(ended)
			testserver.EventuallyMoving(t, "nothing is owed", func() bool { return p.owedInAll(t) == 0 }, func() int { return p.owedInAll(t) })
			t.Logf("the stuck topic goes on %v after the end, and nothing is owed after %v",
				resumed.Round(time.Millisecond), time.Since(ended).Round(time.Millisecond))
			if testserver.Long() && resumed > recovery {
				t.Errorf("the stuck topic went on %v after the end", resumed)
			}
			p.mustHaveSpentNothing(t)
			eventually(t, "all arrive", func() bool { return bad.distinct() >= stuck && good.distinct() >= len(p.committed) })
			for what, n := range map[string]int{"stuck topic": bad.check(t, stuckOnes), "other topic": good.check(t, p.committed)} {
				if n > 256 { // confirms that were late on a busy machine, a window of them
					t.Errorf("%s: %d repeats", what, n)
				}
			}
		})
	}
}

// One channel of the connection gets no confirms any more, as when the leader of a
// queue has died behind it. Its lane goes on with another channel.
func TestRelay_LeavesNoLaneBehindAChannelThatStalls(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	proxy, through := testserver.ProxyAMQP(t, uri)
	pg := testserver.Postgres(t)
	p := startPath(t, pg.DB, pg.Config, through)
	p.commitTo(t, "orders", 40, 200) // opens the channels
	eventually(t, "nothing is owed", func() bool { return p.owedInAll(t) == 0 })
	proxy.HoldAcks.Store(1)
	p.commitTo(t, "orders", 40, 400)
	eventually(t, "confirms are missing", func() bool { return proxy.Held() > 0 })
	newest := p.count(t, `select last_value from {{outbox_id}}`)
	eventually(t, "all of that is delivered", func() bool {
		p.commitTo(t, "orders", 40, 40)
		return p.count(t, fmt.Sprint(`select count(*) from {{outbox}} where id <= `, newest)) == 0
	})
	eventually(t, "nothing is owed", func() bool { return p.owedInAll(t) == 0 })
	if n := proxy.Dials.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
	p.mustHaveSpentNothing(t)
	arrived := &tap{}
	arrived.consume(t, admin, "orders")
	eventually(t, "all arrive", func() bool { return arrived.distinct() >= len(p.committed) })
	t.Logf("%d messages, %d repeats", len(p.committed), arrived.check(t, p.committed))
}
