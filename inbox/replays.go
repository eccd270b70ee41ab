package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Replays publishes the messages of this consumer's dead letters to it again, when an
// operator asks for it ([dlq.Store.Replay]). Inbox.Run does the work.
// Config.DeadLetters is required.
//
// A message is published with its dead letter's number and secret, a token.
// The transaction of its effects, or of a new dead letter, ends the replay. Until then the
// dead letter stays in the state replaying, and the message is published again from time
// to time. However often it arrives, it is handled once, as long as its dead letter is
// kept. It keeps its id, or gets one from its dead letter if it had none of its own.
//
// A message that claims to be a replay is believed if it passes Config.Verify and
// Config.Payload, and if the dead letter belongs to its consumer, has that secret, and
// holds that message. Otherwise the claim is ignored, with a warning, and the message is
// handled like any other. Inboxes of other consumers acknowledge a replay that they can
// check. If they cannot read the dead letters, choose a Topic that they do not receive.
type Replays struct {
	// Publisher publishes the messages. A call that takes longer than a minute has failed, and
	// its message is published again. Required.
	Publisher message.Publisher

	// Topic returns the topic to publish a dead letter's message to. Prefer a topic that
	// only this consumer receives: its queue name, for a publisher with watermill-amqp's
	// durable queue configuration. Default: the topic that the message was subscribed to,
	// which other consumers may read as well. An empty topic is an error.
	Topic func(*dlq.Letter) string
}

func (r *Replays) resolve(bad func(field, value, problem string)) *Replays {
	if r == nil {
		return nil
	}
	resolved := *r
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
	replayCost     = 20 // at most one part in so many of the time,
	mostReplayWait = time.Minute
	replayPage     = 200
	mostErrorsTold = 3

	// replayAgain is how long a published message may take to be handled before it is
	// published again. It doubles each time.
	replayAgain    = 10 * time.Minute
	replayAgainMax = 6 * time.Hour
	// replayAfterOutage is how long it may take if the database has been away meanwhile. A
	// standby that has taken over, or a backup, may not know what ended the replay, and the
	// message was acknowledged.
	replayAfterOutage = 30 * time.Second

	// publishLimit is how long Topic and Publisher may take for a message.
	publishLimit = time.Minute
	// publishAbandoned is how many such calls that have not returned are usual; see
	// [bounded.New].
	publishAbandoned = 2
)

// Replay is one step of Run. It publishes the messages of all dead letters that are to be
// replayed, in the order in which they died, except those that this inbox has published
// recently, and returns how many. If a message cannot be published, its dead letter stays
// as it is and delays no other. Without Config.Replays it does nothing.
func (in *Inbox) Replay(ctx context.Context) (replayed int, err error) {
	if in.replayer == nil {
		return 0, nil
	}
	return in.replayer.step(ctx)
}

// replayer publishes the messages of dead letters that are to be replayed.
type replayer struct {
	in    *Inbox
	calls *bounded.Calls // of Topic and Publisher

	mu        sync.Mutex
	published map[int64]publishedLetter
}

// publishedLetter is when the message of a dead letter was published, for which of its
// replays, and how long it may take from then on.
type publishedLetter struct {
	version int // of the dead letter: a discard, its undo and another replay change it
	at      time.Time
	wait    time.Duration
}

// next returns the record of a message that is published now.
func (p publishedLetter) next(version int) publishedLetter {
	return publishedLetter{version: version, at: time.Now(), wait: min(max(2*p.wait, replayAgain), replayAgainMax)}
}

// afterOutage returns the record of a message that was published before the database was away.
func (p publishedLetter) afterOutage() publishedLetter {
	p.wait = min(p.wait, replayAfterOutage)
	return p
}

// loop performs replays until ctx ends.
func (r *replayer) loop(ctx context.Context) {
	for wait := replayInterval; sleep.For(ctx, r.in.jitter(wait)); {
		begin := time.Now()
		switch _, err := r.step(ctx); {
		case ctx.Err() != nil:
		case err != nil:
			level, attrs := r.in.failing.replays.Failed(slog.LevelWarn, err.Error())
			r.in.cfg.Logger.Log(ctx, level, "dead letters not replayed; trying again", append(attrs, "consumer", r.in.cfg.Consumer, "error", err)...)
		default:
			if attrs, report := r.in.failing.replays.Over(); report {
				r.in.cfg.Logger.InfoContext(ctx, "dead letters are replayed again", append(attrs, "consumer", r.in.cfg.Consumer)...)
			}
		}
		wait = replayWait(time.Since(begin))
	}
}

// replayWait returns the time to the next step, by what the last one took.
func replayWait(took time.Duration) time.Duration {
	return max(replayInterval, min(replayCost*took, mostReplayWait))
}

func (r *replayer) step(ctx context.Context) (replayed int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	failed := 0
	published := map[int64]publishedLetter{} // only of those that are still replaying
	filter := dlq.Filter{States: []dlq.State{dlq.StateReplaying}, Source: dlq.FromConsumer, OldestFirst: true, Limit: replayPage}
	for {
		from := filter
		page, err := ask(ctx, r.in, func(ctx context.Context) ([]*dlq.Letter, error) { return r.in.cfg.DeadLetters.List(ctx, from) })
		if err != nil {
			maps.Copy(r.published, published)
			if sqlerr.Connection(err) || noAnswer(err) {
				for id, last := range r.published {
					r.published[id] = last.afterOutage()
				}
			}
			return replayed, errors.Join(append(errs, err)...)
		}
		for _, l := range page {
			if !r.in.caresFor(l.Consumer) {
				continue
			}
			last, before := r.published[l.ID]
			if before && last.version != l.Version {
				last, before = publishedLetter{}, false
			}
			if before && time.Since(last.at) < last.wait {
				published[l.ID] = last
				continue
			}
			if r.in.isPaused(ctx, l.Consumer) {
				continue
			}
			did, err := r.publish(ctx, l.ID)
			switch {
			case did:
				replayed++
				published[l.ID] = last.next(l.Version)
			case err != nil:
				if errors.Is(err, errPublisherSilent) {
					published[l.ID] = last.next(l.Version) // it may have arrived, and the next ones are not to wait for it
				}
				if failed++; failed <= mostErrorsTold {
					errs = append(errs, fmt.Errorf("dead letter %d: %w", l.ID, err))
				}
			}
		}
		if len(page) < replayPage || ctx.Err() != nil {
			break
		}
		filter.After = page[len(page)-1].Cursor()
	}
	r.published = published
	if failed > mostErrorsTold {
		errs = append(errs, fmt.Errorf("and %d more dead letters", failed-mostErrorsTold))
	}
	return replayed, errors.Join(errs...)
}

// caresFor reports whether a consumer belongs to this inbox or one of its handlers, even
// if that handler has not received a message yet.
func (in *Inbox) caresFor(consumer string) bool {
	return consumer == in.cfg.Consumer || in.perHandler.Load() && strings.HasPrefix(consumer, in.cfg.Consumer+"/")
}

// publish publishes the message of a dead letter, unless another process was faster.
func (r *replayer) publish(ctx context.Context, id int64) (bool, error) {
	in := r.in
	// The token before the content: an edit in between makes the token stale, and a message
	// with a stale one has no effect.
	token, err := ask(ctx, in, func(ctx context.Context) (string, error) { return in.letters.ReplayToken(ctx, id) })
	if errors.Is(err, dlqstore.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read token: %w", err)
	}
	letter, err := ask(ctx, in, func(ctx context.Context) (*dlq.Letter, error) { return in.cfg.DeadLetters.Get(ctx, id) })
	switch {
	case errors.Is(err, dlq.ErrNotFound), err == nil && letter.State != dlq.StateReplaying:
		return false, nil
	case err != nil:
		return false, err
	}
	topic, err := r.topicOf(ctx, letter)
	if err != nil {
		return false, err
	}
	err = bounded.Call(ctx, r.calls, publishLimit, func(context.Context) error {
		return in.cfg.Replays.Publisher.Publish(topic, replayOf(ctx, letter, token))
	})
	if errors.Is(err, bounded.ErrNotReturned) {
		err = errPublisherSilent
	}
	if err != nil {
		return false, fmt.Errorf("publish to %q: %w", topic, err)
	}
	return true, nil
}

// topicOf returns the topic to publish a dead letter's message to.
func (r *replayer) topicOf(ctx context.Context, letter *dlq.Letter) (string, error) {
	topic := make(chan string, 1)
	err := bounded.Call(ctx, r.calls, publishLimit, func(context.Context) error {
		topic <- r.in.cfg.Replays.Topic(letter)
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("topic: %w", err)
	}
	if to := <-topic; to != "" {
		return to, nil
	}
	return "", errNoReplayTopic
}

var (
	errNoReplayTopic   = errors.New("the topic is unknown; set Config.Replays.Topic")
	errPublisherSilent = errors.New("the publisher has not returned; the message is published again later")
)
