package rabbitmq

import (
	"context"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// outcomes collects the outcomes of messages that were handed out.
type outcomes struct {
	wake chan struct{} // capacity 1: holds a token while there may be some

	mu  sync.Mutex
	all []outcome
}

type outcome struct {
	delivery *delivery
	acked    bool
}

func (o *outcomes) put(one outcome) {
	o.mu.Lock()
	o.all = append(o.all, one)
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

func (o *outcomes) take() []outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.all
	o.all = nil
	return all
}

// drain waits for running handlers, and acknowledges what they have done. They have
// Config.CloseTimeout from the end of ctx. A shard that is handed over waits for longer: until
// the contexts of their messages end. Meanwhile, and for maxWait at most, what was given back
// comes again.
func (s *subscription) drain(ctx, handling context.Context, current *session) {
	settings := s.owner.settings
	s.freeUnused()
	for _, p := range s.ready {
		if p.cancel != nil {
			p.cancel()
		}
	}
	flush := func() {
		if current != nil {
			current.flush(handling, settings.Logger, flushAll)
		}
	}
	flush() // acknowledgements that wait for others
	timer := time.NewTimer(settings.AckTimeout)
	defer timer.Stop()
	ended := ctx.Done()
	again := current != nil
	enough := time.NewTimer(s.maxWait())
	defer enough.Stop()
	for {
		var deliveries <-chan amqp.Delivery
		if again && s.comesAgain(current) {
			deliveries = current.deliveries
		}
		if deliveries == nil && len(s.handedOut) == 0 {
			return
		}
		select {
		case <-ended:
			ended = nil
			timer.Reset(settings.CloseTimeout)
		case d, open := <-deliveries:
			if again = open; open {
				s.accept(current, d)
			}
		case <-enough.C:
			again = false
		case <-s.outcomes.wake:
			s.settle()
			flush()
		case <-timer.C:
			s.settle() // what came at the same time
			flush()
			return
		}
	}
}
