// Package broker embeds a NATS JetStream server, so that the examples need no other, and
// connects Watermill to it. What a publisher gets confirmed is on the disk.
package broker

import (
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

const startTimeout = 10 * time.Second

// Start starts a server with its files in dir. It runs until its method Shutdown; its
// method ClientURL returns where it is.
func Start(dir string) (*server.Server, error) {
	srv, err := server.NewServer(&server.Options{
		Host:       "127.0.0.1",
		Port:       server.RANDOM_PORT,
		JetStream:  true,
		StoreDir:   dir,
		SyncAlways: true, // the default confirms what is on the disk two minutes later
		NoSigs:     true,
	})
	if err != nil {
		return nil, fmt.Errorf("make broker: %w", err)
	}
	go srv.Start() // returns when the server is up
	if !srv.ReadyForConnections(startTimeout) {
		srv.Shutdown()
		return nil, errors.New("the broker did not start within " + startTimeout.String())
	}
	return srv, nil
}

// NewPublisher returns Watermill's JetStream publisher. JetStream's own deduplication
// (TrackMsgId) stays off: the inbox needs none.
func NewPublisher(url string) (message.Publisher, error) {
	return wmnats.NewPublisher(wmnats.PublisherConfig{URL: url, NatsOptions: []nats.Option{nats.MaxReconnects(-1)}}, watermill.NopLogger{})
}

// NewSubscriber returns Watermill's JetStream subscriber for one consumer, with settings
// that keep messages in order. It makes the stream of a topic if there is none.
func NewSubscriber(url, consumer string) (message.Subscriber, error) {
	return wmnats.NewSubscriber(wmnats.SubscriberConfig{
		URL:         url,
		NatsOptions: []nats.Option{nats.MaxReconnects(-1)},
		JetStream: wmnats.JetStreamConfig{
			AutoProvision: true,
			DurablePrefix: consumer,
			SubscribeOptions: []nats.SubOpt{
				nats.DeliverAll(),
				nats.AckExplicit(),
				// Otherwise the client also acknowledges what was not handled because of a stop.
				nats.ManualAck(),
				// The time until the message of a consumer that was killed is delivered again.
				nats.AckWait(2 * time.Second),
				// A redelivered message comes after those that were sent meanwhile. With one
				// message at a time there are none.
				nats.MaxAckPending(1),
			},
		},
	}, watermill.NopLogger{})
}
