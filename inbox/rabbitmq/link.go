package rabbitmq

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/oncemill/oncemill/internal/nopanic"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/amqpconn"
)

// connector keeps the one connection that all subscriptions share, and dials a new one
// when a subscription finds it lost.
type connector struct {
	settings *settings
	turn     chan struct{} // capacity 1: holds a token while somebody uses dialer and link
	dialer   *amqpconn.Dialer
	link     *link
}

func newConnector(s *settings) *connector {
	return &connector{settings: s, turn: make(chan struct{}, 1), dialer: s.conn.Dialer()}
}

// get returns a connection that was usable a moment ago.
func (c *connector) get(ctx context.Context) (*link, error) {
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-c.turn }()
	if c.link != nil && !c.link.conn.IsClosed() {
		return c.link, nil
	}
	l, err := dial(ctx, c.settings, c.dialer)
	if err != nil {
		return nil, err
	}
	c.link = l
	return l, nil
}

// close closes the connection to the broker. get must not be called any more.
func (c *connector) close() {
	if c.link != nil {
		c.link.close()
	}
}

// link is one AMQP connection.
type link struct {
	settings *settings
	conn     *amqp.Connection
	shown    string // where it leads, without the password
	wire     net.Conn
}

func dial(ctx context.Context, s *settings, dialer *amqpconn.Dialer) (*link, error) {
	l := &link{settings: s}
	conn, shown, err := dialer.Dial(ctx, func(raw net.Conn) (net.Conn, func()) {
		l.wire = raw
		return raw, func() { _ = raw.Close() } // given up
	})
	if err != nil {
		return nil, err
	}
	l.conn, l.shown = conn, shown
	return l, nil
}

// within runs a request that the broker answers. amqp091-go waits for the answer without a
// limit. If it does not arrive in time, the connection is dropped, which makes every
// request fail.
func (l *link) within(request func() error) error {
	answered := nopanic.Apart(request)
	timer := time.NewTimer(l.settings.CallTimeout)
	defer timer.Stop()
	select {
	case err := <-answered:
		return err
	case <-timer.C:
		_ = l.wire.Close() // given up
		return errors.Join(errCallTimeout, <-answered)
	}
}

// closeLimit bounds the closing of a working connection. Without a proper close the broker
// only logs one more line.
const closeLimit = 2 * time.Second

func (l *link) close() {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		// The connection ends in any case; the result does not matter.
		_ = l.conn.CloseDeadline(time.Now().Add(closeLimit))
	}()
	timer := time.NewTimer(closeLimit)
	defer timer.Stop()
	select {
	case <-closed:
	case <-timer.C:
	}
	_ = l.wire.Close() // closed already, or given up
	<-closed
}
