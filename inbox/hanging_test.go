package inbox_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// grouping is a handler of messages, in groups or batches.
type grouping func(in *inbox.Inbox, each func(*message.Message) error) func(*message.Message) error

var groupings = map[string]grouping{
	"group": func(in *inbox.Inbox, each func(*message.Message) error) func(*message.Message) error {
		handle := in.GroupMiddleware(func(m *message.Message) ([]*message.Message, error) { return nil, each(m) })
		return func(m *message.Message) error { _, err := handle(m); return err }
	},
	"batch": func(in *inbox.Inbox, each func(*message.Message) error) func(*message.Message) error {
		return in.Batch(func(_ context.Context, msgs []*message.Message) error {
			for _, m := range msgs {
				if err := each(m); err != nil {
					return err
				}
			}
			return nil
		})
	},
}

// A handler that does not return though its time is up keeps its own message. Those that were in
// its group are handled, and so is what comes later. Its transaction is over when it returns at last.
func TestGroup_AHandlerThatHangsKeepsItsOwnMessageOnly(t *testing.T) {
	t.Parallel()
	for name, grouped := range groupings {
		t.Run(name, func(t *testing.T) {
			onEachDB(t, func(t *testing.T, p *testDB) {
				in := p.inbox(t, func(cfg *inbox.Config) {
					cfg.Timeout, cfg.Group.Wait, cfg.Group.Size = time.Second, 200*time.Millisecond, 10
					cfg.Retry = inbox.Retry{Tries: 1}
				})
				release := make(chan struct{})
				end := sync.OnceFunc(func() { close(release) })
				defer end()
				var runs atomic.Int32
				handle := grouped(in, func(m *message.Message) error {
					if m.UUID == "hangs" {
						runs.Add(1)
						<-release
					}
					return addEffect(m)
				})
				deliver := func(id string) error {
					m := message.NewMessageWithContext(inbox.ContextWithDelivery(t.Context(), delivery{}), id, nil)
					m.Metadata.Set("oncemill_key", id) // the order of a group is that of its keys
					return handle(m)
				}
				handled := func(id string) {
					for deliver(id) != nil { // on SQLite it may wait too long for the turn to write
						testserver.Pause(t.Context(), 10*time.Millisecond)
					}
				}
				var all, others sync.WaitGroup
				all.Go(func() { _ = deliver("hangs") })
				for _, id := range []string{"a", "before", "hopes", "z"} {
					others.Go(func() { handled(id) })
				}
				beside := make(chan struct{})
				go func() {
					defer close(beside)
					others.Wait()
					for i := range 3 {
						handled(fmt.Sprint("later ", i))
					}
				}()
				awaited(t, beside, "the others are handled beside the one that hangs")
				if n := runs.Load(); n == 0 {
					t.Error("the handler that hangs did not run: the test shows nothing")
				}
				end()
				all.Wait()
				effects, ids := p.count(t, `select count(*) from effects`), p.count(t, `select count(*) from {{inbox}}`)
				if effects != ids || effects < 7 { // it may have been in time when it ran alone
					t.Errorf("%d effects of %d messages, want those of the seven others", effects, ids)
				}
			})
		})
	}
}

// A handler that ends its goroutine ends no other member's.
func TestGroup_AHandlerThatEndsItsGoroutineEndsNoOthers(t *testing.T) {
	t.Parallel()
	for name, grouped := range groupings {
		t.Run(name, func(t *testing.T) {
			onEachDB(t, func(t *testing.T, p *testDB) {
				in := p.inbox(t, func(cfg *inbox.Config) { cfg.Group.Wait = 200 * time.Millisecond })
				handle := grouped(in, func(m *message.Message) error {
					if m.UUID == "ends" {
						runtime.Goexit()
					}
					return addEffect(m)
				})
				var all sync.WaitGroup
				for _, id := range []string{"a", "ends", "z"} {
					all.Go(func() {
						err := handle(message.NewMessageWithContext(inbox.ContextWithDelivery(t.Context(), delivery{}), id, nil))
						expectNoError(t, err) // is not reached by the one that ends
					})
				}
				all.Wait()
				p.expect(t, 2, 2, 0)
			})
		})
	}
}

// An isolated message whose handler does not return keeps no other isolated message out.
func TestBrakes_AnIsolatedMessageThatHangsKeepsNoIsolatedMessageOut(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, _ := p.withDeadLetters(t, func(cfg *inbox.Config) { cfg.Timeout = time.Second })
		isolated := func(id string) *message.Message { return from(t, id, delivery{redelivered: true}) }
		for _, id := range []string{"hangs", "innocent"} {
			crash(t, in, isolated(id))
		}
		hanging, release := make(chan struct{}), make(chan struct{})
		end := sync.OnceFunc(func() { close(release) })
		defer end()
		var all sync.WaitGroup
		all.Go(func() {
			_ = deliverMessage(t, in, isolated("hangs"), func(*message.Message) ([]*message.Message, error) {
				close(hanging)
				<-release
				return nil, errUndo
			})
		})
		<-hanging
		handled := make(chan struct{})
		go func() {
			defer close(handled)
			for deliverMessage(t, in, isolated("innocent"), effect) != nil { // not alone, at first
				testserver.Pause(t.Context(), 50*time.Millisecond)
			}
		}()
		awaited(t, handled, "the innocent message is handled")
		expectNoError(t, deliver(t, in, "new", effect))
		end()
		all.Wait()
		p.expect(t, 2, 2, 0)
	})
}

// A charge that is slower than the time in which a message is alone counts for nothing: others run
// beside it then.
func TestBrakes_ASlowChargeCountsForNothing(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	in, proxy := p.behindProxy(t, func(cfg *inbox.Config) { cfg.DeadLetters, cfg.Retry.Crashes = p.letterStore(t), 2 })
	isolated := func() *message.Message { return from(t, "isolated", delivery{redelivered: true}) }
	crash(t, in, isolated())
	slow := func(statement string) bool { // not as long as the server lets a transaction stand idle
		return testserver.Containing("begin")(statement) || testserver.Containing("alone + 1")(statement)
	}
	proxy.Delay(slow, 1300*time.Millisecond)
	for range 3 {
		_ = deliverMessage(t, in, isolated(), func(*message.Message) ([]*message.Message, error) { return nil, inbox.Unavailable(errUndo) })
	}
	proxy.Delay(nil, 0)
	if n := p.count(t, `select alone from {{inbox_failures}}`); n != 0 {
		t.Errorf("the message is charged with %d", n)
	}
	eventually(t, "the message is handled", func() bool { return deliverMessage(t, in, isolated(), effect) == nil })
}

// What a user's archive does keeps Run from nothing but its own batch.
func TestInbox_AnArchiveThatEndsItsGoroutineOrHangsEndsNoPurge(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		_, exec, ago := purgeable(t, p)
		exec(`insert into {{inbox}} (consumer, message_id, received_at) values ('stock', 'old', ` + ago("3") + `)`)
		release := make(chan struct{})
		defer close(release)
		hang := false
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.Retention = 2 * time.Hour
			cfg.Archive = func(context.Context, []inbox.ArchivedID) error {
				if hang {
					<-release
				}
				runtime.Goexit()
				return nil
			}
		})
		purge := func(ctx context.Context) error {
			failed := make(chan error, 1)
			go func() {
				defer close(failed)
				_, err := in.Purge(ctx)
				failed <- err
			}()
			return awaited(t, failed, "the purge returns")
		}
		if err := purge(t.Context()); err == nil {
			t.Error("the archive ended the goroutine of the purge, or had the ids removed")
		}
		hang = true
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := purge(ctx); err == nil {
			t.Error("an archive that hangs is no error")
		}
		p.expect(t, 0, 1, 0)
	})
}

// endsOrHangs is a publisher that ends its goroutine or hangs.
type endsOrHangs struct {
	message.Publisher
	hang chan struct{} // nil: it ends its goroutine
}

func (p *endsOrHangs) Publish(string, ...*message.Message) error {
	if p.hang != nil {
		<-p.hang
	}
	runtime.Goexit()
	return nil
}

// What the functions of Replays do ends no goroutine of Run.
func TestReplays_APublisherThatEndsItsGoroutineOrHangsEndsNoReplay(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		publisher := &endsOrHangs{}
		topic := toQueue
		in, store, _ := p.replaying(t, func(cfg *inbox.Config) {
			cfg.Replays = &inbox.Replays{Publisher: publisher, Topic: func(l *dlq.Letter) string { return topic(l) }}
		})
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", nil), bad))
		replayAll(t, store, "stock")
		replay := func(ctx context.Context) error {
			failed := make(chan error, 1)
			go func() {
				defer close(failed)
				_, err := in.Replay(ctx)
				failed <- err
			}()
			return awaited(t, failed, "the step returns")
		}
		if err := replay(t.Context()); err == nil {
			t.Error("a publisher that ends its goroutine ended another")
		}
		topic = func(*dlq.Letter) string { runtime.Goexit(); return "" }
		if err := replay(t.Context()); err == nil {
			t.Error("a Topic that ends its goroutine ended another")
		}
		topic, publisher.hang = toQueue, make(chan struct{})
		defer close(publisher.hang)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := replay(ctx); err == nil {
			t.Error("a publisher that hangs is no error")
		}
	})
}

// awaited returns what comes, or fails the test if nothing does.
func awaited[T any](t *testing.T, from <-chan T, what string) T {
	t.Helper()
	var v T
	eventually(t, what, func() bool {
		select {
		case v = <-from:
			return true
		default:
			return false
		}
	})
	return v
}
