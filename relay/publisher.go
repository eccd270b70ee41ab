package relay

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/outbox"
)

// FromPublisher adapts a Watermill publisher to a sink. A message counts as confirmed
// when Publish returns nil, so the publisher must wait for the broker's confirmation:
// watermill-amqp with ConfirmDelivery, JetStream, watermill-sql. An error of Publish is
// of unknown kind, unless it matches [ErrRefused] or [ErrUnavailable]: nobody knows whether the broker
// has the message.
//
// Messages of one lane are published one after another, lanes concurrently: up to 32
// concurrent calls of Publish; [NewPublisherSink] makes fewer. A message whose call has
// not returned when its time ends is unavailable. If the call returns nil later, the
// message counts as delivered.
//
// A call that does not return blocks its lane: messages handed over with it, four at most in all, have no
// outcome until the relay gives the lane to another worker. It also delays the end of
// Run, so give the publisher a timeout. A hanging call counts as an outage and charges
// no message, so a message that hangs every publisher is never given up. The publisher
// is not closed. The sink serves one Relay.Run at a time; a second one returns an error.
func FromPublisher(p message.Publisher) Sink { return newPublisherSink(p, outbox.Lanes) }

// PublisherConfig configures a sink made of a Watermill publisher.
type PublisherConfig struct {
	// Parallel is the number of concurrent calls of Publish, 1 to 32. Fewer spare a
	// broker, or a connection pool: with watermill-sql each call needs a connection.
	// Calls that do not return keep their slots. Default: 32, one for each lane; more
	// would be of no use.
	Parallel int
}

// NewPublisherSink is [FromPublisher] with a configuration. All bad values are
// reported at once, each as an [*oncemill.ConfigError].
func NewPublisherSink(p message.Publisher, cfg PublisherConfig) (Sink, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "relay." + field, Value: value, Problem: problem})
	}
	if p == nil {
		bad("NewPublisherSink p", "nil", "a publisher is needed")
	}
	switch {
	case cfg.Parallel == 0:
		cfg.Parallel = outbox.Lanes
	case cfg.Parallel < 0 || cfg.Parallel > outbox.Lanes:
		bad("PublisherConfig.Parallel", strconv.Itoa(cfg.Parallel), "must be 1 to "+strconv.Itoa(outbox.Lanes)+", or 0 for that")
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return newPublisherSink(p, cfg.Parallel), nil
}

func newPublisherSink(p message.Publisher, parallel int) Sink {
	s := &publisherSink{publisher: p, calls: make(chan struct{}, parallel)}
	for i := range s.lanes {
		s.lanes[i].signal = make(chan struct{}, 1)
	}
	return s
}

type publisherSink struct {
	publisher message.Publisher
	calls     chan struct{} // holds one for each running call of Publish
	lanes     [outbox.Lanes]laneQueue

	served atomic.Bool // by a Run

	mu      sync.Mutex // guards running and the queues of lanes
	running bool       // jobs are taken
}

type laneQueue struct {
	jobs   []*publishJob
	signal chan struct{}
	call   *publishCall // running for a message already reported unavailable; belongs to serve
}

type publishCall struct {
	message  *Message
	done     func(*Message, error)
	err      error
	returned chan struct{} // closed after err is set
}

type publishJob struct {
	messages []*Message      // nil when delivered by an earlier call
	expired  <-chan struct{} // closed when the outcomes are due
	done     func(*Message, error)
}

var (
	errSinkStopped = errors.New("the sink is not running")
	errSinkRunning = errors.New("the sink of the publisher is already running; make one for each Run")

	errEndedGoroutine = errors.New("Publish ended its goroutine")
)

// ofCall is how many messages are handed over for each call that may run at a time.
const ofCall = 4

// MaxInFlight keeps a slow publisher from being handed more than it can publish before
// the deadline.
func (s *publisherSink) MaxInFlight() int { return ofCall * cap(s.calls) }

// laneBound is a sink that bounds what is handed to it of one lane, which a call that does not return keeps.
type laneBound interface{ mostOfLane() int }

// Lanes whose calls hang take all places only when they have taken all calls.
func (*publisherSink) mostOfLane() int { return ofCall }

// Run returns an error while another Run serves the lanes: two would publish the messages
// of one lane at the same time.
func (s *publisherSink) Run(ctx context.Context) error {
	if !s.served.CompareAndSwap(false, true) {
		return errSinkRunning
	}
	defer s.served.Store(false)
	s.mu.Lock()
	s.running = true
	s.mu.Unlock()
	var group errgroup.Group
	for i := range s.lanes {
		group.Go(func() error {
			s.serve(ctx, &s.lanes[i])
			return nil
		})
	}
	return group.Wait()
}

func (s *publisherSink) Publish(ctx context.Context, msgs []*Message, done func(*Message, error)) {
	job := &publishJob{messages: slices.Clone(msgs), expired: ctx.Done(), done: done}
	lane := &s.lanes[msgs[0].Lane]
	s.mu.Lock()
	running := s.running
	if running {
		lane.jobs = append(lane.jobs, job)
	}
	s.mu.Unlock()
	if !running {
		job.fail(errSinkStopped)
		return
	}
	raise(lane.signal)
}

// serve publishes one lane's messages until ctx ends. The lock ensures that a job is
// either taken here or refused in Publish.
func (s *publisherSink) serve(ctx context.Context, lane *laneQueue) {
	for {
		job, ended := s.next(ctx, lane)
		switch {
		case job != nil && ended:
			job.fail(errSinkStopped)
		case job != nil:
			s.publish(ctx, lane, job)
		case ended:
			s.awaitCall(lane, nil)
			return
		default:
			var returned <-chan struct{}
			if lane.call != nil {
				returned = lane.call.returned
			}
			select {
			case <-lane.signal:
			case <-returned:
				s.awaitCall(lane, nil)
			case <-ctx.Done():
			}
		}
	}
}

// next takes the lane's oldest job, if there is one. Once ctx has ended, no job is
// added.
func (s *publisherSink) next(ctx context.Context, lane *laneQueue) (job *publishJob, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ended = ctx.Err() != nil; ended {
		s.running = false
	}
	if len(lane.jobs) > 0 {
		job, lane.jobs = lane.jobs[0], lane.jobs[1:]
	}
	return job, ended
}

func (s *publisherSink) publish(ctx context.Context, lane *laneQueue, job *publishJob) {
	for i := range job.messages {
		s.awaitCall(lane, job)
		if m := job.messages[i]; m != nil {
			job.done(m, s.publishOne(ctx, lane, job, m))
		}
	}
}

// awaitCall waits for a call that has exceeded its message's time: messages of one lane
// are published one after another. If it returns nil, the message is delivered and is
// not published again, even if it waits in current or in the queue.
func (s *publisherSink) awaitCall(lane *laneQueue, current *publishJob) {
	c := lane.call
	if c == nil {
		return
	}
	<-c.returned
	lane.call = nil
	if c.err != nil {
		return // the message has its outcome
	}
	m, done := c.message, c.done
	s.mu.Lock()
	for _, job := range append(slices.Clone(lane.jobs), current) {
		if again := job.drop(c.message); again != nil {
			m, done = again, job.done
		}
	}
	s.mu.Unlock()
	done(m, nil)
}

func (s *publisherSink) publishOne(ctx context.Context, lane *laneQueue, job *publishJob, m *Message) error {
	select {
	case s.calls <- struct{}{}:
	case <-ctx.Done():
		return Unavailable(errSinkStopped)
	case <-job.expired:
		return Unavailable(context.DeadlineExceeded)
	}
	// Also of what came at the same time as the place.
	select {
	case <-ctx.Done(): // the lane may belong to another worker by now
		<-s.calls
		return Unavailable(errSinkStopped)
	case <-job.expired:
		<-s.calls
		return Unavailable(context.DeadlineExceeded)
	default:
	}
	c := &publishCall{message: m, done: job.done, err: errEndedGoroutine, returned: make(chan struct{})}
	go func() { // awaited below, or by awaitCall
		defer func() {
			<-s.calls
			close(c.returned)
		}()
		c.err = nopanic.Call(func() error { return s.publisher.Publish(m.Topic, m.Watermill()) })
	}()
	select {
	case <-c.returned:
		return c.err
	case <-job.expired:
		lane.call = c
		return Unavailable(context.DeadlineExceeded)
	}
}

// drop removes the message of a row from the job, which may be nil, and returns it.
func (j *publishJob) drop(m *Message) *Message {
	if j == nil {
		return nil
	}
	i := slices.IndexFunc(j.messages, func(o *Message) bool { return o != nil && o.SameRow(m) })
	if i < 0 {
		return nil
	}
	again := j.messages[i]
	j.messages[i] = nil
	return again
}

func (j *publishJob) fail(err error) {
	for _, m := range j.messages {
		if m != nil {
			j.done(m, Unavailable(err))
		}
	}
}
