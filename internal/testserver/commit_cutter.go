package testserver

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// CommitCutter is a proxy that, once armed, cuts the next connection that sends a
// commit: before the commit reaches the server, or after the server has answered.
type CommitCutter struct {
	DSN string // of PostgreSQL, through the proxy

	server  string
	arrives bool
	armed   atomic.Bool
}

// NewCommitCutter returns a proxy to the server of dsn, closed when the test ends. If arrives,
// the commit reaches the server.
func NewCommitCutter(t *testing.T, dsn string, arrives bool) *CommitCutter {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener := Listen(t)
	c := &CommitCutter{server: u.Host, arrives: arrives}
	u.Host = listener.Addr().String()
	c.DSN = u.String()
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { c.serve(t, client) })
		}
	})
	t.Cleanup(func() {
		if err := listener.Close(); err != nil {
			t.Error(err)
		}
		running.Wait()
	})
	return c
}

// Arm cuts the connection of the next commit.
func (c *CommitCutter) Arm() { c.armed.Store(true) }

func (c *CommitCutter) serve(t *testing.T, client net.Conn) {
	defer func() { _ = client.Close() }()
	server, err := new(net.Dialer).DialContext(context.WithoutCancel(t.Context()), "tcp", c.server)
	if err != nil {
		t.Error(err)
		return
	}
	var answers sync.WaitGroup
	defer answers.Wait()
	defer func() { _ = server.Close() }()
	var mute atomic.Bool // answers are not passed on
	answered := make(chan struct{})
	answers.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := server.Read(buf)
			switch {
			case mute.Load():
				close(answered)
				return
			case err != nil:
				_ = client.Close() // ends the reader of the other direction
				return
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
	})
	size := 0 // of the type of a packet; the first has none
	for {
		packet, err := readPacket(client, size)
		if err != nil {
			return
		}
		size = 1
		isCommit := packet[0] == 'Q' && strings.HasPrefix(strings.ToUpper(string(packet[5:])), "COMMIT")
		if isCommit && c.armed.CompareAndSwap(true, false) {
			if c.arrives {
				mute.Store(true)
				if _, err := server.Write(packet); err != nil {
					t.Error(err)
				}
				<-answered
			}
			return
		}
		if _, err := server.Write(packet); err != nil {
			return
		}
	}
}

// readPacket reads a packet of PostgreSQL's protocol: a type, a length that includes itself,
// and the content.
func readPacket(r io.Reader, typeSize int) ([]byte, error) {
	head := make([]byte, typeSize+4)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	length := int(binary.BigEndian.Uint32(head[typeSize:]))
	if length < 4 {
		return nil, errors.New("not a packet")
	}
	packet := append(head, make([]byte, length-4)...)
	_, err := io.ReadFull(r, packet[len(head):])
	return packet, err
}
