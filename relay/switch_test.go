package relay_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"net"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// exchange connects a pool to one of several servers, as a name or a proxy does
// that is moved in a failover.
type exchange struct {
	mu      sync.Mutex
	address string
	conns   []net.Conn
}

// openSwitched returns a pool that reaches server until it is switched.
func openSwitched(t testing.TB, server *testserver.PostgresServer) (*sql.DB, *exchange) {
	t.Helper()
	x := &exchange{}
	x.turn(t, server)
	connector, err := pq.NewConnector(server.DSN() + "&binary_parameters=yes")
	if err != nil {
		t.Fatal(err)
	}
	connector.Dialer(x)
	db := sql.OpenDB(connector)
	t.Cleanup(func() { db.Close() })
	return db, x
}

// turn leads connections to server from now on and cuts those that there are.
func (x *exchange) turn(t testing.TB, server *testserver.PostgresServer) {
	t.Helper()
	to, err := url.Parse(server.DSN())
	if err != nil {
		t.Fatal(err)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.address = to.Host
	for _, c := range x.conns {
		_ = c.Close()
	}
	x.conns = nil
}

func (x *exchange) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	conn, err := new(net.Dialer).DialContext(ctx, network, x.address)
	if err == nil {
		x.conns = append(x.conns, conn)
	}
	return conn, err
}

func (x *exchange) Dial(network, address string) (net.Conn, error) {
	return x.DialContext(context.Background(), network, address)
}

func (x *exchange) DialTimeout(network, address string, limit time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return x.DialContext(ctx, network, address)
}

// traffic is what producers commit: each message with a row in the table facts of
// the same transaction, which tells what a server knows to be committed.
type traffic struct {
	group sync.WaitGroup
	end   context.CancelFunc
	mu    sync.Mutex
	n     int // committed, as far as the producers know
}

const makeFacts = `
create table facts (
	message_id text   primary key,
	key        text   not null, -- '' if the message has no place in an order
	number     bigint not null
)`

// produce commits messages until halt: each producer has keys of its own, counts
// them by what the server remembers, and now and then schedules one for later.
func (p testDB) produce(t testing.TB, producers int, pace time.Duration) *traffic {
	ctx, cancel := context.WithCancel(t.Context())
	g := &traffic{end: cancel}
	box, prefix := p.box(t), rand.Text()[:4]
	for producer := range producers {
		g.group.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				err := box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
					return produceOne(ctx, box, tx, fmt.Sprintf("%s%d-%d", prefix, producer, i%10), i%20 == 19)
				})
				if err == nil {
					g.mu.Lock()
					g.n++
					g.mu.Unlock()
				}
				select {
				case <-time.After(pace):
				case <-ctx.Done():
				}
			}
		})
	}
	t.Cleanup(g.halt)
	return g
}

func produceOne(ctx context.Context, box *outbox.Outbox, tx *sql.Tx, key string, later bool) error {
	m := message.NewMessage(watermill.NewUUID(), []byte("payload"))
	if later {
		outbox.SetDeliverAfter(m, time.Second)
		key = ""
	}
	outbox.SetKey(m, key)
	if _, err := tx.ExecContext(ctx, `
		insert into facts (message_id, key, number)
		select $1, $2, coalesce(max(number), 0) + 1 from facts where key = $2`, m.UUID, key); err != nil {
		return err
	}
	return box.Publisher(tx).Publish("orders", m)
}

func (g *traffic) halt() {
	g.end()
	g.group.Wait()
}

func (g *traffic) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.n
}

// tally is what a server knows to be committed against what arrived.
type tally struct {
	facts, arrived, ghosts, repeats int

	reused int // ids of the outbox that more than one message had
}

func (c tally) String() string {
	return fmt.Sprintf("%d messages committed and not forgotten, %d arrived (distinct), %d ghosts, %d repeats, %d ids given out again", c.facts, c.arrived, c.ghosts, c.repeats, c.reused)
}

// audit compares what the server knows to be committed with what arrived: nothing
// is lost, and first occurrences of a key come in order. Ghosts, which it does not
// know, and repeats are for the caller to judge.
func (p testDB) audit(t testing.TB, w *wire) tally {
	t.Helper()
	var c tally
	position, seen := map[string]int{}, map[string]bool{}
	got := map[string][]int{}
	facts := p.texts(t, `select message_id from facts order by key, number`)
	for i, id := range facts {
		position[id] = i
	}
	holder := map[int64]string{}
	for _, a := range w.all() {
		if first, ok := holder[a.id]; ok && first != a.message {
			c.reused++
		}
		holder[a.id] = a.message
		if seen[a.message] {
			c.repeats++
			continue
		}
		seen[a.message] = true
		at, known := position[a.message]
		switch {
		case !known:
			c.ghosts++
		case a.key != "":
			got[a.key] = append(got[a.key], at)
		}
	}
	lost := 0
	for _, id := range facts {
		if !seen[id] {
			lost++
		}
	}
	if lost > 0 {
		t.Errorf("%d of %d messages are lost", lost, len(facts))
	}
	for key, positions := range got {
		if !slices.IsSorted(positions) {
			t.Errorf("key %s: reordered", key)
		}
	}
	c.facts, c.arrived = len(facts), len(seen)
	return c
}

// owedInAll counts all that is yet to arrive.
func (p testDB) owedInAll(t testing.TB) int {
	t.Helper()
	return p.count(t, `select (select count(*) from {{outbox}}) + (select count(*) from {{parked}}) + (select count(*) from {{scheduled}})`)
}

func (p testDB) awaitNothingOwedInAll(t testing.TB) {
	t.Helper()
	eventually(t, "nothing is owed", func() bool { return p.owedInAll(t) == 0 })
}
