package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// topic is the JetStream stream, its only subject, and Watermill's topic.
const topic = "orders"

// embedded is a NATS JetStream server in this process, with file storage.
type embedded struct{ server *server.Server }

const brokerTimeout = 10 * time.Second

func startBroker(dir string) (*embedded, error) {
	srv, err := server.NewServer(&server.Options{
		ServerName: "quickstart",
		Host:       "127.0.0.1",
		Port:       server.RANDOM_PORT,
		JetStream:  true,
		StoreDir:   dir,
		SyncAlways: true, // confirm what is on the disk, not what will be within two minutes
		NoSigs:     true,
	})
	if err != nil {
		return nil, fmt.Errorf("make broker: %w", err)
	}
	b := &embedded{srv}
	go srv.Start() // returns when the server is up; stop waits for what it started
	if !srv.ReadyForConnections(brokerTimeout) {
		b.stop()
		return nil, errors.New("the broker did not start within " + brokerTimeout.String())
	}
	if err := b.makeStream(); err != nil {
		b.stop()
		return nil, err
	}
	return b, nil
}

// makeStream makes the stream unless it is there. It keeps what was consumed, so
// that the demo can read it back.
func (b *embedded) makeStream() error {
	conn, err := nats.Connect(b.url())
	if err != nil {
		return fmt.Errorf("connect to broker: %w", err)
	}
	defer conn.Close()
	stream, err := conn.JetStream()
	if err != nil {
		return fmt.Errorf("connect to broker: %w", err)
	}
	_, err = stream.AddStream(&nats.StreamConfig{Name: topic, Subjects: []string{topic}, Storage: nats.FileStorage})
	if err != nil {
		return fmt.Errorf("make stream: %w", err)
	}
	return nil
}

func (b *embedded) url() string { return b.server.ClientURL() }

func (b *embedded) stop() {
	b.server.Shutdown()
	b.server.WaitForShutdown()
}
