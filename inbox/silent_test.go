package inbox_test

import (
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// behindProxy returns an inbox whose connections lead through a proxy.
func (p *testDB) behindProxy(t *testing.T, change func(*inbox.Config)) (*inbox.Inbox, *testserver.PostgresProxy) {
	t.Helper()
	proxy, dsn := testserver.NewPostgresProxy(t, p.dsn)
	db, err := sql.Open(testserver.DriverName(), dsn)
	expectNoError(t, err)
	t.Cleanup(func() {
		proxy.Cut()
		// What was abandoned gives its connection back.
		eventually(t, "no connection is in use", func() bool { return db.Stats().InUse == 0 })
		expectNoError(t, db.Close())
	})
	cfg := inbox.Config{Consumer: "stock", Database: p.cfg, Retry: inbox.Retry{Tries: 1}}
	change(&cfg)
	in, err := inbox.New(db, cfg)
	expectNoError(t, err)
	return in, proxy
}

// A server falls silent at each step of an attempt. The delivery ends all the same, mostly
// with an error, which is no attempt of the message's, and the next one, on another
// connection, handles the message.
func TestInbox_GoesOnWhenTheServerFallsSilent(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"begin", "claim", "effect", "seal", "commit"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			p := postgres(t, "binary_parameters=yes")
			in, proxy := p.behindProxy(t, func(cfg *inbox.Config) { cfg.Timeout, cfg.DeadLetters = 2*time.Second, p.letterStore(t) })
			text := step
			switch step {
			case "claim":
				text = "oncemill.lock_timeout"
			case "effect":
				text = "insert into effects"
			case "seal":
				text = "sealed"
			}
			expectNoError(t, deliver(t, in, "before", effect))
			proxy.Silence(testserver.Containing(text), 1)
			// A connection that was closed in time is a lost one: the inbox tries again itself.
			if err := deliver(t, in, "a", effect); (step == "commit") != errors.Is(err, inbox.ErrCommitUnknown) {
				t.Errorf("the delivery that met silence: %v", err)
			}
			if n := proxy.Silenced(); n != 1 {
				t.Errorf("%d connections were silenced", n)
			}
			if step == "commit" {
				proxy.Resume() // the commit arrives
				eventually(t, "the commit has arrived", func() bool { return p.count(t, `select count(*) from effects`) == 2 })
			} else {
				proxy.Cut()
			}
			eventually(t, "the message is handled", func() bool { return deliver(t, in, "a", effect) == nil })
			p.expect(t, 2, 2, 0)
			counted := 0
			if step == "effect" && testserver.DriverName() == "pgx" { // which returns when the time is over, and does not tell why
				counted = 1
			}
			if n := p.count(t, `select count(*) from {{inbox_failures}}`); n != counted {
				t.Errorf("%d failures were counted, want %d", n, counted)
			}
		})
	}
}

// A server that does not find out that its client is gone keeps the transaction, and with
// it the id, for no longer than a handler may take.
func TestInbox_AnIDIsFreeAgainThoughTheServerKeepsTheConnection(t *testing.T) {
	t.Parallel()
	p := postgres(t, "binary_parameters=yes")
	in, proxy := p.behindProxy(t, func(cfg *inbox.Config) {
		cfg.Timeout, cfg.LockTimeout, cfg.DeadLetters, cfg.Group.Wait = 2*time.Second, time.Millisecond, p.letterStore(t), time.Millisecond
	})
	group := in.GroupMiddleware(effect)
	for name, handle := range map[string]func(id string) error{
		"alone": func(id string) error { return deliver(t, in, id, effect) },
		"group": func(id string) error {
			_, err := group(message.NewMessageWithContext(t.Context(), id, nil))
			return err
		},
	} {
		proxy.Silence(testserver.Containing("insert into effects"), 1)
		if err := handle(name); err == nil {
			t.Errorf("%s: handled by a silent server", name)
		}
		if err := handle(name); err == nil {
			t.Errorf("%s: the id was free: the test shows nothing", name)
		}
		eventually(t, "the message is handled", func() bool {
			testserver.Pause(t.Context(), 100*time.Millisecond) // the server takes many seconds
			return handle(name) == nil
		})
	}
	p.expect(t, 2, 2, 0)
}

// A group shares the fate of its transaction.
func TestGroup_GoesOnWhenTheServerFallsSilent(t *testing.T) {
	t.Parallel()
	p := postgres(t, "binary_parameters=yes")
	in, proxy := p.behindProxy(t, func(cfg *inbox.Config) {
		cfg.Timeout, cfg.DeadLetters, cfg.Group.Size, cfg.Group.Wait = 2*time.Second, p.letterStore(t), 5, time.Second
	})
	h := in.GroupMiddleware(effect)
	proxy.Silence(testserver.Containing("insert into effects"), 1)
	failed := make(chan error, 5)
	ids := []string{"a", "b", "c", "d", "e"}
	for _, id := range ids {
		go func() {
			_, err := h(message.NewMessageWithContext(t.Context(), id, nil))
			failed <- err
		}()
	}
	for range ids {
		if err := <-failed; err == nil {
			t.Error("handled by a silent server")
		}
	}
	proxy.Cut()
	for _, id := range ids {
		eventually(t, "the message is handled", func() bool { _, err := h(message.NewMessageWithContext(t.Context(), id, nil)); return err == nil })
	}
	p.expect(t, 5, 5, 0)
	if n := p.count(t, `select count(*) from {{inbox_failures}}`); n != 0 {
		t.Errorf("%d failures were counted", n)
	}
}

// Handlers are more than the pool has connections, all of which fall silent, and stay so.
func TestInbox_ASilentServerUsesNoPoolUp(t *testing.T) {
	t.Parallel()
	for name, busy := range map[string]bool{"in statements": false, "with something else": true} {
		t.Run("handlers are "+name, func(t *testing.T) {
			t.Parallel()
			meetSilence(t, busy)
		})
	}
}

func meetSilence(t *testing.T, busy bool) {
	t.Helper()
	p := postgres(t, "binary_parameters=yes")
	proxy, dsn := testserver.NewPostgresProxy(t, p.dsn)
	db, err := sql.Open(testserver.DriverName(), dsn)
	expectNoError(t, err)
	t.Cleanup(func() { expectNoError(t, db.Close()) })
	db.SetMaxOpenConns(4)
	in, err := inbox.New(db, inbox.Config{Consumer: "stock", Database: p.cfg, Timeout: 2 * time.Second, DeadLetters: p.letterStore(t)})
	expectNoError(t, err)
	const before, messages = 4, 20
	begun, silent := make(chan struct{}), make(chan struct{})
	meets := func(msg *message.Message) ([]*message.Message, error) {
		first := false
		select {
		case <-silent:
		case begun <- struct{}{}:
			first = true
		}
		<-silent
		if first && busy { // until its time is up
			<-msg.Context().Done()
			return nil, msg.Context().Err()
		}
		return effect(msg)
	}
	var all sync.WaitGroup
	var handled atomic.Int32
	for n := range messages {
		all.Go(func() {
			for last, since := int32(0), time.Now(); deliver(t, in, fmt.Sprint("m", n), meets) != nil; testserver.Pause(t.Context(), 5*time.Millisecond) {
				if now := handled.Load(); now != last {
					last, since = now, time.Now()
				}
				if time.Since(since) > 3*time.Minute {
					t.Errorf("message %d is not handled", n)
					return
				}
			}
			handled.Add(1)
		})
	}
	for range before { // each has a connection
		<-begun
	}
	proxy.Silence(nil, 0)
	close(silent)
	all.Wait()
	p.expect(t, messages, messages, 0)
}

// Notes and housekeeping have limits of their own.
func TestInbox_AbandonsItsHousekeeping(t *testing.T) {
	t.Parallel()
	p := postgres(t, "binary_parameters=yes")
	in, proxy := p.behindProxy(t, func(*inbox.Config) {})
	proxy.Silence(testserver.Containing("delete from"), 1)
	if _, err := in.Purge(t.Context()); err == nil {
		t.Error("a silent server has answered")
	}
	_, err := in.Purge(t.Context())
	expectNoError(t, err)
}

// A handler that takes too long has failed, also if it heeds no context.
func TestInbox_ALongHandlerIsAFailure(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		letters := p.letterStore(t)
		var err error
		for try := range 10 { // on a slow machine the transaction may not begin in time
			in := p.inbox(t, func(cfg *inbox.Config) {
				cfg.Timeout, cfg.DeadLetters, cfg.Retry.Deliveries = 100*time.Millisecond<<try, letters, 1
			})
			err = deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
				err := addEffect(msg)
				<-msg.Context().Done()
				return nil, err
			})
			if err == nil {
				break
			}
		}
		expectNoError(t, err)
		p.expect(t, 0, 1, 0) // the id of a dead letter
	})
}

var eventually = testserver.Eventually

// A note whose connection falls silent in the middle keeps its row for as long as the
// server waits for its client, and no longer.
func TestInbox_ANoteWhoseConnectionIsSilentHoldsNothingUp(t *testing.T) {
	t.Parallel()
	p := postgres(t, "binary_parameters=yes")
	in, proxy := p.behindProxy(t, func(cfg *inbox.Config) {
		cfg.Timeout, cfg.LockTimeout, cfg.DeadLetters = 2*time.Second, 100*time.Millisecond, p.letterStore(t)
	})
	proxy.Silence(testserver.Containing("set errors"), 1)
	msg := message.NewMessageWithContext(t.Context(), "a", nil)
	if _, err := in.Middleware(func(*message.Message) ([]*message.Message, error) { return nil, errors.New("fails once") })(msg); err == nil || proxy.Silenced() != 1 {
		t.Fatalf("%v; %d connections are silent", err, proxy.Silenced())
	}
	tries := 0
	for ; tries < 5; tries++ { // each waits for up to 10 s
		msg := message.NewMessageWithContext(inbox.ContextWithDelivery(t.Context(), delivery{redelivered: true}), "a", nil)
		if _, err := in.Middleware(effect)(msg); err == nil {
			return
		}
	}
	t.Errorf("after %d redeliveries it is not handled", tries)
}
