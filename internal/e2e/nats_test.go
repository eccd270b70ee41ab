package e2e

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// NATS JetStream, in this process, through watermill-nats. The server goes away in
// the middle and comes back with what it had stored.
func TestFromPublisher_DeliversToJetStream(t *testing.T) {
	t.Parallel()
	broker := &jetStream{t: t, dir: t.TempDir(), port: server.RANDOM_PORT}
	broker.start()
	t.Cleanup(broker.stop)
	js := broker.stream("orders")

	forever := []nats.Option{nats.MaxReconnects(-1), nats.ReconnectWait(20 * time.Millisecond)}
	publisher, err := watermillnats.NewPublisher(watermillnats.PublisherConfig{
		URL: broker.url, NatsOptions: forever,
		JetStream: watermillnats.JetStreamConfig{PublishOptions: []nats.PubOpt{nats.AckWait(time.Second)}},
	}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { publisher.Close() })
	sink, err := relay.NewPublisherSink(publisher, relay.PublisherConfig{Parallel: 8})
	if err != nil {
		t.Fatal(err)
	}
	box := postgresBox(t)
	runRelay(t, box, sink)

	const keys, each = 20, 20
	write := func(from, to int) {
		err := box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			for i := from; i < to; i++ {
				for k := range keys {
					// The outbox of these tests takes the payload for the key.
					msg := message.NewMessage(fmt.Sprintf("%02d/%02d", k, i), fmt.Appendf(nil, "key %d", k))
					if err := box.Publisher(tx).Publish("orders", msg); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	stored := func() uint64 {
		info, err := js.StreamInfo("orders")
		if err != nil {
			return 0 // it is away
		}
		return info.State.Msgs
	}
	write(0, each/2)
	eventually(t, "the first arrive", func() bool { return stored() >= keys })
	broker.stop()
	write(each/2, each)
	broker.start()
	lanes := make([]int, outbox.Lanes)
	for i := range lanes {
		lanes[i] = i
	}
	eventually(t, "nothing is owed", func() bool {
		rows, err := outboxqueue.Of(box).Read(t.Context(), outboxstore.ReadRequest{Lanes: lanes, Rows: 1, Bytes: 1})
		return err == nil && len(rows) == 0
	})

	first := map[string][]string{} // occurrences, by key
	repeats := 0
	for seq := uint64(1); seq <= stored(); seq++ {
		msg, err := js.GetMsg("orders", seq)
		if err != nil {
			t.Fatal(err)
		}
		id, key := msg.Header.Get(watermillnats.WatermillUUIDHdr), string(msg.Data)
		if slices.Contains(first[key], id) {
			repeats++
			continue
		}
		first[key] = append(first[key], id)
	}
	if len(first) != keys {
		t.Errorf("%d keys arrived, want %d", len(first), keys)
	}
	for key, ids := range first {
		if len(ids) != each || !slices.IsSorted(ids) {
			t.Errorf("%s: %d messages, want %d in order: %v", key, len(ids), each, ids)
		}
	}
	t.Logf("%d repeats of %d messages", repeats, keys*each)
}

// jetStream is a NATS server that can be stopped and started again.
type jetStream struct {
	t      *testing.T
	dir    string
	port   int
	url    string
	server *server.Server
}

func (j *jetStream) start() {
	j.t.Helper()
	srv, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: j.port, JetStream: true, StoreDir: j.dir, SyncAlways: true, NoSigs: true, NoLog: true,
	})
	if err != nil {
		j.t.Fatal(err)
	}
	go srv.Start() // returns when the server is up
	if !srv.ReadyForConnections(maxWait) {
		j.t.Fatal("the NATS server does not start")
	}
	j.url = srv.ClientURL()
	if _, err := fmt.Sscanf(j.url, "nats://127.0.0.1:%d", &j.port); err != nil {
		j.t.Fatal(err)
	}
	j.server = srv
}

func (j *jetStream) stop() {
	j.server.Shutdown()
	j.server.WaitForShutdown()
}

// stream makes a stream and returns the test's own view of the server.
func (j *jetStream) stream(name string) nats.JetStreamContext {
	j.t.Helper()
	conn, err := nats.Connect(j.url, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond))
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(conn.Close)
	js, err := conn.JetStream()
	if err != nil {
		j.t.Fatal(err)
	}
	if _, err := js.AddStream(&nats.StreamConfig{Name: name, Subjects: []string{name}, Storage: nats.FileStorage}); err != nil {
		j.t.Fatal(err)
	}
	return js
}
