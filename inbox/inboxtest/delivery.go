package inboxtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// attemptsAtMost is the number of deliveries after which a copy counts as never handled.
// failuresAtMost is how many of them may fail for another reason than a copy that is being
// handled: with dead letters, a redelivery may not wait for long to be handled alone.
const attemptsAtMost, failuresAtMost = 100, 10

func (r *run) atOnce(msg *message.Message) {
	r.Helper()
	var group sync.WaitGroup
	for range copies {
		group.Go(func() {
			failures := 0
			for attempt := 1; ; attempt++ {
				err := r.deliver(r.ctx, r.handle, msg, attempt > 1)
				if err == nil {
					return
				}
				if !errors.Is(err, inbox.ErrBeingHandled) {
					failures++
				}
				if attempt == attemptsAtMost || failures == failuresAtMost {
					r.Errorf("copy, delivery %d: %v", attempt, err)
					return
				}
			}
		})
	}
	group.Wait()
}

// deliveryOf returns a copy of msg as a subscriber would deliver it.
func deliveryOf(ctx context.Context, msg *message.Message, again bool) *message.Message {
	c := msg.Copy()
	c.SetContext(inbox.ContextWithDelivery(ctx, delivery(again)))
	return c
}

// delivery reports whether it is a redelivery.
type delivery bool

func (d delivery) Redelivered() bool       { return bool(d) }
func (d delivery) ArrivedAt() time.Time    { return time.Time{} }
func (d delivery) CreatedAt() time.Time    { return time.Time{} }
func (d delivery) DelayNack(time.Duration) {}
func (d delivery) Yield()                  {}
func (d delivery) Nacks() int              { return 0 }

// contextOf returns the context that a router gives to messages of a handler with a publish
// topic. Only a router can make it.
func contextOf(t testing.TB, topic string) context.Context {
	t.Helper()
	if topic == "" {
		return t.Context()
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatalf("inboxtest: %v", err)
	}
	broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	defer broker.Close() //nolint:errcheck // it holds nothing
	made := make(chan context.Context, 1)
	router.AddHandler("inboxtest", "in", broker, topic, broker, func(msg *message.Message) ([]*message.Message, error) {
		made <- msg.Context()
		return nil, nil
	})
	running, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- router.Run(running) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("inboxtest: %v", err)
		}
	}()
	<-router.Running()
	if err := broker.Publish("in", message.NewMessage("context", nil)); err != nil {
		t.Fatalf("inboxtest: %v", err)
	}
	select {
	case ctx := <-made:
		return context.WithoutCancel(ctx)
	case <-t.Context().Done():
		return t.Context()
	}
}

// stored returns the rows of the outbox by id.
func (r *run) stored() map[int64]outboxstore.Row {
	r.Helper()
	if r.Outbox == nil {
		return nil
	}
	lanes := make([]int, outbox.Lanes)
	for i := range lanes {
		lanes[i] = i
	}
	const all = 1 << 30
	rows, err := outboxqueue.Of(r.Outbox).Read(r.Context(), outboxstore.ReadRequest{Lanes: lanes, Rows: 1 << 20, Bytes: all})
	if err != nil {
		r.Errorf("read the outbox: %v", err)
	}
	stored := make(map[int64]outboxstore.Row, len(rows))
	for _, row := range rows {
		stored[row.ID] = row
	}
	return stored
}

// newSince returns the messages of rows that were not there before, by id.
func newSince(before, now map[int64]outboxstore.Row) []Produced {
	var ids []int64
	for id := range now {
		if _, ok := before[id]; !ok {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	produced := make([]Produced, len(ids))
	for i, id := range ids {
		row := now[id]
		msg := message.NewMessage(row.MessageID, row.Payload)
		if metadata, err := outboxstore.DecodeMetadata(row.Metadata); err == nil {
			msg.Metadata = metadata
		}
		produced[i] = Produced{Topic: row.Topic, Key: row.Key, Message: msg}
	}
	return produced
}
