package amqpconn

import (
	"context"
	"errors"
	"maps"
	"net"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

var errAborted = errors.New("dialing was given up")

// Dial connects, or gives up when ctx ends. open takes the network connection over,
// and returns what to use in its place and how to drop that.
func (s *Settings) Dial(ctx context.Context, open func(raw net.Conn) (wire net.Conn, drop func())) (*amqp.Connection, error) {
	var mu sync.Mutex
	drop := func() {}
	dropped := func() {
		mu.Lock()
		defer mu.Unlock()
		drop()
	}
	// It also covers the handshakes, which know no context.
	stop := context.AfterFunc(ctx, dropped)
	defer stop()
	config := s.config
	config.Dial = func(network, address string) (net.Conn, error) {
		raw, err := s.dialNetwork(ctx, network, address)
		if err != nil {
			return nil, err
		}
		// amqp091-go lifts it when the handshakes are done.
		if err := raw.SetDeadline(time.Now().Add(s.dialTimeout)); err != nil {
			return nil, errors.Join(err, raw.Close())
		}
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() != nil {
			return nil, errors.Join(errAborted, raw.Close())
		}
		var wire net.Conn
		wire, drop = open(raw)
		return wire, nil
	}
	config.Properties = maps.Clone(config.Properties) // amqp091-go writes into both
	if s.tls != nil {
		config.TLSClientConfig = s.tls.Clone()
	}
	conn, err := amqp.DialConfig(s.URI, config)
	if err != nil {
		dropped() // amqp091-go does not after every failure
		return nil, err
	}
	return conn, nil
}

func (s *Settings) dialNetwork(ctx context.Context, network, address string) (net.Conn, error) {
	if s.config.Dial != nil {
		return s.config.Dial(network, address)
	}
	dialer := net.Dialer{Timeout: s.dialTimeout}
	return dialer.DialContext(ctx, network, address)
}
