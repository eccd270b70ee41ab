package testserver

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
)

// AMQPProxy stands between a client and a RabbitMQ and misbehaves when told to.
type AMQPProxy struct {
	DropAcks atomic.Bool // the broker's basic.ack and basic.nack do not pass
	Mangle   atomic.Bool // the broker's returns lose their oncemill_id
	Frozen   atomic.Bool // nothing passes
	Dials    atomic.Int32

	target   string
	listener net.Listener
	group    sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn
}

// ProxyAMQP returns a proxy to the broker of uri, which ends with the test, and the URI
// to reach it by.
func ProxyAMQP(t testing.TB, uri string) (*AMQPProxy, string) {
	t.Helper()
	return ProxyAMQPOn(t, uri, Listen(t))
}

// ProxyAMQPOn is ProxyAMQP on a listener, one with TLS say.
func ProxyAMQPOn(t testing.TB, uri string, listener net.Listener) (*AMQPProxy, string) {
	t.Helper()
	u, err := url.Parse(uri)
	if err != nil {
		t.Fatal(err)
	}
	p := &AMQPProxy{target: u.Host, listener: listener}
	u.Host = listener.Addr().String()
	p.group.Go(p.accept)
	t.Cleanup(func() {
		_ = listener.Close()
		p.Cut()
		p.group.Wait()
	})
	return p, u.String()
}

// Listen returns a listener on a free port of the loopback interface.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return listener
}

func (p *AMQPProxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.Dials.Add(1)
		broker, err := new(net.Dialer).DialContext(context.Background(), "tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, broker)
		p.mu.Unlock()
		p.group.Go(func() { p.pass(broker, client, false) })
		p.group.Go(func() { p.pass(client, broker, true) })
	}
}

// Cut closes all connections.
func (p *AMQPProxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

// pass copies from one side to the other, frame by frame if it is the broker's.
func (p *AMQPProxy) pass(to, from net.Conn, frames bool) {
	defer func() { _, _ = to.Close(), from.Close() }()
	buffer := make([]byte, 256<<10) // twice RabbitMQ's frame_max
	for {
		data := buffer
		if frames {
			head := data[:7]
			if _, err := io.ReadFull(from, head); err != nil {
				return
			}
			data = data[:7+int(binary.BigEndian.Uint32(head[3:]))+1]
			if _, err := io.ReadFull(from, data[7:]); err != nil {
				return
			}
		} else {
			n, err := from.Read(data)
			if err != nil {
				return
			}
			data = data[:n]
		}
		if p.Frozen.Load() || frames && p.DropAcks.Load() && isConfirm(data) {
			continue
		}
		if frames && p.Mangle.Load() {
			data = bytes.Replace(data, []byte("oncemill_id"), []byte("oncemill_xx"), 1)
		}
		if _, err := to.Write(data); err != nil {
			return
		}
	}
}

// isConfirm recognises the method frames of basic.ack and basic.nack.
func isConfirm(frame []byte) bool {
	return frame[0] == 1 && (bytes.HasPrefix(frame[7:], []byte{0, 60, 0, 80}) || bytes.HasPrefix(frame[7:], []byte{0, 60, 0, 120}))
}
