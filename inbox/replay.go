package inbox

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/contain"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

// Replays gives the messages of this consumer's dead letters back to it, when an
// operator wants that ([dlq.Store.Replay]). Inbox.Run does it.
//
// A message is published with its letter's number, and the transaction of its effects,
// or of a new letter, ends the replay: until then the letter stays in the state
// replaying, and the message is published again now and then. However often it comes,
// it is handled once. It keeps its id, or gets one of its letter's if it had none of its
// own. Other consumers that see it acknowledge it without handling it, if they have an
// inbox.
type Replays struct {
	// Letters is the store that Config.DeadLetters writes to (see LettersOf), in the
	// database of the inbox. Required.
	Letters *dlq.Store

	// Publisher publishes the messages. Give it a timeout of its own: a call that
	// does not return holds up the end of Run. Required.
	Publisher message.Publisher

	// Topic returns the topic to publish a letter's message to: best one that
	// leads to this consumer alone, which is the name of its queue for a
	// publisher that has watermill-amqp's configuration of a durable queue.
	// Default: the topic that it was subscribed to, which other consumers may
	// read as well. An empty one is an error.
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
	mostErrorsTold = 3

	// replayAgain is how long a message that was published may take to be handled
	// before it is published again; each time it is doubled.
	replayAgain    = 10 * time.Minute
	replayAgainMax = 6 * time.Hour
)

// publishedLetter is when the message of a letter was published, and how long from
// then it may take.
type publishedLetter struct {
	at   time.Time
	wait time.Duration
}

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
// replayed, in the order in which they died, but for those that this inbox has
// published lately, and returns how many. A letter whose message cannot be published
// stays as it is, and holds no other up. Without Config.Replays it does nothing.
func (in *Inbox) Replay(ctx context.Context) (replayed int, err error) {
	if in.cfg.Replays == nil {
		return 0, nil
	}
	in.replaying.Lock()
	defer in.replaying.Unlock()
	var errs []error
	failed := 0
	published := map[int64]publishedLetter{} // what is replaying no more is forgotten
	filter := dlq.Filter{States: []dlq.State{dlq.Replaying}, Source: dlq.Consumer, OldestFirst: true, Limit: replayPage}
	for {
		from := filter
		page, err := ask(ctx, in, func(ctx context.Context) ([]*dlq.Letter, error) { return in.cfg.Replays.Letters.List(ctx, from) })
		if err != nil {
			maps.Copy(in.published, published)
			return replayed, errors.Join(append(errs, err)...)
		}
		for _, l := range page {
			if !in.caresFor(l.Consumer) {
				continue
			}
			last, before := in.published[l.ID]
			if before && time.Since(last.at) < last.wait {
				published[l.ID] = last
				continue
			}
			did, err := in.replayOne(ctx, l.ID)
			switch {
			case did:
				replayed++
				published[l.ID] = publishedLetter{at: time.Now(), wait: min(max(2*last.wait, replayAgain), replayAgainMax)}
			case err != nil:
				if failed++; failed <= mostErrorsTold {
					errs = append(errs, fmt.Errorf("letter %d: %w", l.ID, err))
				}
			}
		}
		if len(page) < replayPage || ctx.Err() != nil {
			break
		}
		filter.After = page[len(page)-1].Cursor()
	}
	in.published = published
	if failed > mostErrorsTold {
		errs = append(errs, fmt.Errorf("and %d letters more", failed-mostErrorsTold))
	}
	return replayed, errors.Join(errs...)
}

// caresFor reports that a consumer is that of this inbox, or one of its handlers', of
// which none may have had a message yet.
func (in *Inbox) caresFor(consumer string) bool {
	return consumer == in.cfg.Consumer || in.perHandler.Load() && strings.HasPrefix(consumer, in.cfg.Consumer+"/")
}

func (in *Inbox) replayOne(ctx context.Context, id int64) (bool, error) {
	r := in.cfg.Replays
	letter, err := ask(ctx, in, func(ctx context.Context) (*dlq.Letter, error) { return r.Letters.Get(ctx, id) })
	switch {
	case errors.Is(err, dlq.ErrNotFound), err == nil && letter.State != dlq.Replaying:
		return false, nil // another process was faster
	case err != nil:
		return false, err
	}
	var topic string
	err = contain.Call(func() error { topic = r.Topic(letter); return nil })
	if err != nil {
		return false, err
	}
	if topic == "" {
		return false, errNoReplayTopic
	}
	if err := r.Publisher.Publish(topic, replayOf(ctx, letter)); err != nil {
		return false, fmt.Errorf("publish to %q: %w", topic, err)
	}
	return true, nil
}

var errNoReplayTopic = errors.New("it is not known where to; let Config.Replays.Topic return a topic")

// Metadata that a replay has besides ReplayMetadata and ConsumerMetadata.
const (
	replayIDMetadata = outbox.ReservedMetadata + "replay_id" // that the inbox is to know it by
	uuidMetadata     = outbox.ReservedMetadata + "uuid"      // of the message of a letter, if that is not its id
)

// replayOf makes the message of a letter again. The id of one that had none, or that of
// another message, has no mark of death that a replay could claim: it is a new message,
// with an id that each copy of it has.
func replayOf(ctx context.Context, letter *dlq.Letter) *message.Message {
	metadata := message.Metadata{}
	maps.Copy(metadata, letter.Metadata)
	delete(metadata, outbox.RowMetadata)
	metadata.Set(ConsumerMetadata, letter.Consumer)
	metadata.Set(ReplayMetadata, strconv.FormatInt(letter.ID, 10))
	id := letter.MessageID
	if !takesID(id, Reason(letter.Reason)) {
		id = freshID(letter.ID)
	}
	metadata.Set(replayIDMetadata, id)
	uuid := cmp.Or(metadata[uuidMetadata], letter.MessageID, id)
	delete(metadata, uuidMetadata)
	msg := message.NewMessageWithContext(ctx, uuid, letter.Payload)
	msg.Metadata = metadata
	return msg
}

func freshID(letter int64) string { return "letter-" + strconv.FormatInt(letter, 10) }

// replay is what a message tells of the letter that it is the replay of.
type replay struct {
	marked bool  // it is one
	letter int64 // 0: published by somebody else, who does not say
	fresh  bool  // it has a new id
}

// replayed reads the marks of a replay, and returns the id that the message is to be
// known by, if they say.
func (in *Inbox) replayed(msg *message.Message) (r replay, id string) {
	mark := msg.Metadata[ReplayMetadata]
	if mark == "" {
		return replay{}, ""
	}
	r.marked = true
	letter, err := strconv.ParseInt(mark, 10, 64)
	if err != nil || letter <= 0 || in.letters() == nil {
		return r, ""
	}
	id = msg.Metadata[replayIDMetadata]
	r.letter, r.fresh = letter, id == freshID(letter)
	return r, id
}

// letters returns the store of the letters, if it is known. A process that handles
// messages ends their replays, also where another one publishes them.
func (in *Inbox) letters() *dlq.Store {
	if l, ok := in.cfg.DeadLetters.(letters); ok {
		return l.store
	}
	if in.cfg.Replays != nil {
		return in.cfg.Replays.Letters
	}
	return nil
}

// distrust takes no mark of a replay for true on a message that may be forged, unless
// it is what is in its letter.
func (in *Inbox) distrust(ctx context.Context, w *work) {
	if w.replay.letter == 0 {
		return
	}
	id := w.replay.letter
	letter, err := ask(ctx, in, func(ctx context.Context) (*dlq.Letter, error) { return in.letters().Get(ctx, id) })
	if err == nil && bytes.Equal(letter.Payload, w.msg.Payload) {
		return
	}
	w.replay, w.id = replay{}, ""
	_ = contain.Call(func() error { w.id = in.cfg.ID(w.msg); return nil }) // without one it is nobody's
}

// endReplay ends, with tx, the replay that a message belongs to. It reports false if
// there is none any more: another copy was faster.
func (in *Inbox) endReplay(ctx context.Context, tx *sql.Tx, r replay) (open bool, err error) {
	if r.letter == 0 {
		return true, nil
	}
	open, err = in.letters().EndReplay(ctx, tx, in.cfg.Consumer, r.letter)
	if err != nil && (heldElsewhere(err) || sqlerr.Retryable(err)) {
		return false, fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return open, err
}

// takesID reports that a letter takes the id of its message: that is not another's.
func takesID(id string, reason Reason) bool { return id != "" && reason != Conflict }
