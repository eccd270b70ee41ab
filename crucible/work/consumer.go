package work

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
)

// Moods of messages: what happens to a handler.
const (
	MoodCalm   = ""
	MoodFlaky  = "flaky"  // fails twice, then works
	MoodPanics = "panics" // panics once, then works
	MoodSlow   = "slow"   // takes its time
	MoodLater  = "later"  // fails for a whole delivery
	MoodPoison = "poison" // can never be handled, unless somebody heals it
	MoodCrash  = "crash"  // kills its process when it is delivered first

	MoodRefused = "refused" // the sink refuses it most of the time
)

func mood(r *rand.Rand) string {
	switch p := r.Float64(); {
	case p < 0.02:
		return MoodFlaky
	case p < 0.03:
		return MoodPanics
	case p < 0.04:
		return MoodSlow
	case p < 0.045:
		return MoodLater
	case p < 0.05:
		return MoodPoison
	case p < 0.0502:
		return MoodCrash
	}
	return MoodCalm
}

// Queue returns the name of a consumer's queue.
func Queue(topic, consumer string) string { return topic + "_" + consumer }

func (w *worker) subscriber(single bool) func(in *inbox.Inbox) (message.Subscriber, error) {
	return func(in *inbox.Inbox) (message.Subscriber, error) {
		config := w.broker(amqp.GenerateQueueNameTopicNameWithSuffix(w.Role))
		config.Consume.Qos.PrefetchCount = 16
		config.Queue.Arguments = amqp091.Table{}
		if single {
			config.Queue.Arguments["x-single-active-consumer"] = true
		}
		if len(w.MoreAMQP) > 0 {
			config.Queue.Arguments[amqp091.QueueTypeArg] = amqp091.QueueTypeQuorum
		}
		return rabbitmq.New(config, rabbitmq.Config{Addresses: w.MoreAMQP, Malformed: in.Refuse, Logger: w.log, CallTimeout: 5 * time.Second})
	}
}

// configureLedger makes the first hop: one active consumer, in order.
func (w *worker) configureLedger(cfg *mill.Config) {
	cfg.Outbox = &outbox.Config{}
	cfg.Consumers = []mill.Consumer{{
		Name: RoleLedger, Topic: TopicTransfers, Subscriber: w.subscriber(true),
		Handler: w.book, Produces: TopicReceipts, Middleware: []message.HandlerMiddleware{dropCanaries},
		Inbox: inbox.Config{Timeout: 10 * time.Second, Retry: inbox.Retry{Delay: time.Second, DelayMax: 2 * time.Second}},
	}}
}

// configureReceipts makes the second hop: competing consumers that commit in groups.
func (w *worker) configureReceipts(cfg *mill.Config) {
	cfg.Consumers = []mill.Consumer{{
		Name: RoleReceipts, Topic: TopicReceipts, Subscriber: w.subscriber(false), Group: true,
		Middleware: []message.HandlerMiddleware{dropCanaries},
		Handler: func(msg *message.Message) ([]*message.Message, error) {
			return nil, w.effect(msg, watermill.NewUUID())
		},
		Inbox: inbox.Config{Timeout: 10 * time.Second, Retry: inbox.Retry{Delay: time.Second, DelayMax: 2 * time.Second}},
	}}
}

// MetaCanary marks the messages of the canary, which measure a queue and mean nothing.
const MetaCanary = "canary"

func dropCanaries(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		if msg.Metadata.Get(MetaCanary) != "" {
			return nil, nil
		}
		return h(msg)
	}
}

var errMood = errors.New("the message is in a mood")

// book moves the money of a transfer in the ledger's copy and returns the receipt.
func (w *worker) book(msg *message.Message) ([]*message.Message, error) {
	ctx := msg.Context()
	tx, ok := oncemill.TxFromContext(ctx)
	if !ok {
		return nil, inbox.ErrNoInbox
	}
	attempt := watermill.NewUUID()
	if err := w.effect(msg, attempt); err != nil {
		return nil, err
	}
	from, to := msg.Metadata.Get(metaFrom), msg.Metadata.Get(metaTo)
	if _, err := tx.ExecContext(ctx, lockMirror, from, to); err != nil {
		return nil, err
	}
	if _, err := tx.ExecContext(ctx, move, from, to, msg.Metadata.Get(metaAmount)); err != nil {
		return nil, err
	}
	receipt, err := w.receipt(ctx, tx, msg, attempt)
	if err != nil {
		return nil, err
	}
	// At the end, so that a failure has something to undo.
	if err := w.suffer(ctx, tx, msg); err != nil {
		return nil, err
	}
	return []*message.Message{receipt}, nil
}

// effect writes the effect of a message down.
func (w *worker) effect(msg *message.Message, attempt string) error {
	ctx := msg.Context()
	tx, ok := oncemill.TxFromContext(ctx)
	if !ok {
		return inbox.ErrNoInbox
	}
	sum := history.SumOf(msg.Payload, msg.Metadata)
	seq, err := numberOf(msg)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, insertEffect, w.Role, msg.UUID, msg.Metadata.Get(outbox.KeyMetadata), seq, attempt, sum.Payload, sum.Metadata)
	return err
}

// numberOf returns the number of a message in its key.
func numberOf(msg *message.Message) (int64, error) {
	seq, err := strconv.ParseInt(msg.Metadata.Get(metaSeq), 10, 64)
	if err != nil {
		return 0, inbox.Permanent(err)
	}
	return seq, nil
}

// receipt returns the message of the second hop, and writes down that this attempt sent it.
func (w *worker) receipt(ctx context.Context, tx oncemill.Tx, msg *message.Message, attempt string) (*message.Message, error) {
	receipt := message.NewMessage(watermill.NewUUID(), []byte("receipt of "+msg.UUID+" by "+attempt))
	receipt.Metadata = message.Metadata{metaSeq: msg.Metadata.Get(metaSeq), metaAttempt: attempt}
	sum := history.SumOf(receipt.Payload, receipt.Metadata)
	key := "receipt-" + msg.Metadata.Get(metaFrom)
	outbox.SetKey(receipt, key)
	seq, err := numberOf(msg)
	if err != nil {
		return nil, err
	}
	return receipt, recordSent(ctx, tx, attempt, sentRow{
		MessageID: receipt.UUID, Topic: TopicReceipts, Key: key, Seq: seq, Payload: sum.Payload, Metadata: sum.Metadata,
	})
}

// suffer does what the mood of a message demands. A rival would deliver it for ever.
func (w *worker) suffer(ctx context.Context, tx oncemill.Tx, msg *message.Message) error {
	if w.Rival != "" {
		return nil
	}
	attempt, _ := inbox.AttemptFromContext(ctx)
	switch mood := msg.Metadata.Get(metaMood); {
	case mood == MoodFlaky && attempt.Try < 3, mood == MoodLater && attempt.Delivery < 2:
		return errMood
	case mood == MoodPanics && attempt.Try < 2:
		panic(errMood)
	case mood == MoodSlow:
		sleep.For(ctx, time.Duration(rand.Int64N(int64(time.Second))))
	case mood == MoodPoison:
		var healed bool
		if err := tx.QueryRowContext(ctx, isHealed, msg.UUID).Scan(&healed); err != nil {
			return err
		}
		if !healed {
			return inbox.Permanent(fmt.Errorf("%w: poison", errMood))
		}
	case mood == MoodCrash:
		if delivery, ok := inbox.DeliveryFromContext(ctx); ok && !delivery.Redelivered() {
			return w.crash()
		}
	}
	return nil
}
