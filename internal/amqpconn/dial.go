package amqpconn

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"strconv"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

var (
	errAborted = errors.New("dialing was canceled")
	errBadURI  = errors.New("the URI cannot be parsed")
)

// Dialer connects to the addresses of its settings, one after the other. It is not safe for
// concurrent use.
type Dialer struct {
	settings *Settings
	next     int // the address to try first
}

// Dialer returns a dialer that begins with the first address.
func (s *Settings) Dialer() *Dialer { return &Dialer{settings: s} }

// Dial tries each address once, until ctx ends. It returns the first connection, with its URI
// without the password. The next call starts with the address after the last one. open is called
// for each network connection. It returns the connection to use instead, and how to drop it.
func (d *Dialer) Dial(ctx context.Context, open func(raw net.Conn) (wire net.Conn, drop func())) (conn *amqp.Connection, shown string, err error) {
	addresses := d.settings.addresses
	var errs []error
	for range addresses {
		a := addresses[d.next]
		conn, err := d.settings.dial(ctx, a, open)
		d.next = (d.next + 1) % len(addresses) // a silent one may have taken all the time
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
	// This also ends the handshakes, which take no context.
	stop := context.AfterFunc(ctx, dropped)
	defer stop()
	config := s.config
	config.Dial = func(network, address string) (net.Conn, error) {
		raw, err := s.dialNetwork(ctx, a, network, address)
		if err != nil {
			return nil, err
		}
		// amqp091-go removes the deadline after the handshakes.
		if err := raw.SetDeadline(time.Now().Add(a.dialTimeout)); err != nil {
			return nil, errors.Join(err, raw.Close())
		}
		wire, err := func() (net.Conn, error) {
			mu.Lock()
			defer mu.Unlock()
			if ctx.Err() != nil {
				return nil, errors.Join(errAborted, raw.Close())
			}
			var wire net.Conn
			wire, drop = open(raw)
			return wire, nil
		}()
		if err != nil || !s.tolerant {
			return wire, err
		}
		return s.tolerate(ctx, a, wire)
	}
	config.Properties = maps.Clone(config.Properties) // amqp091-go writes to both
	if s.tls != nil {
		config.TLSClientConfig = s.tls.Clone()
	}
	uri := a.uri
	if s.tolerant {
		uri = a.plain
	}
	conn, err := amqp.DialConfig(uri, config)
	if err != nil {
		dropped() // amqp091-go does not close it after every failure
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

// tolerate makes a connection tolerant. It adds TLS itself if the address has it, since the
// frames must be read inside of TLS; amqp091-go gets a URI without TLS.
func (s *Settings) tolerate(ctx context.Context, a address, wire net.Conn) (net.Conn, error) {
	if a.plain == a.uri {
		return newTolerant(wire), nil
	}
	config, err := s.tlsFor(a)
	if err != nil {
		return nil, errors.Join(err, wire.Close())
	}
	client := tls.Client(wire, config)
	if err := client.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, wire.Close())
	}
	return newTolerant(client), nil
}

// tlsFor returns the TLS configuration that amqp091-go would use for the address.
func (s *Settings) tlsFor(a address) (*tls.Config, error) {
	uri, err := amqp.ParseURI(a.uri)
	if err != nil {
		return nil, errBadURI // the parser's error quotes the URI
	}
	config := s.tls.Clone()
	if config == nil {
		config = &tls.Config{ServerName: uri.ServerName, MinVersion: tls.VersionTLS12}
		if uri.CACertFile != "" {
			pem, err := os.ReadFile(uri.CACertFile)
			if err != nil {
				return nil, fmt.Errorf("read CA certificate: %w", err)
			}
			config.RootCAs = x509.NewCertPool()
			config.RootCAs.AppendCertsFromPEM(pem)
		}
		if uri.CertFile != "" && uri.KeyFile != "" {
			certificate, err := tls.LoadX509KeyPair(uri.CertFile, uri.KeyFile)
			if err != nil {
				return nil, fmt.Errorf("load client certificate: %w", err)
			}
			config.Certificates = []tls.Certificate{certificate}
		}
	}
	if config.ServerName == "" {
		config.ServerName = uri.Host
	}
	return config, nil
}

// withoutTLS returns the URI for connections whose TLS this package adds.
func withoutTLS(text string, uri amqp.URI) string {
	if uri.Scheme != "amqps" {
		return text
	}
	u, err := url.Parse(text)
	if err != nil {
		return text // amqp091-go's parser has accepted it
	}
	u.Scheme, u.Host = "amqp", net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port))
	return u.String()
}
