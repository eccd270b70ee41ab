package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox/payload"
)

// The end of a replay is part of the commit whose answer is lost.
func TestReplays_ALostAnswerOfTheirCommit(t *testing.T) {
	t.Parallel()
	for name, runs := range map[string]int{"the commit has arrived": 1, "the commit has not arrived": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := testDBs["postgresql"](t)
			in, store, rec := p.replaying(t, nil)
			expectNoError(t, deliverMessage(t, in, message.NewMessage("a", nil), bad))
			publishReplays(t, in, store)
			cut := testserver.NewCommitCutter(t, p.dsn, runs == 1)
			through := *p
			through.tap = &tap{driver: p.tap.driver, dsn: cut.DSN}
			through.db = openTap(t, through.tap)
			in, _, _ = through.replaying(t, nil)
			ran := 0
			handler := func(msg *message.Message) ([]*message.Message, error) {
				ran++
				return effect(msg)
			}
			cut.Arm()
			expectError(t, deliverMessage(t, in, redeliver(t, rec.msgs[0], false), handler), inbox.ErrCommitUnknown)
			for range 2 {
				expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[0], true), handler))
			}
			p.expect(t, 1, 1, 0)
			if got := statesOf(t, store); ran != runs || len(got) != 1 || got["replayed permanent"] != 1 {
				t.Errorf("the handler ran %d times, want %d; letters %v", ran, runs, got)
			}
		})
	}
}

// Copies of a replay that come at once, at every level.
func TestReplays_CopiesAtOnceHaveOneEffect(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		levels := []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}
		if p.cfg.Dialect == oncemill.SQLite {
			levels = levels[2:]
		}
		for i, level := range levels {
			in, store, rec := p.replaying(t, func(cfg *inbox.Config) { cfg.Isolation = level })
			expectNoError(t, deliverMessage(t, in, message.NewMessage(fmt.Sprint("m", i), nil), bad))
			publishReplays(t, in, store)
			var copies sync.WaitGroup
			for range 10 {
				m := redeliver(t, rec.msgs[0], false)
				copies.Go(func() {
					for try := 0; deliverMessage(t, in, m, effect) != nil; try++ {
						if try == 100 {
							t.Errorf("%v: a copy is never settled", level)
							return
						}
					}
				})
			}
			copies.Wait()
			p.expect(t, i+1, i+1, 0)
			if got := statesOf(t, store); got["replayed permanent"] != i+1 || len(got) != 1 {
				t.Errorf("%v: letters %v", level, got)
			}
		}
	})
}

// What cannot be decoded was made by anybody, whatever it says to replay.
func TestReplays_WhatCannotBeDecodedEndsNone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, nil)
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", []byte("genuine")), bad))
		ids := publishReplays(t, in, store)
		forged := redeliver(t, rec.msgs[0], false)
		forged.Payload = []byte("forged")
		expectNoError(t, deliverMessage(t, in, forged, func(*message.Message) ([]*message.Message, error) {
			return nil, inbox.Permanent(&payload.DecodeError{MessageID: "a", Err: errors.New("the key is unknown")})
		}))
		letter, err := store.Get(t.Context(), ids[0])
		if err != nil || letter.State != "replaying" {
			t.Errorf("the replay has ended: %+v, %v", letter, err)
		}
		expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[0], false), effect))
		p.expect(t, 1, 1, 0)
	})
}

// A publisher that panics for one message delays no other, and ends nothing.
func TestReplays_SurviveAPublisherThatPanics(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		rec := &recorder{first: func() { panic("no such exchange") }}
		in, store, _ := p.replaying(t, func(cfg *inbox.Config) { cfg.Replays.Publisher = rec })
		for _, id := range []string{"a", "b"} {
			expectNoError(t, deliverMessage(t, in, message.NewMessage(id, nil), bad))
		}
		replayAll(t, store, "stock")
		n, err := in.Replay(t.Context())
		var panicked *oncemill.PanicError
		if !errors.As(err, &panicked) || n != 1 {
			t.Errorf("%d replayed, %v", n, err)
		}
		if n, err := in.Replay(t.Context()); n != 1 || err != nil {
			t.Errorf("then %d replayed, %v", n, err)
		}
	})
}

// outage is a publisher whose database goes away after some messages.
type outage struct {
	recorder
	tap   *tap
	after int64
	sent  atomic.Int64
}

func (o *outage) Publish(topic string, msgs ...*message.Message) error {
	if o.sent.Add(1) == o.after {
		o.tap.goAway(true)
	}
	return o.recorder.Publish(topic, msgs...)
}

// A step that ends half-way has not forgotten what it has published.
func TestReplays_AStepThatEndsEarlyPublishesNothingTwice(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	const letters, page = 230, 200
	publisher := &outage{tap: p.tap, after: page}
	in, store, _ := p.replaying(t, func(cfg *inbox.Config) { cfg.Replays.Publisher = publisher })
	for i := range letters {
		expectNoError(t, deliverMessage(t, in, message.NewMessage(fmt.Sprint("m", i), nil), bad))
	}
	replayAll(t, store, "stock")
	n, err := in.Replay(t.Context())
	p.tap.goAway(false)
	if err == nil || n != page || errors.Is(err, context.Canceled) {
		t.Fatalf("%d replayed, %v: the outage has not come where it should", n, err)
	}
	if n, err = in.Replay(t.Context()); err != nil || n != letters-page {
		t.Errorf("%d replayed then, %v; %d messages were published of %d letters", n, err, len(publisher.msgs), letters)
	}
}

// A standby that takes over may not know what ended a replay, whose message is acknowledged. So the
// message is published again soon after an outage, not only when it is late.
func TestReplays_PublishAgainSoonAfterAnOutage(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	in, store, rec := p.replaying(t, nil)
	expectNoError(t, deliverMessage(t, in, message.NewMessage("a", nil), bad))
	publishReplays(t, in, store)
	if n, err := in.Replay(t.Context()); n != 0 || err != nil {
		t.Errorf("published %d times more, %v", n, err)
	}
	p.tap.goAway(true)
	_, err := in.Replay(t.Context())
	p.tap.goAway(false)
	if err == nil {
		t.Fatal("there was no outage")
	}
	testserver.Eventually(t, "the message to be published again", func() bool {
		_, err := in.Replay(t.Context())
		return err == nil && len(rec.msgs) > 1
	})
	expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[1], false), effect))
	p.expect(t, 1, 1, 0)
	if got := statesOf(t, store); got["replayed permanent"] != 1 {
		t.Errorf("letters %v", got)
	}
}
