package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/contain"
)

// Replays gives the messages of this consumer's dead letters back to it, when an
// operator wants that ([dlq.Store.Replay]). Inbox.Run does it.
//
// A message is published with its letter's number and secret (dlq.Store.ReplayToken),
// and the transaction of its effects, or of a new letter, ends the replay: until then the
// letter stays in the state replaying, and the message is published again now and then.
// However often it comes, it is handled once, as long as its letter is kept. It keeps its
// id, or gets one of its letter's if it had none of its own.
//
// A message that says it is a replay is believed if it passes Config.Verify and
// Config.Payload, and if the letter is of its consumer, has that secret, and holds that
// message. Otherwise what it says is ignored, with a warning, and it is handled as any
// message. Inboxes of other consumers acknowledge a replay that they can check; give them
// no part in it where they cannot read the letters (Topic).
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
	filter := dlq.Filter{States: []dlq.State{dlq.StateReplaying}, Source: dlq.FromConsumer, OldestFirst: true, Limit: replayPage}
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
	case errors.Is(err, dlq.ErrNotFound), err == nil && letter.State != dlq.StateReplaying:
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
	token, err := ask(ctx, in, func(ctx context.Context) (string, error) { return r.Letters.ReplayToken(ctx, id) })
	if errors.Is(err, dlq.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := r.Publisher.Publish(topic, replayOf(ctx, letter, token)); err != nil {
		return false, fmt.Errorf("publish to %q: %w", topic, err)
	}
	return true, nil
}

var errNoReplayTopic = errors.New("it is not known where to; let Config.Replays.Topic return a topic")
