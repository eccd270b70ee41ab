package rabbitmq

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/amqpconn"
)

// errClosedQuietly is the error of a connection that was lost without a reason.
var errClosedQuietly = errors.New("connection closed")

// link is one AMQP connection. [link.answer] makes all requests on it that the broker answers.
type link struct {
	running *running
	conn    *amqp.Connection
	shown   string // where it leads, without the password
	net     *batchConn
	lost    chan *amqp.Error
	flow    chan amqp.Blocking
	calls   *mailbox[call]
	stop    chan struct{} // closed to end answer

	blocked     atomic.Bool
	unblockedAt atomic.Int64 // Unix nanoseconds, 0 if it never was blocked
	grantedAt   atomic.Int64 // Unix nanoseconds of the last request that was granted
	answeredAt  atomic.Int64 // Unix nanoseconds of the last confirm or nack, on any channel
	answered    mark         // of all messages

	group *sync.WaitGroup // of Run

	controls chan *amqp.Channel // for declarations; nil: not opened yet

	mu        sync.Mutex
	declared  map[string]struct{}      // exchanges
	declaring map[string][]func(error) // who waits for the answer, by exchange
	marks     map[string]*mark         // by topic
}

// mark is the highest position in the stream of bytes at which a confirmed message begins;
// for a whole connection, an answered one. A message that ends before it was sent earlier.
type mark struct{ atomic.Int64 }

func (m *mark) reach(begin int64) {
	for old := m.Load(); begin > old; old = m.Load() {
		if m.CompareAndSwap(old, begin) {
			return
		}
	}
}

// mark returns the mark of a topic, which the lanes share.
func (l *link) mark(topic string) *mark {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.marks[topic]
	if m == nil {
		if len(l.marks) >= maxRoutes {
			clear(l.marks)
		}
		m = &mark{}
		l.marks[topic] = m
	}
	return m
}

// dial connects. The goroutines of the connection are added to group; they end
// after close, or after abort of the network connection.
func dial(ctx context.Context, r *running, dialer *amqpconn.Dialer, group *sync.WaitGroup) (*link, error) {
	var wire *batchConn
	conn, shown, err := dialer.Dial(ctx, func(raw net.Conn) (net.Conn, func()) {
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
		shown:    shown,
		net:      wire,
		lost:     conn.NotifyClose(make(chan *amqp.Error, 1)),
		flow:     conn.NotifyBlocked(make(chan amqp.Blocking, 16)),
		calls:    newMailbox[call](make(chan struct{}, 1)),
		stop:     make(chan struct{}),
		group:    group,
		controls: make(chan *amqp.Channel, declarations),

		declared:  make(map[string]struct{}),
		declaring: make(map[string][]func(error)),
		marks:     make(map[string]*mark),
	}
	for range declarations {
		l.controls <- nil
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
				log.InfoContext(ctx, "rabbitmq accepts messages again")
				l.unblockedAt.Store(time.Now().UnixNano())
			}
			l.blocked.Store(b.Active)
			l.running.pokeLanes()
		}
	}
}

// closeLimit bounds the closing of a working connection. Without a proper close the broker
// only logs one more line.
const closeLimit = 2 * time.Second

// close closes the connection, unless the broker is blocked and reads nothing.
func (l *link) close() {
	limit := min(closeLimit, l.running.settings.CallTimeout)
	if l.blocked.Load() {
		l.net.abort()
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		// The connection ends in any case; the result does not matter.
		_ = l.conn.CloseDeadline(time.Now().Add(limit))
	}()
	// CloseDeadline alone is not enough: each frame read extends its deadline.
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-closed:
	case <-timer.C:
	}
	l.net.abort()
	<-closed
}
