package rabbitmq

import "sync"

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
