package rabbitmq_test

import (
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
)

// proxy stands between a subscriber and a broker and cuts connections.
type proxy struct {
	direct   string // the URI without the proxy
	target   string
	listener net.Listener
	group    sync.WaitGroup
	dials    atomic.Int32
	frozen   atomic.Bool // what the broker says does not pass

	mu    sync.Mutex
	conns []net.Conn
}

// newProxy returns a proxy to the broker of uri and the URI to reach it by.
func newProxy(t testing.TB, uri string) (*proxy, string) {
	t.Helper()
	u, err := url.Parse(uri)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{direct: uri, target: u.Host, listener: listener}
	u.Host = listener.Addr().String()
	p.group.Go(p.accept)
	t.Cleanup(func() {
		_ = listener.Close()
		p.cut()
		p.group.Wait()
	})
	return p, u.String()
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.dials.Add(1)
		broker, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, broker)
		p.mu.Unlock()
		p.group.Go(func() { p.pass(broker, client, nil) })
		p.group.Go(func() { p.pass(client, broker, &p.frozen) })
	}
}

// cut closes all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

func (p *proxy) pass(to, from net.Conn, mute *atomic.Bool) {
	defer to.Close()
	defer from.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		if mute != nil && mute.Load() {
			_, _ = io.Discard.Write(buffer[:n])
			continue
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}
