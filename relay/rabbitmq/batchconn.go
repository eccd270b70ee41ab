package rabbitmq

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// closeGrace is how long a closed connection may still try to send what it was given
// before.
const closeGrace = time.Second

// batchConn is a net.Conn whose Write only appends to a buffer. One goroutine,
// [batchConn.flush], writes the buffer out, so that everything that gathers during one
// system call leaves with the next. amqp091-go makes one call for each publishing, and on
// small machines that call is most of the cost.
//
// Write never waits, for good reason: amqp091-go writes under locks that its reading side
// needs too. A Write that waits for the peer could block the very notification
// (connection.blocked) that explains the wait. Backpressure is provided by room instead,
// which the lanes check before they publish.
//
// A network error is returned by every later Write and closes the connection, which ends
// the reading side. Deadlines apply to the network: a write deadline ends the running
// system call.
type batchConn struct {
	net.Conn

	limit    int64
	accepted atomic.Int64 // bytes accepted so far: the position in the stream of the next one
	written  atomic.Int64 // bytes written out so far
	advanced atomic.Int64 // Unix nanoseconds of the last time that written grew
	short    atomic.Bool  // room has returned false
	drained  func()       // called by flush when there is room again

	wake chan struct{} // capacity 1

	mu      sync.Mutex
	buffer  []byte
	err     error // what Write returns, once set
	closing bool
}

func newBatchConn(conn net.Conn, limit int, drained func()) *batchConn {
	return &batchConn{
		Conn:    conn,
		limit:   int64(limit),
		drained: drained,
		wake:    make(chan struct{}, 1),
	}
}

// Write buffers a copy of p.
func (c *batchConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return 0, c.err
	}
	first := len(c.buffer) == 0
	c.buffer = append(c.buffer, p...)
	c.accepted.Add(int64(len(p)))
	c.mu.Unlock()
	if first {
		poke(c.wake)
	}
	return len(p), nil
}

// room reports whether less than the limit waits to be written. After it has returned
// false, drained is called once there is room.
func (c *batchConn) room() bool {
	if c.buffered() < c.limit {
		return true
	}
	c.short.Store(true)
	// If it was written out in between, nobody would call drained.
	return c.buffered() < c.limit
}

// buffered returns how many bytes were accepted and not yet written out.
func (c *batchConn) buffered() int64 {
	written := c.written.Load() // first: it must not be ahead of accepted
	return c.accepted.Load() - written
}

// Close makes Write and Read fail. Bytes written before are still sent, for at most
// closeGrace; flush then closes the network connection.
func (c *batchConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return nil
	}
	c.closing = true
	if c.err == nil {
		c.err = net.ErrClosed
	}
	// Errors can be ignored: flush closes the connection in any case.
	_ = c.SetWriteDeadline(time.Now().Add(closeGrace))
	_ = c.SetReadDeadline(time.Now())
	poke(c.wake)
	return nil
}

// abort closes the connection at once; buffered bytes are lost.
func (c *batchConn) abort() {
	c.fail(net.ErrClosed)
	poke(c.wake)
}

// flush writes the buffer out until the connection is closed or broken. It must run for as
// long as the connection is used, and returns after Close or abort.
func (c *batchConn) flush() {
	var out []byte
	for range c.wake {
		for {
			var stop bool
			out, stop = c.swap(out)
			if len(out) == 0 {
				if stop {
					c.fail(net.ErrClosed)
					return
				}
				break
			}
			if err := c.writeOut(out); err != nil {
				c.fail(err)
				return
			}
			if int64(cap(out)) > 2*c.limit {
				out = nil // one large message must not keep its buffer for ever
			}
		}
	}
}

// chunk is how much is written with one call. Progress is known after each call.
const chunk = 256 << 10

func (c *batchConn) writeOut(out []byte) error {
	for len(out) > 0 {
		n, err := c.Conn.Write(out[:min(len(out), chunk)])
		if err != nil {
			return err
		}
		out = out[n:]
		c.advanced.Store(time.Now().UnixNano())
		c.written.Add(int64(n))
		if c.buffered() < c.limit && c.short.Swap(false) {
			c.drained()
		}
	}
	return nil
}

// swap trades a written buffer for the one to be written next.
func (c *batchConn) swap(written []byte) (next []byte, stop bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next = c.buffer
	c.buffer = written[:0]
	return next, c.closing
}

// fail makes every later Write return err and closes the network connection.
func (c *batchConn) fail(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.closing = true
	c.buffer = nil
	c.mu.Unlock()
	// The connection is given up; whether it closes properly does not matter.
	_ = c.Conn.Close()
}
