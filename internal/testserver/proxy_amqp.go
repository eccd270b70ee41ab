package testserver

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// AMQPProxy is a proxy between a client and RabbitMQ that injects faults.
type AMQPProxy struct {
	DropAcks atomic.Bool  // drop the broker's basic.ack and basic.nack
	Mangle   atomic.Bool  // remove oncemill_id from the broker's returns
	Frozen   atomic.Bool  // pass nothing on
	Delay    atomic.Int64 // of the broker's frames, in nanoseconds
	Rate     atomic.Int64 // bytes a second to the broker; 0: no limit
	Dials    atomic.Int32
	Dropped  atomic.Int32 // frames that DropAcks has dropped

	// HoldAcks is the number of the AMQP channel, in each connection, whose confirms are
	// held back until ReleaseAcks. 0: none.
	HoldAcks atomic.Int32

	// HoldOpen is the number of the AMQP channel, in each connection, that the broker's
	// answer to its opening does not reach until ReleaseAcks. 0: none.
	HoldOpen atomic.Int32

	target    string
	listener  net.Listener
	accepting sync.WaitGroup
	group     sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn
	held  []func()
}

// ProxyAMQP returns a proxy to the broker of uri, closed when the test ends, and its URI.
func ProxyAMQP(t testing.TB, uri string) (*AMQPProxy, string) {
	t.Helper()
	return ProxyAMQPOn(t, uri, Listen(t))
}

// ProxyAMQPOn is ProxyAMQP on a given listener, for example one with TLS.
func ProxyAMQPOn(t testing.TB, uri string, listener net.Listener) (*AMQPProxy, string) {
	t.Helper()
	p, proxied, err := serveAMQP(uri, listener)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p, proxied
}

// StartAMQPProxy is ProxyAMQP for programs, which call Close.
func StartAMQPProxy(ctx context.Context, uri string) (*AMQPProxy, string, error) {
	listener, err := listen(ctx)
	if err != nil {
		return nil, "", err
	}
	return serveAMQP(uri, listener)
}

func serveAMQP(uri string, listener net.Listener) (*AMQPProxy, string, error) {
	u, err := url.Parse(uri)
	if err != nil {
		return nil, "", errors.Join(errors.New("testserver: the URI of the RabbitMQ cannot be parsed"), listener.Close())
	}
	p := &AMQPProxy{target: u.Host, listener: listener}
	u.Host = listener.Addr().String()
	p.accepting.Go(p.accept)
	return p, u.String(), nil
}

// Close ends the proxy and its connections.
func (p *AMQPProxy) Close() {
	_ = p.listener.Close()
	p.accepting.Wait() // or one more connection might come after Cut
	p.Cut()
	p.group.Wait()
}

// Listen returns a listener on a free port of the loopback interface.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	listener, err := listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return listener
}

func listen(ctx context.Context) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
}

func (p *AMQPProxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.Dials.Add(1)
		// So that little of what a client has written is waiting here. A TLS client's is not limited.
		if tcp, ok := client.(*net.TCPConn); ok {
			_ = tcp.SetReadBuffer(256 << 10)
		}
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

// ReleaseAcks passes on what HoldAcks and HoldOpen held back, and all further frames.
func (p *AMQPProxy) ReleaseAcks() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.HoldAcks.Store(0)
	p.HoldOpen.Store(0)
	for _, send := range p.held {
		send()
	}
	p.held = nil
}

// Held returns the number of frames that HoldAcks and HoldOpen hold back.
func (p *AMQPProxy) Held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.held)
}

// pass copies from one side to the other; the broker's side frame by frame.
func (p *AMQPProxy) pass(to, from net.Conn, frames bool) {
	defer func() { _, _ = to.Close(), from.Close() }()
	if frames {
		p.passFrames(to, from)
		return
	}
	buffer := make([]byte, proxyBuffer)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		if p.Frozen.Load() {
			continue
		}
		if rate := p.Rate.Load(); rate > 0 {
			time.Sleep(time.Duration(n) * time.Second / time.Duration(rate))
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// late is a frame to pass on at a later time.
type late struct {
	frame []byte
	due   time.Time
}

// passFrames writes together what has arrived together: each write wakes the client.
func (p *AMQPProxy) passFrames(to, from net.Conn) {
	var mu sync.Mutex // ReleaseAcks writes too
	writer := bufio.NewWriterSize(to, proxyBuffer)
	send := func(frame []byte, last bool) error {
		mu.Lock()
		defer mu.Unlock()
		_, err := writer.Write(frame)
		if last {
			err = cmp.Or(err, writer.Flush())
		}
		return err
	}
	queue := make(chan late, 1<<16)
	p.group.Go(func() {
		failed := false
		for l := range queue {
			if failed {
				continue
			}
			if wait := time.Until(l.due); wait > 0 {
				_ = send(nil, true) // an error means that the next one fails, too
				time.Sleep(wait)
			}
			if failed = send(l.frame, len(queue) == 0) != nil; failed {
				_ = from.Close()
			}
		}
	})
	defer close(queue)
	for reader := bufio.NewReaderSize(from, proxyBuffer); ; {
		frame, err := readFrame(reader)
		switch {
		case err != nil:
			return
		case p.Frozen.Load():
			continue
		case p.DropAcks.Load() && isConfirm(frame):
			p.Dropped.Add(1)
			continue
		case p.Mangle.Load():
			frame = bytes.Replace(frame, []byte("oncemill_id"), []byte("oncemill_xx"), 1)
		}
		if p.hold(frame, send) {
			continue
		}
		queue <- late{frame, time.Now().Add(time.Duration(p.Delay.Load()))}
	}
}

// proxyBuffer is how much a proxy reads and writes at once.
const proxyBuffer = 64 << 10

func readFrame(from io.Reader) ([]byte, error) {
	head := make([]byte, 7)
	if _, err := io.ReadFull(from, head); err != nil {
		return nil, err
	}
	frame := append(head, make([]byte, binary.BigEndian.Uint32(head[3:])+1)...)
	_, err := io.ReadFull(from, frame[7:])
	return frame, err
}

// hold holds a frame back if HoldAcks or HoldOpen applies to it.
func (p *AMQPProxy) hold(frame []byte, send func([]byte, bool) error) bool {
	p.mu.Lock() // frames that arrive during a release are not held
	defer p.mu.Unlock()
	channel := int32(binary.BigEndian.Uint16(frame[1:]))
	if channel == 0 || (channel != p.HoldAcks.Load() || !isConfirm(frame)) && (channel != p.HoldOpen.Load() || !isOpened(frame)) {
		return false
	}
	p.held = append(p.held, func() { _ = send(frame, true) }) // an error means that the connection is gone
	return true
}

// isOpened recognizes the method frame of channel.open-ok.
func isOpened(frame []byte) bool {
	return frame[0] == 1 && bytes.HasPrefix(frame[7:], []byte{0, 20, 0, 11})
}

// isConfirm recognizes the method frames of basic.ack and basic.nack.
func isConfirm(frame []byte) bool {
	return frame[0] == 1 && (bytes.HasPrefix(frame[7:], []byte{0, 60, 0, 80}) || bytes.HasPrefix(frame[7:], []byte{0, 60, 0, 120}))
}
