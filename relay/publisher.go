package relay

import (
	"context"
	"errors"
	"strconv"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/contain"
	"github.com/oncemill/oncemill/outbox"
)

// FromPublisher makes a sink of any Watermill publisher. A message counts as
// confirmed when Publish returns nil, so the publisher must wait for its
// broker's word: watermill-amqp with ConfirmDelivery, JetStream, watermill-sql.
// An error of Publish is of unknown kind, unless it matches [ErrRefused] or
// [ErrUnavailable].
//
// Messages of one lane are published one after another, lanes at the same time:
// up to 32 calls of Publish at once; [NewPublisherSink] makes fewer. A call that
// does not return holds its lane until the lane's lease has expired, and holds up
// the end of Run: give the publisher a timeout of its own. It is taken for an outage
// and charges nobody, so a message that hangs every publisher it meets is never given
// up: it takes its lane from worker to worker. The publisher is not closed. The sink serves one Relay.Run at a time.
func FromPublisher(p message.Publisher) Sink { return newPublisherSink(p, outbox.Lanes) }

// PublisherConfig configures a sink made of a Watermill publisher.
type PublisherConfig struct {
	// Parallel is how many calls of Publish are under way at once, 1 to 32.
	// Fewer spare a broker, or a pool of connections: with watermill-sql each
	// call needs one. Calls that do not return use their places up. Default:
	// 32, one for each lane; more would be of no use.
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
	calls     chan struct{} // holds one for each call of Publish under way
	lanes     [outbox.Lanes]laneQueue

	mu      sync.Mutex // guards running and the queues of lanes
	running bool
}

type laneQueue struct {
	jobs   []publishJob
	signal chan struct{}
}

type publishJob struct {
	messages []*Message
	expired  <-chan struct{} // closed when the outcomes are due
	done     func(*Message, error)
}

var errSinkStopped = errors.New("the sink is not running")

// MaxInFlight keeps a slow publisher from being handed more than it can publish
// within the deadline.
func (s *publisherSink) MaxInFlight() int { return 4 * cap(s.calls) }

func (s *publisherSink) Run(ctx context.Context) error {
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
	job := publishJob{messages: msgs, expired: ctx.Done(), done: done}
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

// serve publishes one lane's messages until ctx ends. The lock makes sure that a
// job is either taken here or refused in Publish.
func (s *publisherSink) serve(ctx context.Context, lane *laneQueue) {
	for {
		select {
		case <-lane.signal:
		case <-ctx.Done():
		}
		s.mu.Lock()
		jobs := lane.jobs
		lane.jobs = nil
		ended := ctx.Err() != nil
		if ended {
			s.running = false
		}
		s.mu.Unlock()
		for _, job := range jobs {
			if ended {
				job.fail(errSinkStopped)
				continue
			}
			s.publish(ctx, job)
		}
		if ended {
			return
		}
	}
}

func (s *publisherSink) publish(ctx context.Context, job publishJob) {
	for _, m := range job.messages {
		job.done(m, s.publishOne(ctx, job, m))
	}
}

func (s *publisherSink) publishOne(ctx context.Context, job publishJob, m *Message) error {
	select {
	case s.calls <- struct{}{}:
		defer func() { <-s.calls }()
	case <-ctx.Done():
	case <-job.expired:
	}
	// Also of what came at the same time as the place.
	select {
	case <-ctx.Done(): // the lane may be another worker's by now
		return Unavailable(errSinkStopped)
	case <-job.expired:
		return Unavailable(context.DeadlineExceeded)
	default:
		return contain.Call(func() error { return s.publisher.Publish(m.Topic, m.Watermill()) })
	}
}

func (j publishJob) fail(err error) {
	for _, m := range j.messages {
		j.done(m, Unavailable(err))
	}
}
