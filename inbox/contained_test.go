package inbox_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A function of Config that cannot cope with a message is as good as a handler that
// cannot: the message becomes a dead letter, and nothing else suffers.
func TestInbox_ContainsPanicsOfItsFunctions(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		strange := func(msg *message.Message) bool { return msg.UUID == "strange" }
		for name, change := range map[string]func(*inbox.Config){
			"id": func(cfg *inbox.Config) {
				cfg.ID = func(msg *message.Message) string {
					if strange(msg) {
						panic("no id")
					}
					return msg.UUID
				}
			},
			"key": func(cfg *inbox.Config) {
				cfg.Key = func(msg *message.Message) string {
					if strange(msg) {
						panic("no key")
					}
					return ""
				}
				cfg.Sequence = func(*message.Message) (int64, bool) { return 1, true }
			},
			"sequence": func(cfg *inbox.Config) {
				cfg.Sequence = func(msg *message.Message) (int64, bool) {
					if strange(msg) {
						panic("no number")
					}
					return 0, false
				}
			},
			"verify": func(cfg *inbox.Config) {
				cfg.Verify = func(msg *message.Message) error {
					if strange(msg) {
						panic("no signature")
					}
					return nil
				}
			},
			"fingerprint": func(cfg *inbox.Config) {
				cfg.Fingerprint = func(msg *message.Message) []byte {
					if strange(msg) {
						panic("no content")
					}
					return nil
				}
			},
			"classify": func(cfg *inbox.Config) {
				cfg.Classify = func(error) error { panic("no class") }
			},
			"classify to nothing": func(cfg *inbox.Config) {
				cfg.Classify = func(error) error { return nil }
			},
		} {
			for how, wrap := range map[string]func(*inbox.Inbox) message.HandlerMiddleware{
				"alone":  func(in *inbox.Inbox) message.HandlerMiddleware { return in.Middleware },
				"groups": func(in *inbox.Inbox) message.HandlerMiddleware { return in.GroupMiddleware },
			} {
				t.Run(name+", "+how, func(t *testing.T) {
					in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
						cfg.Consumer = name + " " + how
						cfg.Group.Wait = 50 * time.Millisecond
						change(cfg)
					})
					handle := wrap(in)(func(msg *message.Message) ([]*message.Message, error) {
						if strings.HasPrefix(name, "classify") && strange(msg) {
							return nil, inbox.Permanent(errUndo)
						}
						return effect(msg)
					})
					var all sync.WaitGroup
					for i := range 6 {
						all.Go(func() {
							_, err := handle(message.NewMessageWithContext(t.Context(), fmt.Sprint("good ", i), nil))
							expectNoError(t, err)
						})
					}
					all.Go(func() {
						for range 3 { // until it is a dead letter
							if _, err := handle(message.NewMessageWithContext(t.Context(), "strange", nil)); err == nil {
								return
							}
						}
					})
					all.Wait()
					if l := dead.last(); (l.Stack == "") != (name == "classify to nothing") || l.Consumer != name+" "+how {
						t.Errorf("no letter with a stack, but %+v", l)
					}
					if l := dead.last(); strings.HasPrefix(name, "classify") && (l.Reason != string(inbox.ReasonPermanent) || !strings.Contains(l.Error, errUndo.Error())) {
						t.Errorf("what the handler said is forgotten: %s, %s", l.Reason, l.Error)
					}
				})
			}
		}
	})
}

// A leader whose group has left its own message behind can be told to lead again while
// it is at work, and another one can take that message. If its goroutine ends then,
// nobody hears what it was told: its place must not be taken for good.
func TestGroups_GoOnWhenALeaderThatWasLeftBehindEnds(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	busy, goOn := make(chan struct{}), make(chan struct{})
	in := p.inbox(t, func(cfg *inbox.Config) {
		cfg.Group = inbox.Group{Size: 25, Wait: time.Second}
	})
	handle := in.GroupMiddleware(func(msg *message.Message) ([]*message.Message, error) {
		if msg.UUID == "deadly" {
			select {
			case busy <- struct{}{}:
				<-goOn
			case <-time.After(time.Second):
			}
			runtime.Goexit()
		}
		return effect(msg)
	})
	var all sync.WaitGroup
	send := func(id string, arrived time.Time) {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(inbox.ContextWithDelivery(t.Context(), delivery{arrivedAt: arrived}), 5*time.Second)
			defer cancel()
			msg := message.NewMessageWithContext(ctx, id, nil)
			if id == "leader" || id == "deadly" {
				msg.Metadata.Set("oncemill_key", "theirs") // they do not fit into one group
			}
			_, _ = handle(msg) // not all live so long
		})
		time.Sleep(2 * time.Millisecond) // in this order
	}
	now := time.Now()
	send("leader", now)
	send("deadly", now.Add(-time.Hour))
	for i := range 23 {
		send(fmt.Sprint("old ", i), now.Add(-time.Hour))
	}
	select {
	case <-busy: // the leader handles a group without itself
	case <-time.After(testserver.MaxWait):
		t.Fatal("the handler has not been reached")
	}
	for i := range 51 {
		send(fmt.Sprint("new ", i), now.Add(time.Hour))
	}
	time.Sleep(300 * time.Millisecond) // for the other leaders
	close(goOn)
	all.Wait()

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := handle(message.NewMessageWithContext(ctx, "late", nil))
	expectNoError(t, err)
}

// A message whose time ends while it waits for a group has had no attempt.
func TestGroups_WaitingIsNoAttempt(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) { cfg.Retry.Tries, cfg.Retry.Deliveries = 1, 2 })
	running, goOn := make(chan struct{}), make(chan struct{})
	handle := in.GroupMiddleware(func(msg *message.Message) ([]*message.Message, error) {
		if msg.UUID == "slow" {
			close(running)
			<-goOn
		}
		return effect(msg)
	})
	var all sync.WaitGroup
	all.Go(func() {
		_, err := handle(message.NewMessageWithContext(t.Context(), "slow", nil))
		expectNoError(t, err)
	})
	<-running
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := handle(message.NewMessageWithContext(ctx, "late", nil))
		expectError(t, err, context.DeadlineExceeded)
		cancel()
	}
	close(goOn)
	all.Wait()
	if l := dead.last(); l.MessageID != "" {
		t.Errorf("it is a dead letter: %s, %s", l.Reason, l.Error)
	}
	p.expectNotes(t, 0, 0)
}
