package relay_test

import (
	"context"
	"encoding/gob"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/relay"
)

// frame is what a worker process sends to the broker.
type frame struct {
	By        string // the process
	Number    uint64 // of the frame, for the reply
	Lane      int
	ID        int64
	MessageID string
	Key       string
	Body      string

	// Expired says that the reply to frame Number did not come in time: the
	// message will be sent again.
	Expired bool

	// Held says that the process has a message in its hands that it holds back.
	Held bool
}

// reply is the broker's word on a frame.
type reply struct {
	Number  uint64
	Outcome outcome
}

type outcome byte

const (
	confirmed outcome = iota
	unavailable
	refused
	unknown
	silence // no reply ever
	release // not a reply: the process is to send what it held back
)

func (o outcome) err() error {
	err := errors.New("said the broker")
	switch o {
	case unavailable:
		return relay.Unavailable(err)
	case refused:
		return relay.Refused(err)
	case unknown:
		return err
	}
	return nil
}

// delivery is a message on the broker's wire.
type delivery struct {
	frame
	at      time.Time
	expired bool // its confirm came too late
}

// broker takes messages from worker processes over TCP. A message is on the wire
// from the moment its frame is read, whatever happens to the process afterwards.
// What the broker does not confirm is not on the wire.
type broker struct {
	listener net.Listener
	decide   func(frame) (outcome, time.Duration) // what to reply, and when
	group    sync.WaitGroup
	closing  chan struct{}
	held     atomic.Int64

	mu         sync.Mutex
	deliveries []delivery
	open       map[string]int // messages of a process that wait for a reply
	conns      []*brokerConn
}

type brokerConn struct {
	net.Conn
	mu  sync.Mutex
	out *gob.Encoder
}

func (c *brokerConn) send(r reply) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.out.Encode(r) // the process may be dead
}

func startBroker(t testing.TB, decide func(frame) (outcome, time.Duration)) *broker {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &broker{listener: listener, decide: decide, closing: make(chan struct{}), open: map[string]int{}}
	b.group.Go(b.accept)
	t.Cleanup(b.close)
	return b
}

func (b *broker) address() string { return b.listener.Addr().String() }

func (b *broker) close() {
	close(b.closing)
	_ = b.listener.Close()
	b.mu.Lock()
	for _, c := range b.conns {
		_ = c.Close()
	}
	b.mu.Unlock()
	b.group.Wait()
}

func (b *broker) accept() {
	for {
		conn, err := b.listener.Accept()
		if err != nil {
			return // closed
		}
		c := &brokerConn{Conn: conn, out: gob.NewEncoder(conn)}
		b.mu.Lock()
		b.conns = append(b.conns, c)
		b.mu.Unlock()
		b.group.Go(func() { b.serve(c) })
	}
}

func (b *broker) serve(c *brokerConn) {
	in := gob.NewDecoder(c)
	placed := map[uint64]int{} // frame number to position in deliveries
	for {
		var f frame
		if in.Decode(&f) != nil {
			return // the process has ended
		}
		if f.Held {
			b.held.Add(1)
			continue
		}
		if f.Expired {
			b.mu.Lock()
			if i, ok := placed[f.Number]; ok {
				b.deliveries[i].expired = true
			}
			b.mu.Unlock()
			continue
		}
		answer, after := b.decide(f)
		b.mu.Lock()
		b.open[f.By]++
		if answer == confirmed {
			placed[f.Number] = len(b.deliveries)
			b.deliveries = append(b.deliveries, delivery{frame: f, at: time.Now()})
		}
		b.mu.Unlock()
		if answer == silence {
			continue
		}
		b.group.Go(func() {
			select {
			case <-time.After(after):
				b.mu.Lock()
				b.open[f.By]--
				b.mu.Unlock()
				c.send(reply{f.Number, answer})
			case <-b.closing:
			}
		})
	}
}

// releaseAll tells every process to send what it held back.
func (b *broker) releaseAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.conns {
		c.send(reply{Outcome: release})
	}
}

// waiting returns how many messages of a process wait for a reply.
func (b *broker) waiting(name string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open[name]
}

func (b *broker) all() []delivery {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.deliveries)
}

// remoteSink is the sink of a worker process: it speaks to the broker.
type remoteSink struct {
	name, address string
	holdBack      string // messages of this key are not sent before the broker's release
	lethal        string // a message that kills the process
	away          atomic.Bool

	mu       sync.Mutex
	last     uint64
	waiting  map[uint64]waiting
	out      []frame
	heldBack []frame
	released bool
	signal   chan struct{}
}

type waiting struct {
	message *relay.Message
	done    func(*relay.Message, error)
}

func newRemoteSink(name, address, holdBack string) *remoteSink {
	return &remoteSink{name: name, address: address, holdBack: holdBack, waiting: map[uint64]waiting{}, signal: make(chan struct{}, 1)}
}

func (s *remoteSink) Run(ctx context.Context) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.address)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	var group sync.WaitGroup
	group.Go(func() { s.write(ctx, conn) })
	in := gob.NewDecoder(conn)
	for {
		var r reply
		if err = in.Decode(&r); err != nil {
			break
		}
		if r.Outcome == release {
			s.sendHeldBack()
		} else {
			s.settle(r.Number, r.Outcome.err())
		}
	}
	if ctx.Err() == nil {
		return err // the test has ended
	}
	group.Wait()
	return nil
}

func (s *remoteSink) write(ctx context.Context, conn net.Conn) {
	out := gob.NewEncoder(conn)
	for {
		select {
		case <-s.signal:
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		frames := s.out
		s.out = nil
		s.mu.Unlock()
		for _, f := range frames {
			if out.Encode(f) != nil {
				return
			}
		}
	}
}

func (s *remoteSink) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	numbers := make([]uint64, len(msgs))
	s.mu.Lock()
	for i, m := range msgs {
		if s.lethal != "" && m.MessageID == s.lethal {
			killMyself()
		}
		s.last++
		numbers[i] = s.last
		s.waiting[s.last] = waiting{m, done}
		f := frame{By: s.name, Number: s.last, Lane: m.Lane, ID: m.ID, MessageID: m.MessageID, Key: m.Key, Body: string(m.Payload)}
		if s.holdBack != "" && m.Key == s.holdBack && !s.released {
			s.heldBack = append(s.heldBack, f)
			s.out = append(s.out, frame{Held: true})
		} else {
			s.out = append(s.out, f)
		}
	}
	s.mu.Unlock()
	s.wake()
	context.AfterFunc(ctx, func() {
		for _, n := range numbers {
			s.settle(n, relay.Unavailable(ctx.Err()), frame{Number: n, Expired: true})
		}
		s.wake()
	})
}

func (s *remoteSink) sendHeldBack() {
	s.mu.Lock()
	s.released = true
	s.out = append(s.out, s.heldBack...)
	s.heldBack = nil
	s.mu.Unlock()
	s.wake()
}

// settle reports the outcome of a frame, unless it has one. What is to be sent
// because of it goes out before whatever the relay does next.
func (s *remoteSink) settle(number uint64, err error, send ...frame) {
	s.mu.Lock()
	w, ok := s.waiting[number]
	delete(s.waiting, number)
	if ok {
		s.out = append(s.out, send...)
	}
	s.mu.Unlock()
	if ok {
		w.done(w.message, err)
	}
}

func (s *remoteSink) wake() {
	select {
	case s.signal <- struct{}{}:
	default:
	}
}
