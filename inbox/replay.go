package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/outbox"
)

// Replays gives the messages of this consumer's dead letters back to it, when an
// operator wants that ([dlq.Store.Replay]). Inbox.Run does it.
//
// A message is published and then its letter closed, so after a crash it may be
// published again; its effects happen once all the same. It keeps its id, or gets
// one of its letter's if it had none of its own. Other consumers that see it
// acknowledge it without handling it, if they have an inbox.
type Replays struct {
	// Letters is the store that Config.DeadLetters writes to (see LettersOf).
	// Required.
	Letters *dlq.Store

	// Publisher publishes the messages. It must not return before the broker has
	// them: for watermill-amqp, with ConfirmDelivery. Required.
	Publisher message.Publisher

	// Topic returns the topic to publish a letter's message to: best one that
	// leads to this consumer alone, which is the name of its queue for a
	// publisher that has watermill-amqp's configuration of a durable queue.
	// Default: the topic that it was subscribed to, which other consumers may
	// read as well.
	Topic func(*dlq.Letter) string
}

func (r *Replays) resolve(bad func(field, value, problem string)) *Replays {
	if r == nil {
		return nil
	}
	resolved := *r
	if r.Letters == nil {
		bad("Replays.Letters", "nil", "is required; give the store that the dead letters are written to")
	}
	if r.Publisher == nil {
		bad("Replays.Publisher", "nil", "is required; give one that returns once the broker has the message")
	}
	if r.Topic == nil {
		resolved.Topic = func(l *dlq.Letter) string { return l.Topic }
	}
	return &resolved
}

const (
	replayInterval = time.Second
	replayCost     = 20 // at most one part in so many of the time
	replayPage     = 200
)

// replayLoop carries replays out until ctx ends.
func (in *Inbox) replayLoop(ctx context.Context) {
	for wait := replayInterval; pause(ctx, jitter(wait)); {
		begin := time.Now()
		if _, err := in.Replay(ctx); err != nil && ctx.Err() == nil {
			in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "dead letters not replayed; trying again", slog.String("consumer", in.cfg.Consumer), slog.Any("error", err))
		}
		wait = max(replayInterval, replayCost*time.Since(begin))
	}
}

// Replay is one step of Run: it publishes the messages of all letters that are to be
// replayed, in the order in which they died, and returns how many. A letter whose
// message cannot be published stays as it is, and holds no other up; the error tells
// of all of them. Without Config.Replays it does nothing.
func (in *Inbox) Replay(ctx context.Context) (replayed int, err error) {
	if in.cfg.Replays == nil {
		return 0, nil
	}
	var errs []error
	filter := dlq.Filter{States: []dlq.State{dlq.Replaying}, Source: dlq.Consumer, OldestFirst: true, Limit: replayPage}
	for {
		page, err := in.cfg.Replays.Letters.List(ctx, filter)
		if err != nil {
			return replayed, errors.Join(append(errs, err)...)
		}
		for _, l := range page {
			if l.Consumer != in.cfg.Consumer && !strings.HasPrefix(l.Consumer, in.cfg.Consumer+"/") {
				continue // not of this inbox, nor of one of its handlers
			}
			if err := in.replayOne(ctx, l.ID); err != nil {
				errs = append(errs, fmt.Errorf("letter %d: %w", l.ID, err))
				continue
			}
			replayed++
		}
		if len(page) < replayPage || ctx.Err() != nil {
			return replayed, errors.Join(errs...)
		}
		filter.After = page[len(page)-1].Cursor()
	}
}

func (in *Inbox) replayOne(ctx context.Context, id int64) error {
	r := in.cfg.Replays
	letter, err := r.Letters.Get(ctx, id)
	if err != nil {
		return err
	}
	if err := r.Publisher.Publish(r.Topic(letter), replayOf(ctx, letter)); err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	return r.Letters.Replayed(ctx, id)
}

// replayOf makes the message of a letter again. The id of one that had none, or that of
// another message, has no mark of death that a replay could claim: it is a new message,
// with an id that each copy of it has.
func replayOf(ctx context.Context, letter *dlq.Letter) *message.Message {
	metadata := message.Metadata{}
	maps.Copy(metadata, letter.Metadata)
	delete(metadata, outbox.RowMetadata)
	metadata.Set(ConsumerMetadata, letter.Consumer)
	id := letter.MessageID
	if takesID(id, Reason(letter.Reason)) {
		metadata.Set(ReplayMetadata, strconv.FormatInt(letter.ID, 10))
	} else {
		id = "letter-" + strconv.FormatInt(letter.ID, 10)
		delete(metadata, ReplayMetadata)
	}
	msg := message.NewMessageWithContext(ctx, id, letter.Payload)
	msg.Metadata = metadata
	return msg
}

// takesID reports that a letter takes the id of its message: that is not another's.
func takesID(id string, reason Reason) bool { return id != "" && reason != Conflict }
