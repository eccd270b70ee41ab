package relay_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// publisherFunc is a Watermill publisher.
type publisherFunc func(topic string, msg *message.Message) error

func (f publisherFunc) Publish(topic string, messages ...*message.Message) error {
	for _, m := range messages {
		if err := f(topic, m); err != nil {
			return err
		}
	}
	return nil
}

func (publisherFunc) Close() error { return errors.New("not the relay's to close") }

// note records a Watermill message on a wire.
func (w *wire) note(by string, m *message.Message) {
	w.record(by, &relay.Message{MessageID: m.UUID, Key: m.Metadata.Get(outbox.KeyMetadata)})
}

func TestFromPublisher_DeliversToGoChannel(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		channel := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 10, BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
		received, err := channel.Subscribe(t.Context(), "orders")
		if err != nil {
			t.Fatal(err)
		}
		w := &wire{}
		var group sync.WaitGroup
		group.Go(func() {
			for m := range received {
				if string(m.Payload) != "payload" || m.Metadata.Get("colour") != "blue" {
					t.Errorf("message %s has payload %q, metadata %v", m.UUID, m.Payload, m.Metadata)
				}
				w.note("channel", m)
				m.Ack()
			}
		})
		box := p.box(t)
		r := start(t, box, relay.FromPublisher(channel), unhurried)
		all := append(spread(20, 5), unkeyed(20)...)
		for _, m := range all {
			m.Metadata.Set("colour", "blue")
		}
		commit(t, box, all...)
		p.awaitNothingOwed(t)
		r.stop()
		if err := channel.Close(); err != nil {
			t.Error(err)
		}
		group.Wait()
		w.check(t, all, 0)
	})
}

// These make a publisher panic, or end its goroutine.
var (
	errPanic  = errors.New("panic")
	errGoexit = errors.New("goexit")
)

func TestFromPublisher_PassesErrorsOn(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	box, w := p.box(t), &wire{}
	var calls atomic.Int64
	var errs sync.Map
	publisher := publisherFunc(func(topic string, m *message.Message) error {
		if topic != "orders" {
			t.Errorf("topic %q", topic)
		}
		calls.Add(1)
		if err, ok := errs.LoadAndDelete(m.UUID); ok {
			switch err := err.(error); {
			case errors.Is(err, errPanic):
				panic(err)
			case errors.Is(err, errGoexit):
				runtime.Goexit()
			default:
				return err
			}
		}
		w.note("publisher", m)
		return nil
	})
	// One lane for each, so that no success in between makes it try sooner.
	cause := errors.New("cause")
	var all []*message.Message
	for i, err := range []error{cause, relay.Refused(cause), relay.Unavailable(cause), fmt.Errorf("wrapped: %w", relay.Refused(cause)), errPanic, errGoexit} {
		msgs := keyed(keysOfLane(i, 1)[0], 0, 3)
		errs.Store(msgs[1].UUID, err)
		all = append(all, msgs...)
	}
	r := start(t, box, relay.FromPublisher(publisher), unhurried)
	commit(t, box, all...)
	p.awaitNothingOwed(t)
	w.check(t, all, 0)
	for outcome, want := range map[string]int{"confirmed": len(all), "unknown": 3, "refused": 2, "unavailable": 1} {
		if n := r.outcomes(t, outcome); n != want {
			t.Errorf("%d counted as %s, want %d", n, outcome, want)
		}
	}
	if n := int(calls.Load()); n != len(all)+6 {
		t.Errorf("%d calls, want one for each message and one more for each failure", n)
	}
}

// The text of the failure is one line; beside it is where the publisher panicked.
func TestFromPublisher_LogsTheStackOfAPanic(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	box, log := p.box(t), &logbook{}
	panicking := publisherFunc(func(string, *message.Message) error { panic(relay.Refused(errPanic)) })
	cfg := unhurried
	cfg.Logger, cfg.Retry.MaxAttempts = slog.New(log), 1
	start(t, box, relay.FromPublisher(panicking), cfg)
	commit(t, box, keyed("key", 0, 1)...)
	const dead = "message dead-lettered"
	testserver.Eventually(t, "it is dead-lettered", func() bool { return log.count(dead) > 0 })
	if text := log.attr(dead, "error"); text == "" || strings.Contains(text, "\n") {
		t.Errorf("the error is %q", text)
	}
	if stack := log.attr(dead, "stack"); !strings.Contains(stack, t.Name()) {
		t.Errorf("the stack is %q", stack)
	}
}

// A call that does not return keeps its own lane only, until the lane's lease
// has expired; then another worker takes the lane.
func TestFromPublisher_ACallThatHangsKeepsOneLane(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		box, w := p.box(t), &wire{}
		bad := keysOfLane(0, 1)[0]
		release := make(chan struct{})
		hung := make(chan struct{})
		end := sync.OnceFunc(func() { close(release) })
		var once sync.Once
		r := start(t, box, relay.FromPublisher(publisherFunc(func(_ string, m *message.Message) error {
			if m.UUID == bad+"/0" {
				once.Do(func() { close(hung) })
				<-release
				return errors.New("too late")
			}
			w.note("first", m)
			return nil
		})), short)
		t.Cleanup(end) // before the relay is stopped
		msgs := keyed(bad, 0, 3)
		for i := range 200 { // more than may be in flight
			msgs = append(msgs, message.NewMessage(inLane(fmt.Sprint("behind ", i), 0), nil))
		}
		commit(t, box, msgs...)
		<-hung
		others := spread(64, 2)
		all := append(msgs, others...)
		for _, m := range others {
			if key := m.Metadata.Get(outbox.KeyMetadata); outbox.Lane(key, "") == 0 {
				outbox.SetKey(m, "") // not in the lane that hangs
				m.UUID = inLane(m.UUID, 1)
			}
		}
		commit(t, box, others...)
		w.await(t, len(others))
		if n := p.owed(t); n < len(msgs) {
			t.Errorf("%d rows owed, want those of the lane that hangs", n)
		}
		second := start(t, box, &sink{name: "second", wire: w}, short)
		p.awaitNothingOwed(t)
		repeats := 0
		switch n := second.counter(t, "oncemill.relay.takeovers"); {
		case n == 0:
			t.Error("no takeover")
		case n > 1:
			repeats = len(all) // the machine is so busy that the first one lost other lanes too
		}
		w.check(t, all, repeats)
		end()
		r.stop() // the call has returned, so the relay can stop
	})
}

// inLane changes a message id so that an unkeyed message comes into a lane.
func inLane(id string, lane int) string {
	for i := 0; ; i++ {
		if other := fmt.Sprint(id, "+", i); outbox.Lane("", other) == lane {
			return other
		}
	}
}

// Messages that are handed over while the sink is not running have an outcome.
func TestFromPublisher_IsUnavailableWhileItDoesNotRun(t *testing.T) {
	t.Parallel()
	s := relay.FromPublisher(publisherFunc(func(string, *message.Message) error { return nil }))
	ask := func() error {
		outcome := make(chan error, 1)
		s.Publish(t.Context(), []*relay.Message{{Topic: "t", MessageID: "m"}}, func(_ *relay.Message, err error) { outcome <- err })
		select {
		case err := <-outcome:
			return err
		case <-time.After(maxWait):
			return errors.New("no outcome")
		}
	}
	if err := ask(); !errors.Is(err, relay.ErrUnavailable) {
		t.Errorf("before Run: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.Run(ctx) }()
	eventually(t, "it runs", func() bool { return ask() == nil })
	over, end := context.WithCancel(t.Context())
	end() // if it ran, it would end at once
	if err := s.Run(over); err == nil {
		t.Error("a second Run serves the same lanes")
	}
	if err := ask(); err != nil {
		t.Errorf("after a second Run: %v", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
	if err := ask(); !errors.Is(err, relay.ErrUnavailable) {
		t.Errorf("after Run: %v", err)
	}
}

// startSink runs a sink made of a publisher until the test ends.
func startSink(t *testing.T, s relay.Sink) (stop func()) {
	t.Helper()
	running, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- s.Run(running) }()
	eventually(t, "it runs", func() bool {
		probe := make(chan error, 1)
		expired, end := context.WithCancel(t.Context())
		end()
		s.Publish(expired, []*relay.Message{{MessageID: "p"}}, func(_ *relay.Message, err error) { probe <- err })
		return errors.Is(<-probe, context.DeadlineExceeded) // by the lane, so the lane is served
	})
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// told is an outcome as a sink reports it.
type told struct {
	id  string
	err error
}

// What cannot be published before its deadline is given back. The call that was under
// way then counts when it returns.
func TestFromPublisher_HeedsTheDeadlineBetweenMessages(t *testing.T) {
	t.Parallel()
	for range 20 { // a place and the deadline may come at the same time, and one of them is taken
		ctx, cancel := context.WithCancel(t.Context())
		s := relay.FromPublisher(publisherFunc(func(_ string, m *message.Message) error {
			if m.UUID == "a" {
				cancel()
			}
			return nil
		}))
		stop := startSink(t, s)
		outcomes := make(chan told, 10)
		s.Publish(ctx, []*relay.Message{{MessageID: "a"}, {MessageID: "b"}, {MessageID: "c"}},
			func(m *relay.Message, err error) { outcomes <- told{m.MessageID, err} })
		last := map[string]error{}
		for len(last) < 3 || last["a"] != nil {
			o := <-outcomes
			last[o.id] = o.err
		}
		stop()
		if !errors.Is(last["b"], relay.ErrUnavailable) || !errors.Is(last["c"], relay.ErrUnavailable) {
			t.Fatalf("outcomes %v", last)
		}
	}
}

// A call that returns nil after its message was unavailable has delivered it: also
// what waits to repeat it counts as delivered, and is not published.
func TestFromPublisher_CountsACallThatReturnsLate(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]bool{"handed over again": true, "not handed over again": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			release, hung := make(chan struct{}), make(chan struct{})
			var calls atomic.Int64
			s := relay.FromPublisher(publisherFunc(func(_ string, m *message.Message) error {
				calls.Add(1)
				if m.UUID == "slow" {
					close(hung) // a second call would panic
					<-release
				}
				return nil
			}))
			stop := startSink(t, s)
			outcomes := make(chan told, 10)
			done := func(m *relay.Message, err error) { outcomes <- told{m.MessageID, err} }
			slow, behind := &relay.Message{MessageID: "slow"}, &relay.Message{MessageID: "behind"}
			due, expire := context.WithCancel(t.Context())
			s.Publish(due, []*relay.Message{slow}, done)
			<-hung
			expire()
			if o := <-outcomes; o.id != "slow" || !errors.Is(o.err, relay.ErrUnavailable) {
				t.Errorf("outcome %v of the call that hangs", o)
			}
			msgs := []*relay.Message{behind}
			if again {
				copied := *slow // as the relay hands it over
				msgs = append(msgs, &copied)
			}
			s.Publish(t.Context(), msgs, done)
			other := make(chan error, 1)
			s.Publish(t.Context(), []*relay.Message{{Lane: 1, MessageID: "other"}}, func(_ *relay.Message, err error) { other <- err })
			if err := <-other; err != nil {
				t.Errorf("outcome %v of another lane", err)
			}
			close(release)
			for _, want := range []string{"slow", "behind"} {
				if o := <-outcomes; o.id != want || o.err != nil {
					t.Errorf("outcome %v, want %s delivered", o, want)
				}
			}
			stop()
			if len(outcomes) > 0 {
				t.Errorf("another outcome: %v", <-outcomes)
			}
			if n := calls.Load(); n != 3 {
				t.Errorf("%d calls, want one for each message", n)
			}
		})
	}
}

func TestNewPublisherSink_BoundsTheCallsAndKeepsTheOrder(t *testing.T) {
	t.Parallel()
	for _, parallel := range []int{1, 3} {
		p := onPostgres(t)
		box, w := p.box(t), &wire{}
		var under, most atomic.Int64
		s, err := relay.NewPublisherSink(publisherFunc(func(_ string, m *message.Message) error {
			n := under.Add(1)
			defer under.Add(-1)
			for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
			}
			testserver.Pause(t.Context(), time.Millisecond)
			w.note("publisher", m)
			return nil
		}), relay.PublisherConfig{Parallel: parallel})
		if err != nil {
			t.Fatal(err)
		}
		r := start(t, box, s, unhurried)
		all := append(spread(30, 5), unkeyed(30)...)
		commit(t, box, all...)
		p.awaitNothingOwed(t)
		r.stop()
		w.check(t, all, 0)
		if n := int(most.Load()); n != parallel {
			t.Errorf("%d calls at once, want %d", n, parallel)
		}
	}
}

// A call that hangs uses up its place; what waits for one gets its outcome when
// it is due, so other lanes are not taken to hang.
func TestNewPublisherSink_GivesBackWhatFindsNoPlace(t *testing.T) {
	t.Parallel()
	release, hung := make(chan struct{}), make(chan struct{})
	s, err := relay.NewPublisherSink(publisherFunc(func(string, *message.Message) error {
		close(hung)
		<-release
		return nil
	}), relay.PublisherConfig{Parallel: 1})
	if err != nil {
		t.Fatal(err)
	}
	running, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.Run(running) }()
	first, second := make(chan error, 1), make(chan error, 1)
	eventually(t, "the first call is under way", func() bool {
		s.Publish(t.Context(), []*relay.Message{{Lane: 1}}, func(_ *relay.Message, err error) { first <- err })
		select {
		case <-first: // it did not run yet
			return false
		case <-hung:
			return true
		}
	})
	due, expire := context.WithCancel(t.Context())
	s.Publish(due, []*relay.Message{{Lane: 2}}, func(_ *relay.Message, err error) { second <- err })
	expire()
	select {
	case err := <-second:
		if !errors.Is(err, relay.ErrUnavailable) {
			t.Errorf("outcome %v of what found no place", err)
		}
	case <-time.After(maxWait):
		t.Error("what found no place has no outcome")
	}
	close(release)
	if err := <-first; err != nil {
		t.Errorf("outcome %v of the call", err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestNewPublisherSink_ReportsBadValues(t *testing.T) {
	t.Parallel()
	for _, parallel := range []int{-1, 33} {
		_, err := relay.NewPublisherSink(nil, relay.PublisherConfig{Parallel: parallel})
		if errs, ok := err.(interface{ Unwrap() []error }); !ok || len(errs.Unwrap()) != 2 {
			t.Errorf("parallel %d: %v, want two errors", parallel, err)
		}
	}
}
