package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// grouping returns an inbox whose groups wait until they have this many members.
func (p *testDB) grouping(t *testing.T, size int) *inbox.Inbox {
	t.Helper()
	return p.inbox(t, func(cfg *inbox.Config) { cfg.Group = inbox.Group{Size: size, Wait: time.Second} })
}

// deliverAll delivers messages at once and returns their errors, by id.
func deliverAll(t *testing.T, in *inbox.Inbox, h message.HandlerFunc, msgs ...*message.Message) map[string]error {
	t.Helper()
	handle := in.GroupMiddleware(h)
	return deliverTo(func(msg *message.Message) error {
		_, err := handle(msg)
		return err
	}, msgs...)
}

func deliverTo(handle message.NoPublishHandlerFunc, msgs ...*message.Message) map[string]error {
	var mu sync.Mutex
	errs := map[string]error{}
	var all sync.WaitGroup
	for _, msg := range msgs {
		all.Go(func() {
			err := handle(msg)
			mu.Lock()
			defer mu.Unlock()
			errs[msg.UUID] = err
		})
	}
	all.Wait()
	return errs
}

func newMessages(t *testing.T, ids ...string) (msgs []*message.Message) {
	for _, id := range ids {
		msgs = append(msgs, routed(t, id, "results"))
	}
	return msgs
}

func numbered(n int) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprintf("m%02d %s", i, `"\,{}'`))
	}
	return ids
}

func TestGroup_SharesOneTransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.grouping(t, 20)
		errs := deliverAll(t, in, returns("out"), newMessages(t, numbered(20)...)...)
		for id, err := range errs {
			if err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
		p.expect(t, 20, 20, 20)
		commits := 0
		for _, s := range p.tap.sent() {
			if s == "COMMIT" {
				commits++
			}
		}
		if commits != 1 {
			t.Errorf("%d transactions", commits)
		}
		// All are known now.
		for id, err := range deliverAll(t, in, returns("out"), newMessages(t, numbered(20)...)...) {
			if err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
		p.expect(t, 20, 20, 20)
		// Of a group of known and new ones, the new ones are handled.
		for id, err := range deliverAll(t, in, returns("out"), newMessages(t, append(numbered(10), strings.Split("abcdefghij", "")...)...)...) {
			if err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
		p.expect(t, 30, 30, 30)
	})
}

// onPostgreSQL is for what is about lib/pq.
func onPostgreSQL(t *testing.T, test func(t *testing.T, p *testDB)) {
	t.Helper()
	t.Parallel()
	for name, open := range testDBs {
		if name == "sqlite" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

// What one member does to itself, or to the transaction, is its own loss.
func TestGroup_OneBadMemberSpoilsNobody(t *testing.T) {
	deeds := map[string]func(*message.Message) error{
		"fails":         func(*message.Message) error { return errUndo },
		"panics":        func(*message.Message) error { panic(errUndo) },
		"bad statement": func(msg *message.Message) error { return handlerExec(msg, `insert into nowhere values (1)`) },
		"statement not looked at": func(msg *message.Message) error {
			_ = handlerExec(msg, `insert into nowhere values (1)`)
			return errUndo
		},
		"commits by method": func(msg *message.Message) error {
			tx, _ := handlerTx(msg.Context())
			return tx.Commit()
		},
		"commits by text": func(msg *message.Message) error { return handlerExec(msg, `commit`) },
		"rolls back":      func(msg *message.Message) error { return handlerExec(msg, `rollback`) },
		"fooled filter":   func(msg *message.Message) error { return errors.Join(handlerExec(msg, `select 'innocent'`), errUndo) },
		"commits unseen":  func(msg *message.Message) error { return handlerExec(msg, `select 'innocent'`) },
		"ended its context": func(msg *message.Message) error {
			ctx, cancel := context.WithCancel(msg.Context())
			cancel()
			tx, _ := handlerTx(msg.Context())
			_, err := tx.ExecContext(ctx, `insert into effects (message_id) values ('x')`)
			return err
		},
	}
	onEachDB(t, func(t *testing.T, p *testDB) {
		p.tap.rewrite(`select 'innocent'`, `commit`)
		n := 0
		for deed, do := range deeds {
			in := p.grouping(t, 8)
			ids := numbered(8)
			for i := range ids {
				ids[i] = deed + ids[i]
			}
			bad := ids[3]
			errs := deliverAll(t, in, func(msg *message.Message) ([]*message.Message, error) {
				err := addEffect(msg)
				if err == nil && msg.UUID == bad {
					err = do(msg)
				}
				return []*message.Message{message.NewMessage("out", nil)}, err
			}, newMessages(t, ids...)...)
			for id, err := range errs {
				if (err != nil) != (id == bad) {
					t.Errorf("%s: %v", id, err)
				}
			}
			n += 7
			p.expect(t, n, n, n)
			if p.count(t, `select count(*) from effects where message_id = $1`, bad) != 0 {
				t.Errorf("%s: the bad one left an effect", deed)
			}
			if n := p.db.Stats().InUse; n != 0 {
				t.Errorf("%s: %d connections in use", deed, n)
			}
		}
	})
}

// No way to commit early commits what others of the group have done, and a handle that
// a member has kept is of no use.
func TestGroup_IsSealed(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		for i, text := range p.commits() {
			p.tap.rewrite(fool, text)
			in := p.grouping(t, 4)
			var ids []string
			for _, name := range []string{"a", "b", "bad", "c"} {
				ids = append(ids, fmt.Sprint(name, i))
			}
			var mu sync.Mutex
			leaked := map[string]oncemill.Tx{}
			errs := deliverAll(t, in, func(msg *message.Message) ([]*message.Message, error) {
				tx, err := handlerTx(msg.Context())
				mu.Lock()
				leaked[msg.UUID] = tx
				mu.Unlock()
				err = errors.Join(err, addEffect(msg))
				if strings.HasPrefix(msg.UUID, "bad") {
					err = errors.Join(err, handlerExec(msg, fool))
				}
				return nil, err
			}, newMessages(t, ids...)...)
			for id, err := range errs {
				if (err != nil) != strings.HasPrefix(id, "bad") {
					t.Errorf("%s: %s: %v", text, id, err)
				}
			}
			p.expect(t, 3*(i+1), 3*(i+1), 0)
			for id, tx := range leaked {
				if id != ids[2] {
					useLeaked(t, tx, inbox.ErrTxEnded)
				}
			}
			if n := p.count(t, `select count(*) from effects where message_id = $1`, ids[2]); n != 0 || t.Failed() {
				t.Fatalf("%s: %d effects of the one that tried", text, n)
			}
		}
	})
}

func TestGroup_HoldsOneMessageOfAKeyAndOneCopy(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.grouping(t, 6)
		msgs := newMessages(t, "a1", "a2", "b1", "copy", "copy", "free")
		for _, msg := range msgs[:3] {
			msg.Metadata.Set("oncemill_key", msg.UUID[:1])
		}
		var mu sync.Mutex
		groups := map[string]int{} // of each message
		errs := deliverAll(t, in, func(msg *message.Message) ([]*message.Message, error) {
			mu.Lock()
			defer mu.Unlock()
			groups[msg.UUID] = strings.Count(strings.Join(p.tapped(), " "), "BEGIN")
			return nil, addEffect(msg)
		}, msgs...)
		for id, err := range errs {
			if err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
		p.expect(t, 5, 5, 0)
		if groups["a1"] == groups["a2"] || groups["b1"] != 1 || groups["free"] != 1 {
			t.Errorf("handled in groups %v", groups)
		}
	})
}

func TestGroup_RedeliveredMessagesRunAlone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.grouping(t, 4)
		msgs := newMessages(t, numbered(4)...)
		for _, msg := range msgs {
			msg.SetContext(inbox.ContextWithDelivery(msg.Context(), delivery{redelivered: true}))
		}
		for id, err := range deliverAll(t, in, effect, msgs...) {
			if err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
		p.expect(t, 4, 4, 0)
		if n := strings.Count(strings.Join(p.tap.sent(), " "), "COMMIT"); n != 4 {
			t.Errorf("%d transactions", n)
		}
	})
}

func TestGroup_MemberMayStopWaiting(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		running, goOn := make(chan struct{}, 1), make(chan struct{})
		handle := in.GroupMiddleware(func(msg *message.Message) ([]*message.Message, error) {
			if strings.HasPrefix(msg.UUID, "slow") {
				running <- struct{}{}
				<-goOn
			}
			return effect(msg)
		})
		var all sync.WaitGroup
		// While one group is handled others wait, unless they are a full one.
		all.Go(func() {
			_, err := handle(message.NewMessageWithContext(t.Context(), "slow", nil))
			expectNoError(t, err)
		})
		<-running
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := handle(message.NewMessageWithContext(ctx, "impatient", nil))
		expectError(t, err, context.Canceled)
		all.Go(func() {
			_, err := handle(message.NewMessageWithContext(t.Context(), "patient", nil))
			expectNoError(t, err)
		})
		close(goOn)
		all.Wait()
		p.expect(t, 2, 2, 0)
	})
}

// Two processes with groups on the same few rows, locked in any order.
func TestGroup_OnHotRowsBecomesSmallerAndLosesNothing(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	p := newTestDB(t, &pq.Driver{}, pg.DSN+"&binary_parameters=yes", pg.Config)
	p.exec(t, `create table hot (id int primary key, n int not null default 0)`)
	p.exec(t, `insert into hot select generate_series(1, 10)`)
	const messages = 600
	var all sync.WaitGroup
	var handlerErrors atomic.Int64
	todo := make(chan int, messages)
	for i := range messages {
		todo <- i
	}
	close(todo)
	for range 2 {
		db := pg.Open(t)
		db.SetMaxOpenConns(20)
		in, err := inbox.New(db, inbox.Config{Consumer: "stock", Database: pg.Config, Group: inbox.Group{Size: 20, LockTimeout: 20 * time.Millisecond}})
		if err != nil {
			t.Fatal(err)
		}
		handle := in.GroupMiddleware(func(msg *message.Message) ([]*message.Message, error) {
			return nil, errors.Join(handlerExec(msg, `update hot set n = n + 1 where id = $1`, 1+rand.IntN(10)), addEffect(msg))
		})
		for range 30 {
			all.Go(func() {
				for i := range todo {
					for attempt := 0; ; attempt++ {
						_, err := handle(message.NewMessageWithContext(t.Context(), fmt.Sprintf("m%d", i), nil))
						if err == nil {
							break
						}
						if handlerErrors.Add(1); attempt > 20 {
							t.Errorf("m%d: %v", i, err)
							break
						}
					}
				}
			})
		}
	}
	all.Wait()
	p.expect(t, messages, messages, 0)
	if n := p.count(t, `select sum(n) from hot`); n != messages {
		t.Errorf("the rows were updated %d times", n)
	}
	if n := handlerErrors.Load(); n > messages/10 {
		t.Errorf("%d attempts failed", n)
	}
}

func TestNew_RefusesGroupsThatCannotBe(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		_, err := inbox.New(p.db, inbox.Config{Consumer: "stock", Database: p.cfg, Group: inbox.Group{Size: 1, Bytes: -1, Wait: -1, LockTimeout: -1}})
		want := []string{"inbox.Config.Group.Bytes", "inbox.Config.Group.LockTimeout", "inbox.Config.Group.Size", "inbox.Config.Group.Wait"}
		if got := configFields(err); !slices.Equal(got, want) {
			t.Errorf("bad fields: got %v, want %v", got, want)
		}
	})
}

func TestGroup_RunsUnderEveryIsolationLevel(t *testing.T) {
	t.Parallel()
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			p := testDBs["postgresql"](t)
			in := p.inbox(t, func(cfg *inbox.Config) { cfg.Isolation = level; cfg.Group = inbox.Group{Size: 10, Wait: time.Second} })
			for id, err := range deliverAll(t, in, effect, newMessages(t, numbered(10)...)...) {
				if err != nil {
					t.Errorf("%s: %v", id, err)
				}
			}
			p.expect(t, 10, 10, 0)
		})
	}
}

// delivery is what a subscriber tells.
type delivery struct {
	redelivered bool
	arrivedAt   time.Time
	createdAt   time.Time
	delayed     *atomic.Int64
	nacks       int
}

func (d delivery) Redelivered() bool { return d.redelivered }

func (d delivery) ArrivedAt() time.Time { return d.arrivedAt }

func (d delivery) CreatedAt() time.Time { return d.createdAt }

func (d delivery) Yield() {}

func (d delivery) Nacks() int { return d.nacks }

func (d delivery) DelayNack(delay time.Duration) {
	if d.delayed != nil {
		d.delayed.Store(int64(delay))
	}
}

// tapped returns what was sent and leaves it there.
func (p *testDB) tapped() []string {
	p.tap.mu.Lock()
	defer p.tap.mu.Unlock()
	return slices.Clone(p.tap.statements)
}
