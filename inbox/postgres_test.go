package inbox_test

import (
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
)

func TestPostgres_HandlerHasTheIsolationOfTheInboxAndItsOwnLockTimeout(t *testing.T) {
	t.Parallel()
	for isolation, want := range map[sql.IsolationLevel]string{
		sql.LevelDefault: "read committed", sql.LevelReadCommitted: "read committed",
		sql.LevelRepeatableRead: "repeatable read", sql.LevelSerializable: "serializable",
	} {
		t.Run(isolation.String(), func(t *testing.T) {
			t.Parallel()
			p := postgres(t, "default_transaction_isolation=repeatable read", "lock_timeout=77ms")
			in := p.inbox(t, func(cfg *inbox.Config) { cfg.Isolation = isolation })
			err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
				level, timeout := setting(t, msg, "transaction_isolation"), setting(t, msg, "lock_timeout")
				if level != want || timeout != "77ms" {
					t.Errorf("isolation %q, lock_timeout %q", level, timeout)
				}
				return nil, nil
			})
			expectNoError(t, err)
			if n := p.count(t, `select count(*) from pg_settings where name = 'lock_timeout' and setting = '77'`); n != 1 {
				t.Error("the lock timeout of the session has changed")
			}
		})
	}
}

// setting returns what a handler's transaction has for a setting.
func setting(t *testing.T, msg *message.Message, name string) (value string) {
	tx, err := handlerTx(msg.Context())
	expectNoError(t, err)
	expectNoError(t, tx.QueryRowContext(msg.Context(), `select current_setting($1)`, name).Scan(&value))
	return value
}

// The session's own limit for idle transactions counts.
func TestPostgres_KeepsTheSessionsOwnIdleTimeout(t *testing.T) {
	t.Parallel()
	for own, want := range map[string]string{"77s": "77s", "0": "75s"} {
		p := postgres(t, "idle_in_transaction_session_timeout="+own)
		expectNoError(t, deliver(t, p.inbox(t, nil), "a", func(msg *message.Message) ([]*message.Message, error) {
			if idle := setting(t, msg, "idle_in_transaction_session_timeout"); idle != want {
				t.Errorf("got %q, want %q", idle, want)
			}
			return nil, nil
		}))
	}
}

// The table is locked, as a migration does. That lock is not the insert's own,
// so lock_timeout comes too late for it.
func TestPostgres_LockedTableIsNotWaitedForWithoutBound(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	in := p.inbox(t, func(cfg *inbox.Config) { cfg.LockTimeout = time.Millisecond })
	tx, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() //nolint:errcheck // rolled back below
	resolved, err := database.Resolve(p.db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.ExecContext(t.Context(), resolved.Expand(`lock table {{inbox}} in access exclusive mode`)); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	err = deliver(t, in, "a", effect)
	expectError(t, err, inbox.ErrBeingHandled)
	if waited := time.Since(start); waited > 20*time.Second {
		t.Errorf("waited %v", waited)
	}
	expectNoError(t, tx.Rollback())
	// Behind a pooler the statement of the first attempt may still run.
	for errors.Is(err, inbox.ErrBeingHandled) {
		err = deliver(t, in, "a", effect)
	}
	expectNoError(t, err)
	p.expect(t, 1, 1, 0)
}

func TestPostgres_OverlookedErrorFailsTheAttempt(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	in := p.inbox(t, nil)
	err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
		expectNoError(t, addEffect(msg))
		if err := handlerExec(msg, `select 1/0`); err == nil {
			t.Error("no error")
		}
		return nil, nil
	})
	if err == nil {
		t.Error("committed")
	}
	p.expect(t, 0, 0, 0)
}

func TestPostgres_LostConnectionLeavesNothing(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	in := p.inbox(t, nil)
	err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
		tx, err := handlerTx(msg.Context())
		if err != nil {
			return nil, err
		}
		var pid int
		if err := tx.QueryRowContext(msg.Context(), `select pg_backend_pid()`).Scan(&pid); err != nil {
			return nil, err
		}
		err = addEffect(msg)
		p.exec(t, `select pg_terminate_backend($1)`, pid)
		return nil, err
	})
	if err == nil || errors.Is(err, inbox.ErrCommitUnknown) {
		t.Errorf("got %v", err)
	}
	p.expect(t, 0, 0, 0)
	expectNoError(t, deliver(t, in, "a", effect))
	p.expect(t, 1, 1, 0)
}

func TestMigrations_DownTakesEverythingAway(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		resolved, err := database.Resolve(p.db, p.cfg)
		if err != nil {
			t.Fatal(err)
		}
		for _, step := range []string{"0002_failures.down", "0001_inbox.down", "0001_inbox.up", "0002_failures.up"} {
			p.exec(t, resolved.Expand(readFile(t, inbox.Migrations.FS, resolved.Dialect.String()+"/"+step+".sql")))
		}
		if err := oncemill.Migrate(t.Context(), p.db, p.cfg, inbox.Migrations); err != nil {
			t.Error(err)
		}
		expectNoError(t, deliver(t, p.inbox(t, nil), "a", effect))
	})
}
