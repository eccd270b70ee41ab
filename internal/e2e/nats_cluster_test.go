package e2e

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// Three nodes of NATS JetStream, each a process, keep three copies of the stream. Behind
// relay.FromPublisher and before an inbox, nothing is lost, doubled or reordered while the
// leader is killed, frozen, and each node is restarted.
func TestFromPublisher_OnAClusterOfJetStream(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	pg := testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations); err != nil {
		t.Fatal(err)
	}
	execute(t, pg.DB, `create table written (message_id text not null, at timestamptz not null default clock_timestamp())`)
	execute(t, pg.DB, `create table effects (position bigserial, message_id text not null, at timestamptz not null default clock_timestamp())`)
	box, err := outbox.New(pg.DB, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	cluster := newNATSCluster(t)
	cluster.createStream("orders")
	cluster.relay(box)
	cluster.consume(pg.DB, pg.Config)

	producing, stop := context.WithCancel(t.Context())
	var producers sync.WaitGroup
	t.Cleanup(func() { stop(); producers.Wait() })
	const keys = 4
	for key := range keys {
		producers.Go(func() { writeOrders(t, producing, box, key) })
	}
	recovered := func(fault string, since time.Time) {
		t.Helper()
		var after sql.NullFloat64
		eventually(t, "an effect of a message from after "+fault, func() bool {
			err := pg.DB.QueryRowContext(t.Context(), `select extract(epoch from min(e.at) - $1::timestamptz)
				from effects e join written w using (message_id) where w.at > $1::timestamptz`, since.Format(time.RFC3339Nano)).Scan(&after)
			return err == nil && after.Valid
		})
		t.Logf("%s: the first effect of a later message after %.1f s", fault, after.Float64)
	}
	for _, fault := range []string{"the leader was killed", "the leader was frozen", "the leader was killed again"} {
		leader, since := cluster.leader(), time.Now()
		if strings.Contains(fault, "frozen") {
			cluster.nodes[leader].signal(syscall.SIGSTOP)
			recovered(fault, since)
			cluster.nodes[leader].signal(syscall.SIGCONT)
		} else {
			cluster.nodes[leader].kill()
			recovered(fault, since)
			cluster.start(leader)
		}
		cluster.awaitHealth()
	}
	for i := range cluster.nodes {
		since := time.Now()
		cluster.nodes[i].end()
		recovered(fmt.Sprintf("node %d was restarted", i), since)
		cluster.start(i)
		cluster.awaitHealth()
	}
	stop()
	producers.Wait()
	effects := func() int { return count(t, pg.DB, `select count(*) from effects`) }
	owed := "select count(*) from " + database.Of(pg.Config).Table("outbox")
	testserver.EventuallyMoving(t, "nothing is owed and all has its effect", func() bool {
		return count(t, pg.DB, owed) == 0 && effects() >= count(t, pg.DB, `select count(*) from written`)
	}, effects)

	written := testserver.Texts(t, pg.DB, `select message_id from written order by 1`)
	if got := testserver.Texts(t, pg.DB, `select message_id from effects order by 1`); !slices.Equal(got, written) {
		t.Errorf("%d effects of %d messages, or not theirs", len(got), len(written))
	}
	onWire, repeats := cluster.stored()
	for key := range keys {
		prefix := fmt.Sprintf("key%d/", key)
		of := testserver.Texts(t, pg.DB, `select message_id from effects where starts_with(message_id, '`+prefix+`') order by position`)
		if !slices.IsSorted(of) || len(of) == 0 {
			t.Errorf("%s: %d effects, not in order", prefix, len(of))
		}
		sent := slices.DeleteFunc(slices.Clone(onWire), func(id string) bool { return !strings.HasPrefix(id, prefix) })
		if !slices.IsSorted(sent) {
			t.Errorf("%s: the stream has %d messages, not in order", prefix, len(sent))
		}
	}
	if n := count(t, pg.DB, "select count(*) from "+database.Of(pg.Config).Table("dead_letters")); n != 0 {
		t.Errorf("%d dead letters of outages", n)
	}
	t.Logf("%d messages, %d copies more in the stream", len(written), repeats)
}

// writeOrders commits numbered messages of a key until ctx ends.
func writeOrders(t *testing.T, ctx context.Context, box *outbox.Outbox, key int) {
	for n := 0; ctx.Err() == nil; n++ {
		id := fmt.Sprintf("key%d/%06d", key, n)
		err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `insert into written (message_id) values ($1)`, id); err != nil {
				return err
			}
			msg := message.NewMessage(id, []byte(id))
			outbox.SetKey(msg, fmt.Sprint("key", key))
			return box.Publish(ctx, tx, "orders", msg)
		})
		if err != nil {
			t.Errorf("transaction: %v", err)
			return
		}
		testserver.Pause(t.Context(), 40*time.Millisecond)
	}
}

// natsNodeEnv holds the natsNode of a process that is one.
const natsNodeEnv = "ONCEMILL_TEST_E2E_NATS"

// natsNode is a node of a JetStream cluster.
type natsNode struct {
	Name   string
	Dir    string
	Client int // ports
	Peer   int
	Peers  []int // of all nodes
}

func natsNodeMain(text string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() { // ends with the process that has started this one
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	var n natsNode
	if err := json.Unmarshal([]byte(text), &n); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var routes []string
	for _, port := range n.Peers {
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", port))
	}
	// The disk is synchronized every two minutes, as is the default: nodes that are killed lose
	// nothing by that, and confirms come from two of the three.
	srv, err := server.NewServer(&server.Options{
		ServerName: n.Name, Host: "127.0.0.1", Port: n.Client, JetStream: true, StoreDir: n.Dir, NoSigs: true, NoLog: true,
		Cluster: server.ClusterOpts{Name: "oncemill", Host: "127.0.0.1", Port: n.Peer},
		Routes:  server.RoutesFromStr(strings.Join(routes, ",")),
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	go srv.Start()
	<-ctx.Done()
	srv.Shutdown()
	srv.WaitForShutdown()
	return 0
}

type natsCluster struct {
	t     *testing.T
	specs []natsNode
	nodes []*process
	js    nats.JetStreamContext // the test's own view
}

func newNATSCluster(t *testing.T) *natsCluster {
	t.Helper()
	const size = 3
	c := &natsCluster{t: t, nodes: make([]*process, size)}
	var peers []int
	for range size {
		peers = append(peers, freePort(t))
	}
	for i, peer := range peers {
		name := fmt.Sprint("node", i)
		c.specs = append(c.specs, natsNode{Name: name, Dir: filepath.Join(t.TempDir(), name), Client: freePort(t), Peer: peer, Peers: peers})
	}
	for i := range size {
		c.start(i)
	}
	conn, err := nats.Connect(c.urls(), append(natsOptions(), nats.RetryOnFailedConnect(true))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	if c.js, err = conn.JetStream(nats.MaxWait(2 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

func freePort(t *testing.T) (port int) {
	t.Helper()
	address, err := testserver.FreeAddress(t.Context())
	if err == nil {
		_, err = fmt.Sscanf(address, "127.0.0.1:%d", &port)
	}
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// natsOptions are what clients of a cluster need: they look for another node for ever, and
// notice within seconds that theirs is silent. The default is four minutes.
func natsOptions() []nats.Option {
	return []nats.Option{
		nats.MaxReconnects(-1), nats.ReconnectWait(50 * time.Millisecond),
		nats.PingInterval(time.Second), nats.MaxPingsOutstanding(2), nats.Timeout(time.Second),
	}
}

func (c *natsCluster) urls() string {
	var all []string
	for _, n := range c.specs {
		all = append(all, fmt.Sprintf("nats://127.0.0.1:%d", n.Client))
	}
	return strings.Join(all, ",")
}

func (c *natsCluster) start(i int) { c.nodes[i] = startProcess(c.t, natsNodeEnv, c.specs[i]) }

func (c *natsCluster) createStream(name string) {
	c.t.Helper()
	var err error
	eventually(c.t, "the cluster has a stream", func() bool {
		_, err = c.js.AddStream(&nats.StreamConfig{Name: name, Subjects: []string{name}, Storage: nats.FileStorage, Replicas: len(c.specs)})
		return err == nil
	})
}

// leader returns the number of the node that leads the stream.
func (c *natsCluster) leader() (number int) {
	c.t.Helper()
	eventually(c.t, "the stream has a leader", func() bool {
		info, err := c.js.StreamInfo("orders")
		if err != nil || info.Cluster == nil {
			return false
		}
		number = slices.IndexFunc(c.specs, func(n natsNode) bool { return n.Name == info.Cluster.Leader })
		return number >= 0
	})
	return number
}

// awaitHealth waits until all copies of the stream are complete, and the consumer has a leader.
func (c *natsCluster) awaitHealth() {
	c.t.Helper()
	eventually(c.t, "all nodes have the stream", func() bool {
		stream, err := c.js.StreamInfo("orders")
		if err != nil || stream.Cluster == nil || stream.Cluster.Leader == "" || len(stream.Cluster.Replicas) != len(c.specs)-1 {
			return false
		}
		consumer, err := c.js.ConsumerInfo("orders", "stock")
		return err == nil && consumer.Cluster != nil && consumer.Cluster.Leader != "" &&
			!slices.ContainsFunc(stream.Cluster.Replicas, func(p *nats.PeerInfo) bool { return p.Offline || !p.Current })
	})
}

// relay runs a relay to the cluster until the test ends.
func (c *natsCluster) relay(box *outbox.Outbox) {
	c.t.Helper()
	publisher, err := watermillnats.NewPublisher(watermillnats.PublisherConfig{
		URL: c.urls(), NatsOptions: natsOptions(),
		JetStream: watermillnats.JetStreamConfig{PublishOptions: []nats.PubOpt{nats.AckWait(time.Second)}},
	}, watermill.NopLogger{})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { publisher.Close() })
	runRelay(c.t, box, relay.FromPublisher(publisher))
}

// consume leaves an effect of each message until the test ends.
func (c *natsCluster) consume(db *sql.DB, config oncemill.Config) {
	c.t.Helper()
	in, err := inbox.New(db, inbox.Config{Consumer: "stock", Database: config, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		c.t.Fatal(err)
	}
	// Closed here: the subscriber drains its connection, which goes on to look for a node.
	conn, err := nats.Connect(c.urls(), natsOptions()...)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(conn.Close)
	subscriber, err := watermillnats.NewSubscriberWithNatsConn(conn, watermillnats.SubscriberSubscriptionConfig{
		CloseTimeout: 5 * time.Second,
		JetStream: watermillnats.JetStreamConfig{
			DurablePrefix: "stock",
			SubscribeOptions: []nats.SubOpt{
				nats.DeliverAll(), nats.AckExplicit(), nats.ManualAck(),
				nats.AckWait(2 * time.Second), nats.MaxAckPending(1), // one at a time keeps the order
			},
		},
	}, watermill.NopLogger{})
	if err != nil {
		c.t.Fatal(err)
	}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddConsumerHandler("reserve", "orders", subscriber, func(msg *message.Message) error {
		tx, ok := inbox.TxFromContext(msg.Context())
		if !ok {
			return errors.New("no transaction")
		}
		_, err := tx.ExecContext(msg.Context(), `insert into effects (message_id) values ($1)`, msg.UUID)
		return err
	}).AddMiddleware(in.Middleware)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.WithoutCancel(c.t.Context())) }()
	<-router.Running()
	c.t.Cleanup(func() {
		if err := errors.Join(router.Close(), <-ended, subscriber.Close()); err != nil {
			c.t.Error(err)
		}
	})
}

// stored returns the ids in the stream by their first copies, and how many further copies it has.
func (c *natsCluster) stored() (ids []string, repeats int) {
	c.t.Helper()
	seen := map[string]bool{}
	info, err := c.js.StreamInfo("orders")
	if err != nil {
		c.t.Fatal(err)
	}
	for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
		msg, err := c.js.GetMsg("orders", seq)
		if err != nil {
			c.t.Fatal(err)
		}
		id := msg.Header.Get(watermillnats.WatermillUUIDHdr)
		if seen[id] {
			repeats++
			continue
		}
		seen[id] = true
		ids = append(ids, id)
	}
	return ids, repeats
}
