package main

import (
	"container/list"
	"net"
	"sync"
)

// boundedListener has at most a number of connections. A new one beyond that closes the oldest,
// so that clients which open many and leave them idle keep nobody else out.
type boundedListener struct {
	net.Listener
	most int

	mu   sync.Mutex // guards open
	open list.List  // of *boundedConn, the oldest first
}

type boundedConn struct {
	net.Conn
	of *boundedListener
	at *list.Element // in of.open
}

func (l *boundedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	bounded := &boundedConn{Conn: conn, of: l}
	l.mu.Lock()
	bounded.at = l.open.PushBack(bounded)
	var oldest *boundedConn
	if l.open.Len() > l.most {
		oldest, _ = l.open.Remove(l.open.Front()).(*boundedConn)
	}
	l.mu.Unlock()
	if oldest != nil {
		_ = oldest.Conn.Close() // its server sees that, and closes it as well
	}
	return bounded, nil
}

func (c *boundedConn) Close() error {
	c.of.mu.Lock()
	c.of.open.Remove(c.at) // of no effect on one that was removed
	c.of.mu.Unlock()
	return c.Conn.Close()
}
