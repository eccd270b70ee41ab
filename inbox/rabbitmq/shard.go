package rabbitmq

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/repeats"
)

// shard is what a subscription to one shard has in addition.
type shard struct {
	// next is the layout that comes after this shard's, which is Shards.Previous; nil if
	// there is none.
	next *layout

	slots chan struct{} // holds a token for each message that is handed out, of any shard
	holds bool          // a slot for the next message

	since    atomic.Int64  // first delivery of this subscription, in Unix nanoseconds; 0: none yet
	yield    chan struct{} // closed when the shard is to be handed over
	yielding sync.Once

	marked   bool // everything before the marker was delivered here
	marker   amqp.Delivery
	markedAt time.Time
	probe    string    // names the marker that sendProbe has sent; "": none
	refused  int       // deliveries that this channel had given back when finish last looked
	proven   bool      // the probe has come, and nothing since
	again    time.Time // when finish may act again
	gone     bool      // the queue does not exist

	unfinished repeats.Series // attempts to remove it
}

func (s *Subscriber) newShard(topic, queue string, out chan *message.Message, slots chan struct{}, next *layout) *subscription {
	sub := newSubscription(s, topic, queue, "") // its exchanges are those of the layout
	sub.out = out
	sub.shard = &shard{next: next, slots: slots, yield: make(chan struct{})}
	return sub
}

// handOver ends the subscription, so that the broker activates the next consumer of the
// shard. Order is kept: the subscription hands out nothing more, waits for running handlers,
// and only then closes its channel. (Canceling the consumer would activate the next one at
// once, beside these handlers.) The broker puts what was not acknowledged back to its
// place, and the next consumer begins with it.
func (s *subscription) handOver() { s.shard.yielding.Do(func() { close(s.shard.yield) }) }

// yielding returns a channel that is closed when the shard is to be handed over.
func (s *subscription) yielding() <-chan struct{} {
	if s.shard == nil {
		return nil
	}
	return s.shard.yield
}

// needsSlot reports whether a slot must be taken before the next message is handed out.
func (s *subscription) needsSlot() bool { return s.shard != nil && !s.shard.holds }

// noSlots reports whether the shards have handed out as much as they may.
func (s *subscription) noSlots() bool {
	return s.shard != nil && len(s.shard.slots) == cap(s.shard.slots)
}

func (s *subscription) useSlot(p *delivery) {
	if s.shard != nil {
		s.shard.holds, p.slot = false, true
	}
}

func (s *subscription) freeSlot(p *delivery) {
	if p.slot {
		p.slot = false
		<-s.shard.slots
	}
}

// freeUnused frees a slot that was taken for a message which is no longer to be handed out.
func (s *subscription) freeUnused() {
	if s.shard != nil && s.shard.holds {
		s.shard.holds = false
		<-s.shard.slots
	}
}

// leave frees what the shards share when the subscription ends.
func (s *subscription) leave() {
	s.freeUnused()
	for p := range s.handedOut {
		s.freeSlot(p)
	}
}

// isGone reports whether an error means that the queue of the shard does not exist.
func (s *subscription) isGone(err error) bool {
	gone := s.shard != nil && errors.Is(err, errShardGone)
	if gone {
		s.shard.gone = true
	}
	return gone
}

// lossLevel returns the level at which the loss of the consumer is logged. Another process
// removes a previous shard when it is drained, which cancels the consumers of all.
func (s *subscription) lossLevel(err error) slog.Level {
	if s.shard != nil && s.shard.next != nil && errors.Is(err, errConsumerGone) {
		return slog.LevelDebug
	}
	return slog.LevelWarn
}

// noQueue reports whether the broker has no such queue. It also answers NOT_FOUND for a queue
// whose node is down.
func noQueue(err error) bool {
	var refused *amqp.Error
	return errors.As(err, &refused) && refused.Code == amqp.NotFound && strings.Contains(refused.Reason, "no queue")
}

// isDown reports whether the broker has the queue, but not now: its node is down.
func isDown(err error) bool {
	var refused *amqp.Error
	return errors.As(err, &refused) && refused.Code == amqp.NotFound && !strings.HasPrefix(refused.Reason, "NOT_FOUND - no ")
}

// isAnswer reports whether an error is one of the broker, or nil. The end of a connection, and
// silence, are none.
func isAnswer(err error) bool {
	var refused *amqp.Error
	return err == nil || errors.As(err, &refused) && !errors.Is(err, errCallTimeout) && !errors.Is(err, amqp.ErrClosed)
}

// markerHeader is a header of the messages that MoveShards puts behind everything in the
// previous shards, and of those that the consumer of such a shard puts there itself; see
// sendProbe.
const markerHeader = "oncemill_shards_moved"

// isMarker reports whether a delivery is the marker of MoveShards, which is sent to the queue
// itself: what comes from the exchange of a topic is a message, whatever its headers are.
func (s *subscription) isMarker(raw amqp.Delivery) bool {
	_, marked := raw.Headers[markerHeader]
	return s.shard != nil && raw.Exchange == "" && marked
}

// newMarker returns a marker. Its value is the name of a probe, or true.
func newMarker(value any) []amqp.Publishing {
	return []amqp.Publishing{{Headers: amqp.Table{markerHeader: value}, DeliveryMode: amqp.Persistent}}
}

// mark keeps the newest marker unacknowledged until the shard is removed. So it comes again, here or
// to another consumer, if the channel is lost before, or it is given back.
func (s *subscription) mark(current *session, raw amqp.Delivery) {
	if s.shard.marked {
		current.acks.ack(s.shard.marker.DeliveryTag)
	}
	s.shard.marked, s.shard.marker, s.shard.markedAt = true, raw, time.Now()
	if s.shard.probe != "" && raw.Headers[markerHeader] == s.shard.probe {
		s.shard.proven, s.shard.again = true, time.Time{}
	}
}

// giveBackMarker returns the marker to the queue before Config.AckTimeout is over, as giveBack does
// with deliveries. It comes again. finish need not wait for it as for these, since it is no message.
func (s *subscription) giveBackMarker(current *session, now time.Time) {
	if s.shard == nil || !s.shard.marked || now.Sub(s.shard.markedAt) <= s.maxIdle() {
		return
	}
	s.shard.marked, s.shard.proven, s.shard.probe, s.shard.again = false, false, "", time.Time{}
	current.acks.rejected(s.shard.marker.DeliveryTag)
	s.shard.refused++ // finish knows
	// If it fails, the channel is lost, and NotifyClose reports why.
	_ = s.shard.marker.Nack(false, true)
}

// active records that this subscription is the active consumer of its shard. It is one until
// its channel closes.
func (s *subscription) active() {
	if s.shard == nil {
		return
	}
	s.shard.proven = false
	if s.shard.since.Load() == 0 {
		s.shard.since.Store(time.Now().UnixNano())
	}
}

// inactive is called when the channel is lost, and the marker with it.
func (s *subscription) inactive() {
	if s.shard != nil {
		s.shard.marked, s.shard.proven, s.shard.probe = false, false, ""
		s.shard.since.Store(0)
	}
}

const (
	// removeAgain is the time between two attempts to remove a shard.
	removeAgain = time.Second

	// probeAgain is how long to wait for a probe: it may have been purged.
	probeAgain = time.Minute

	// probeRetry is the time after a probe that could not be sent. In an alarm of the broker
	// each takes CallTimeout, and the subscription does nothing else meanwhile.
	probeRetry = 10 * time.Second
)

// finish removes the shard, and then returns errShardGone, if everything before the marker is
// settled, and the shard has nothing behind it.
func (s *subscription) finish(ctx context.Context, current *session) error {
	if s.shard == nil || !s.shard.marked {
		return nil
	}
	log := s.owner.settings.Logger
	current.flush(ctx, log, flushAll) // former markers leave room for the next one
	if len(s.ready)+len(s.handedOut)+len(s.delayed)+len(s.lanes) > 0 {
		return nil
	}
	now := time.Now()
	if s.shard.refused != current.acks.refused { // what was given back comes again
		s.shard.refused, s.shard.probe, s.shard.proven = current.acks.refused, "", false
		s.shard.again = now.Add(removeAgain)
	}
	if now.Before(s.shard.again) {
		return nil
	}
	s.shard.again = now.Add(removeAgain)
	if s.shard.next == nil {
		level, attrs := s.shard.unfinished.Failed(slog.LevelError, "no previous")
		log.Log(ctx, level, "shards were moved, but Shards.Previous is not set here; the end of the shard waits for a process that has it", append(attrs, "queue", s.queue)...)
		return nil
	}
	empty, err := s.remove(ctx, current)
	s.shard.again = time.Now().Add(removeAgain)
	switch {
	case empty && s.shard.proven:
		log.InfoContext(ctx, "shard drained and removed", "queue", s.queue)
		return fmt.Errorf("%w: it was drained", errShardGone)
	case empty:
		err = s.sendProbe(ctx, current)
	}
	if err != nil && ctx.Err() == nil {
		level, attrs := s.shard.unfinished.Failed(slog.LevelWarn, err.Error())
		log.Log(ctx, level, "drained shard not removed, retrying", append(attrs, "queue", s.queue, "error", err)...)
	}
	return nil
}

// remove reports whether the shard is empty and the topic no longer leads to it. If this is
// proven it deletes the shard. The missing queue shows all processes that the shard is finished.
func (s *subscription) remove(ctx context.Context, current *session) (empty bool, err error) {
	err = s.owner.onChannel(ctx, s.owner.connector, func(_ *link, channel *amqp.Channel) error {
		if err := s.shard.next.guard(channel); err != nil {
			return err // MoveShards was not called: somebody else made the marker
		}
		state, err := channel.QueueDeclarePassive(s.queue, durable, autoDelete, exclusive, noWait, nil)
		// Without this consumer the answer is that for a quorum queue without a leader: zeros.
		empty = err == nil && state.Messages == 0 && state.Consumers > 0
		return err
	})
	if !empty || !s.shard.proven {
		return empty, err
	}
	// Over this channel: while it is open, this consumer is the active one.
	err = current.link.within(func() error {
		_, err := current.channel.QueueDelete(s.queue, false, false, noWait)
		return err
	})
	return err == nil, err
}

// sendProbe sends one more marker. The broker does not count what it has sent, or was given back
// just now, and is on its way, however long that takes. But the consumer gets everything in order:
// when the probe arrives, all that was in the shard before has arrived.
func (s *subscription) sendProbe(ctx context.Context, current *session) error {
	s.shard.again = time.Now().Add(probeRetry)
	// A classic queue answers when it has put back what this channel gave back. With a quorum queue
	// that may take longer while it elects a leader; so finish waits for a while after that.
	err := current.link.within(func() error {
		_, err := current.channel.QueueDeclarePassive(s.queue, durable, autoDelete, exclusive, noWait, nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("look for queue %q: %w", s.queue, err)
	}
	probe := rand.Text()
	err = s.owner.onChannel(ctx, s.owner.publishing, func(_ *link, channel *amqp.Channel) error {
		return s.owner.put(channel, address{key: s.queue}, newMarker(probe))
	})
	if err != nil {
		return fmt.Errorf("send a marker: %w", err)
	}
	s.shard.probe, s.shard.again = probe, time.Now().Add(probeAgain)
	return nil
}
