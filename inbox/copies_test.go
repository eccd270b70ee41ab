package inbox_test

import (
	"database/sql"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A broker delivers 50 copies at once, and each again until it is acknowledged. In a short run one
// of the databases has all isolation levels.
func TestInbox_CopiesAtOnceHaveOneEffect(t *testing.T) {
	t.Parallel()
	levels := map[string]sql.IsolationLevel{
		"default": sql.LevelDefault, "repeatable read": sql.LevelRepeatableRead, "serializable": sql.LevelSerializable,
	}
	for name, open := range testDBs {
		for level, isolation := range levels {
			if name == "sqlite" && isolation == sql.LevelRepeatableRead {
				continue // SQLite has it not
			}
			if !testserver.Long() && name != "postgresql" && level != "default" {
				continue
			}
			t.Run(name+"/"+level, func(t *testing.T) {
				t.Parallel()
				p := open(t)
				p.db.SetMaxOpenConns(20)
				in := p.inbox(t, func(cfg *inbox.Config) { cfg.Isolation = isolation })
				var copies sync.WaitGroup
				var runs atomic.Int32
				for range 50 {
					copies.Go(func() {
						for attempt := 0; ; attempt++ {
							err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
								event := message.NewMessageWithContext(msg.Context(), "b", nil)
								err := errors.Join(addEffect(msg), p.box.ContextPublisher().Publish("events", event))
								if runs.Add(1) <= 2 {
									err = errors.Join(err, errUndo)
								}
								return nil, err
							})
							if err == nil {
								return
							}
							if !errors.Is(err, inbox.ErrBeingHandled) && !errors.Is(err, errUndo) || attempt > 100 {
								t.Errorf("attempt %d: %v", attempt, err)
								return
							}
						}
					})
				}
				copies.Wait()
				p.expect(t, 1, 1, 1)
				if n := runs.Load(); n != 3 {
					t.Errorf("the handler ran %d times", n)
				}
			})
		}
	}
}

// A copy that comes while the first is being handled does not wait for long, and
// what it finds when it comes again is what became of the first.
func TestPostgres_CopyOfAMessageBeingHandledComesAgain(t *testing.T) {
	t.Parallel()
	levels := map[string]sql.IsolationLevel{
		"read committed": sql.LevelReadCommitted, "repeatable read": sql.LevelRepeatableRead, "serializable": sql.LevelSerializable,
	}
	outcomes := map[string]error{"first commits": nil, "first fails": errUndo}
	for level, isolation := range levels {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			p := testDBs["postgresql"](t)
			in := p.inbox(t, func(cfg *inbox.Config) {
				cfg.Isolation = isolation
				cfg.LockTimeout = 20 * time.Millisecond
			})
			for id, outcome := range outcomes {
				err := deliver(t, in, id, func(msg *message.Message) ([]*message.Message, error) {
					start := time.Now()
					expectError(t, deliver(t, in, id, effect), inbox.ErrBeingHandled)
					if waited := time.Since(start); waited < 20*time.Millisecond || waited > 4*time.Second {
						t.Errorf("waited %v", waited)
					}
					return nil, errors.Join(addEffect(msg), outcome)
				})
				expectError(t, err, outcome)
				expectNoError(t, deliver(t, in, id, effect))
			}
			p.expect(t, 2, 2, 0)
		})
	}
}

// The copy waits while the first commits. Above READ COMMITTED its snapshot is
// then too old to see that; it must not take that for a failure of the message.
func TestPostgres_CopyThatSeesTheFirstCommitIsADuplicateOrComesAgain(t *testing.T) {
	t.Parallel()
	for isolation, want := range map[sql.IsolationLevel]error{
		sql.LevelReadCommitted: nil, sql.LevelRepeatableRead: inbox.ErrBeingHandled, sql.LevelSerializable: inbox.ErrBeingHandled,
	} {
		t.Run(isolation.String(), func(t *testing.T) {
			t.Parallel()
			p := testDBs["postgresql"](t)
			in := p.inbox(t, func(cfg *inbox.Config) {
				cfg.Isolation = isolation
				cfg.LockTimeout = time.Minute
			})
			second := make(chan error, 1)
			err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
				go func() { second <- deliver(t, in, "a", effect) }()
				p.awaitLockWait(t)
				return effect(msg)
			})
			expectNoError(t, err)
			expectError(t, <-second, want)
			expectNoError(t, deliver(t, in, "a", effect))
			p.expect(t, 1, 1, 0)
		})
	}
}

// awaitLockWait returns once a statement on the inbox waits for a lock.
func (p *testDB) awaitLockWait(t *testing.T) {
	t.Helper()
	eventually(t, "one statement waits for a lock", func() bool {
		return p.count(t, `select count(*) from pg_stat_activity where wait_event_type = 'Lock' and strpos(query, '{{inbox}}') > 0`) == 1
	})
}

func TestInbox_DifferentMessagesDoNotWaitForEachOther(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	in := p.inbox(t, nil)
	err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
		expectNoError(t, deliver(t, in, "b", effect))
		return effect(msg)
	})
	expectNoError(t, err)
	p.expect(t, 2, 2, 0)
}

// A transaction that was begun by hand does not end for longer than a delivery waits.
func TestSQLite_BusyDatabaseComesAgain(t *testing.T) {
	t.Parallel()
	p := testDBs["sqlite"](t)
	in := p.inbox(t, nil)
	tx, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	expectError(t, deliver(t, in, "a", effect), inbox.ErrBeingHandled)
	expectNoError(t, tx.Rollback())
	expectNoError(t, deliver(t, in, "a", effect))
	p.expect(t, 1, 1, 0)
}
