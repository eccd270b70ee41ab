package rabbitmq_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
)

// proxy stands between a sink and a broker and misbehaves when told to.
type proxy struct {
	t        testing.TB
	target   string
	listener net.Listener
	group    sync.WaitGroup

	dropAcks atomic.Bool // the broker's basic.ack and basic.nack do not pass
	mangle   atomic.Bool // the broker's returns lose their oncemill_id
	frozen   atomic.Bool // nothing passes
	dials    atomic.Int32

	mu    sync.Mutex
	conns []net.Conn
}

// newProxy returns a proxy to the broker of uri and the URI to reach it by.
func newProxy(t testing.TB, uri string, listener net.Listener) (*proxy, string) {
	t.Helper()
	u, err := url.Parse(uri)
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, target: u.Host, listener: listener}
	u.Host = listener.Addr().String()
	p.group.Go(p.accept)
	t.Cleanup(func() {
		_ = listener.Close()
		p.cut()
		p.group.Wait()
	})
	return p, u.String()
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return listener
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
		p.group.Go(func() { p.pass(broker, client, false) })
		p.group.Go(func() { p.pass(client, broker, true) })
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

// pass copies from one side to the other, frame by frame if it is the broker's.
func (p *proxy) pass(to, from net.Conn, frames bool) {
	defer to.Close()
	defer from.Close()
	buffer := make([]byte, 64<<10)
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
		if p.frozen.Load() || frames && p.dropAcks.Load() && isConfirm(data) {
			continue
		}
		if frames && p.mangle.Load() {
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
