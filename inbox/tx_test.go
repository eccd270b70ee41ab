package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
)

// What sqlc generates wants this.
type dbtx interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	PrepareContext(context.Context, string) (*sql.Stmt, error)
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

var (
	_ dbtx                      = oncemill.Tx(nil)
	_ message.HandlerMiddleware = (*inbox.Inbox)(nil).Middleware
)

func TestTx_IsTheOneTransactionInTheContext(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		type key struct{}
		before := context.WithValue(t.Context(), key{}, "kept")
		msg := message.NewMessageWithContext(before, "a", nil)
		handler := func(msg *message.Message) ([]*message.Message, error) {
			one, ok := inbox.TxFromContext(msg.Context())
			other, _ := oncemill.TxFromContext(msg.Context())
			if !ok || one != other {
				t.Errorf("two transactions: %v, %v", one, other)
			}
			if msg.Context().Value(key{}) != "kept" {
				t.Error("the value of the message's context is lost")
			}
			msg.SetContext(context.WithValue(msg.Context(), key{}, "changed"))
			return nil, addEffect(msg)
		}
		expectNoError(t, deliverMessage(t, p.inbox(t, nil), msg, handler))
		if msg.Context() != before {
			t.Error("the context of the message was not put back")
		}
		if _, ok := inbox.TxFromContext(before); ok {
			t.Error("a transaction without an inbox")
		}
	})
}

func TestTxFromContext_IsNotAnyTransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		tx, err := p.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback() //nolint:errcheck // nothing was done in it
		if _, ok := inbox.TxFromContext(oncemill.ContextWithTx(t.Context(), tx)); ok {
			t.Error("took a transaction that is not the inbox's")
		}
	})
}

func TestTx_ExecutesQueriesAndPreparedStatements(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
			ctx := msg.Context()
			tx, err := handlerTx(ctx)
			if err != nil {
				return nil, err
			}
			insert, err := tx.PrepareContext(ctx, `insert into effects (message_id, note) values ($1, $2)`)
			if err != nil {
				return nil, err
			}
			for _, note := range []string{"one", "two"} {
				if _, err := insert.ExecContext(ctx, msg.UUID, note); err != nil {
					return nil, err
				}
			}
			var n int
			if err := tx.QueryRowContext(ctx, `select count(*) from effects where message_id = $1`, msg.UUID).Scan(&n); err != nil {
				return nil, err
			}
			rows, err := tx.QueryContext(ctx, `select note from effects order by note`)
			if err != nil {
				return nil, err
			}
			defer rows.Close() //nolint:errcheck // read to its end
			for rows.Next() {
				n++
			}
			if n != 4 {
				t.Errorf("saw %d", n)
			}
			return nil, rows.Err()
		})
		expectNoError(t, err)
		p.expect(t, 2, 1, 0)
	})
}

func TestTx_CommitAndRollbackAreRefusedAndHarmless(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
			tx, err := handlerTx(msg.Context())
			if err != nil {
				return nil, err
			}
			defer func() { expectError(t, tx.Rollback(), oncemill.ErrTxOwned) }()
			expectError(t, tx.Commit(), oncemill.ErrTxOwned)
			return nil, addEffect(msg)
		})
		expectNoError(t, err)
		p.expect(t, 1, 1, 0)
	})
}

func TestTx_SavepointsWork(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
			for _, step := range []string{
				`savepoint one`, `insert into effects (message_id) values ('lost')`, `rollback to one`,
				`insert into effects (message_id) values ('lost')`, `rollback transaction to savepoint one`,
				`insert into effects (message_id) values ('kept')`, `release one`,
			} {
				if err := handlerExec(msg, step); err != nil {
					return nil, err
				}
			}
			return nil, nil
		})
		expectNoError(t, err)
		p.expect(t, 1, 1, 0)
	})
}

func TestInbox_ContextThatEndsRollsBack(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		err := deliverMessage(t, in, message.NewMessageWithContext(ctx, "a", nil), func(msg *message.Message) ([]*message.Message, error) {
			err := addEffect(msg)
			cancel()
			for err == nil { // until database/sql has noticed
				tx, _ := inbox.TxFromContext(msg.Context())
				_, err = tx.ExecContext(t.Context(), `insert into effects (message_id) values ('late')`)
			}
			return nil, nil
		})
		if err == nil {
			t.Error("no error")
		}
		p.expect(t, 0, 0, 0)
		eventually(t, "the connection is given back", func() bool { return p.db.Stats().InUse == 0 })
		expectNoError(t, deliver(t, in, "a", effect))
	})
}

func TestInbox_WorksOnOneConnection(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		p.db.SetMaxOpenConns(1)
		in := p.inbox(t, nil)
		bus := p.box.ContextPublisher()
		for range 2 {
			err := deliverMessage(t, in, routed(t, "a", "results"), func(msg *message.Message) ([]*message.Message, error) {
				event := message.NewMessageWithContext(msg.Context(), watermill.NewUUID(), nil)
				return []*message.Message{message.NewMessage("b", nil)}, errors.Join(addEffect(msg), bus.Publish("events", event))
			})
			expectNoError(t, err)
		}
		p.expect(t, 1, 1, 2)
	})
}
