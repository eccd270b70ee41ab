package inbox_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
)

// fool is sent by a handler; the driver gets something else, so no filter of
// texts can help.
const fool = `select 'nothing that a filter could see'`

// commits are the ways to commit early.
func (p *testDB) commits() []string {
	common := []string{
		`commit`, `select 1; commit`, `end`, `insert into effects (message_id) values ('more'); commit`,
		`/* */ commit`, "-- \ncommit",
	}
	if p.cfg.Dialect == oncemill.SQLite {
		return append(common, `commit transaction`, `pragma foreign_keys = off; commit`, `commit; begin`)
	}
	return append(
		common, `commit and chain`, `prepare transaction 'oncemill_test'`, `commit; begin`,
		`commit; insert into effects (message_id) values ('more')`,
		`begin; commit`, `set constraints all immediate; commit`, `savepoint s; commit`,
	)
}

// Every way to commit early fails in the database. The handler overlooks the
// error and goes on: its later effects must not be committed on their own.
func TestSeal_CommitOfAHandlerFailsInTheDatabase(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		for _, text := range p.commits() {
			p.tap.rewrite(fool, text)
			err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
				expectNoError(t, addEffect(msg))
				if err := handlerExec(msg, fool); err == nil {
					t.Errorf("%s: the database committed", text)
				}
				_ = addEffect(msg)
				return nil, nil
			})
			if p.cfg.Dialect == oncemill.SQLite {
				// A commit that is refused there ends nothing; the attempt may go on.
				if err != nil {
					t.Errorf("%s: %v", text, err)
				}
				if ids, effects := p.count(t, `select count(*) from {{inbox}}`), p.count(t, `select count(*) from effects where message_id = 'a'`); ids != 1 || effects != 2 {
					t.Errorf("%s: %d ids, %d effects", text, ids, effects)
				}
				p.exec(t, `delete from effects`)
				p.exec(t, `delete from oncemill_inbox`)
				continue
			}
			expectError(t, err, oncemill.ErrTxOwned)
			p.expect(t, 0, 0, 0)
			if t.Failed() {
				t.Fatalf("after %s", text)
			}
		}
		expectNoError(t, deliver(t, in, "a", effect))
		p.expect(t, 1, 1, 0)
		if p.cfg.Dialect == oncemill.PostgreSQL {
			if n := p.count(t, `select count(*) from pg_prepared_xacts where gid = 'oncemill_test'`); n != 0 {
				t.Error("a prepared transaction is left")
			}
		}
	})
}

// The error says what the handler has done wrong.
func TestSeal_ToldOfAnIgnoredError(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	err := deliver(t, p.inbox(t, nil), "a", func(msg *message.Message) ([]*message.Message, error) {
		_ = handlerExec(msg, `insert into nowhere values (1)`)
		return nil, nil
	})
	if err == nil || !strings.Contains(err.Error(), "the handler ignored its error") {
		t.Errorf("got %v", err)
	}
	p.expect(t, 0, 0, 0)
}

// A handler that rolls back and begins anew has lost the id: nothing of what it
// does then is committed.
func TestSeal_AnotherTransactionIsNotCommitted(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		for _, text := range []string{
			`rollback`, `rollback; begin`, `rollback; begin; insert into effects (message_id) values ('more')`,
		} {
			p.tap.rewrite(fool, text)
			err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
				return nil, errors.Join(addEffect(msg), handlerExec(msg, fool))
			})
			if err == nil {
				t.Errorf("%s: no error", text)
			}
			p.expect(t, 0, 0, 0)
		}
		expectNoError(t, deliver(t, in, "a", effect))
		p.expect(t, 1, 1, 0)
	})
}

// The seal is checked at the commit of any transaction, not only of ours.
func TestSeal_IDsAreNotCommittedByHand(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		resolved, err := database.Resolve(p.db, p.cfg)
		if err != nil {
			t.Fatal(err)
		}
		insert := `insert into {{inbox}} (consumer, message_id) values ('stock', 'a')`
		if p.cfg.Dialect == oncemill.SQLite {
			insert = `insert into {{inbox}} (consumer, message_id, seal) values ('stock', 'a', 1)`
		}
		if _, err := p.db.ExecContext(t.Context(), resolved.Expand(insert)); err == nil {
			t.Error("committed")
		}
		p.expect(t, 0, 0, 0)
	})
}

func TestSeal_SavepointsAndConstraintsInTheHandler(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	in := p.inbox(t, nil)
	p.exec(t, `create table parents (id int primary key)`)
	p.exec(t, `create table children (id int constraint of_parent references parents deferrable initially deferred)`)
	for text, ok := range map[string]bool{
		`savepoint s; insert into children values (1); rollback to s; insert into parents values (2)`:          true,
		`insert into children values (3); insert into parents values (3); set constraints of_parent immediate`: true,
		`insert into children values (4); set constraints of_parent immediate`:                                 false,
		`insert into children values (5)`: false, // fails at the commit
		`set constraints all immediate`:   false,
		`reset all`:                       false,
		`discard all`:                     false,
	} {
		err := deliver(t, in, text, func(msg *message.Message) ([]*message.Message, error) {
			return nil, errors.Join(addEffect(msg), handlerExec(msg, text))
		})
		if (err == nil) != ok {
			t.Errorf("%s: %v", text, err)
		}
		if n := p.count(t, `select count(*) from effects where message_id = $1`, text); (n == 1) != ok {
			t.Errorf("%s: %d effects", text, n)
		}
		if n := p.count(t, `select count(*) from {{inbox}} where message_id = $1`, text); (n == 1) != ok {
			t.Errorf("%s: %d ids", text, n)
		}
		expectNoError(t, deliver(t, in, text, func(msg *message.Message) ([]*message.Message, error) { return nil, nil }))
	}
}

func TestSeal_SQLiteNeedsForeignKeys(t *testing.T) {
	t.Parallel()
	p := testDBs["sqlite"](t)
	p.db.SetMaxOpenConns(1)
	in := p.inbox(t, nil)
	p.exec(t, `pragma foreign_keys = off`)
	expectError(t, deliver(t, in, "a", effect), inbox.ErrUnsealed)
	p.expect(t, 0, 0, 0)
	p.exec(t, `pragma foreign_keys = on`)
	expectNoError(t, deliver(t, in, "a", effect))
	p.expect(t, 1, 1, 0)
}
