package rabbitmq

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// errClosedQuietly is the loss of a connection that came with no reason.
var errClosedQuietly = errors.New("connection closed")

// link is one AMQP connection with the one goroutine, [link.answer], that makes
// all requests on it that the broker answers.
type link struct {
	running *running
	conn    *amqp.Connection
	net     *batchConn
	lost    chan *amqp.Error
	flow    chan amqp.Blocking
	calls   *mailbox[call]
	stop    chan struct{} // closed to end answer

	blocked     atomic.Bool
	unblockedAt atomic.Int64 // Unix nanoseconds, 0 if it never was blocked

	mu       sync.Mutex
	declared map[string]struct{} // exchanges
}

// dial connects. The goroutines of the connection are added to group; they end
// after close, or after abort of the network connection.
func dial(ctx context.Context, r *running, group *sync.WaitGroup) (*link, error) {
	var wire *batchConn
	conn, err := r.settings.conn.Dial(ctx, func(raw net.Conn) (net.Conn, func()) {
		wire = newBatchConn(raw, r.settings.WriteBuffer, r.pokeLanes)
		group.Go(wire.flush)
		return wire, wire.abort
	})
	if err != nil {
		return nil, err
	}
	l := &link{
		running:  r,
		conn:     conn,
		net:      wire,
		lost:     conn.NotifyClose(make(chan *amqp.Error, 1)),
		flow:     conn.NotifyBlocked(make(chan amqp.Blocking, 16)),
		calls:    newMailbox[call](make(chan struct{}, 1)),
		stop:     make(chan struct{}),
		declared: make(map[string]struct{}),
	}
	group.Go(l.answer)
	return l, nil
}

// watch follows the connection until it is lost, which is its error, or ctx ends.
func (l *link) watch(ctx context.Context) error {
	defer close(l.stop)
	log := l.running.settings.Logger
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-l.lost:
			if err == nil {
				return errClosedQuietly
			}
			return err
		case b, open := <-l.flow:
			if !open { // lost follows
				l.flow = nil
				continue
			}
			if b.Active {
				log.WarnContext(ctx, "rabbitmq blocks publishing", "reason", b.Reason)
			} else {
				log.InfoContext(ctx, "rabbitmq takes messages again")
				l.unblockedAt.Store(time.Now().UnixNano())
			}
			l.blocked.Store(b.Active)
			l.running.pokeLanes()
		}
	}
}

// farewell bounds the closing of a connection that is good. Without it the broker
// only logs a line more.
const farewell = 2 * time.Second

// close takes leave of the broker, unless that one is blocked and reads nothing.
func (l *link) close() {
	limit := min(farewell, l.running.settings.CallTimeout)
	if l.blocked.Load() {
		l.net.abort()
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		// The connection goes either way, and nothing hangs on how.
		_ = l.conn.CloseDeadline(time.Now().Add(limit))
	}()
	// CloseDeadline alone would not do: each frame read moves its deadline.
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-closed:
	case <-timer.C:
	}
	l.net.abort()
	<-closed
}
