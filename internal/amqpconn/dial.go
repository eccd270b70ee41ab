package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

var errAborted = errors.New("dialing was given up")

// Dialer connects to the addresses of its settings, one after the other. It must
// not be used by two goroutines at the same time.
type Dialer struct {
	settings *Settings
	next     int // the address to begin with
}

// Dialer returns a dialer that begins with the first address.
func (s *Settings) Dialer() *Dialer { return &Dialer{settings: s} }

// Dial tries each address once and returns the first connection, with the URI that
// it leads to, without the password. The next call begins with the address after
// that one. Dial gives up when ctx ends. open takes the network connection over,
// and returns what to use in its place and how to drop that; it is called for each
// address that accepts a connection.
func (d *Dialer) Dial(ctx context.Context, open func(raw net.Conn) (wire net.Conn, drop func())) (conn *amqp.Connection, shown string, err error) {
	addresses := d.settings.addresses
	var errs []error
	for range addresses {
		a := addresses[d.next]
		conn, err := d.settings.dial(ctx, a, open)
		if ctx.Err() == nil || err == nil {
			d.next = (d.next + 1) % len(addresses)
		}
		if err == nil {
			return conn, a.shown, nil
		}
		if len(addresses) == 1 || ctx.Err() != nil {
			return nil, "", err
		}
		errs = append(errs, fmt.Errorf("%s: %w", a.shown, err))
	}
	return nil, "", errors.Join(errs...)
}

func (s *Settings) dial(ctx context.Context, a address, open func(raw net.Conn) (wire net.Conn, drop func())) (*amqp.Connection, error) {
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
		raw, err := s.dialNetwork(ctx, a, network, address)
		if err != nil {
			return nil, err
		}
		// amqp091-go lifts it when the handshakes are done.
		if err := raw.SetDeadline(time.Now().Add(a.dialTimeout)); err != nil {
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
	conn, err := amqp.DialConfig(a.uri, config)
	if err != nil {
		dropped() // amqp091-go does not after every failure
		return nil, err
	}
	return conn, nil
}

func (s *Settings) dialNetwork(ctx context.Context, a address, network, address string) (net.Conn, error) {
	if s.config.Dial != nil {
		return s.config.Dial(network, address)
	}
	dialer := net.Dialer{Timeout: a.dialTimeout}
	return dialer.DialContext(ctx, network, address)
}
