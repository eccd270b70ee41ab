package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// useLeaked tries everything that a handle can do.
func useLeaked(t *testing.T, tx oncemill.Tx, want error) {
	t.Helper()
	ctx := t.Context()
	_, err := tx.ExecContext(ctx, `insert into effects (message_id) values ('leaked')`)
	expectError(t, err, want)
	_, err = tx.QueryContext(ctx, `select 1`) //nolint:rowserrcheck,sqlclosecheck // refused
	expectError(t, err, want)
	_, err = tx.PrepareContext(ctx, `select 1`) //nolint:sqlclosecheck // refused
	expectError(t, err, want)
	row := tx.QueryRowContext(ctx, `select 1`)
	expectError(t, row.Err(), want)
	expectError(t, row.Scan(new(int)), want)
}

func TestTx_IsRefusedAfterTheHandlerHasReturned(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		for id, outcome := range map[string]error{"committed": nil, "failed": errors.New("no")} {
			var leaked oncemill.Tx
			var stmt *sql.Stmt
			err := deliver(t, in, id, func(msg *message.Message) ([]*message.Message, error) {
				tx, err := handlerTx(msg.Context())
				if err != nil {
					return nil, err
				}
				leaked = tx
				stmt, err = tx.PrepareContext(msg.Context(), `insert into effects (message_id) values ('leaked')`) //nolint:sqlclosecheck // leaked on purpose
				return nil, errors.Join(outcome, err)
			})
			expectError(t, err, outcome)
			p.tap.sent()
			useLeaked(t, leaked, inbox.ErrTxEnded)
			if _, err := stmt.ExecContext(t.Context()); err == nil {
				t.Error("a leaked statement was executed")
			}
			p.expectSent(t)
		}
		p.expect(t, 0, 1, 0)
	})
}

// A goroutine that outlives its handler may write in the transaction, or be
// refused, but never outside.
func TestTx_LeakedIntoAGoroutineWritesWithTheTransactionOrNotAtAll(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		ended := make(chan int)
		err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
			tx, err := handlerTx(msg.Context())
			if err != nil {
				return nil, err
			}
			first := make(chan struct{})
			go func() {
				n := 0
				defer func() { ended <- n }()
				for {
					if _, err := tx.ExecContext(t.Context(), `insert into effects (message_id) values ('leaked')`); err != nil {
						return
					}
					if n++; n == 1 {
						close(first)
					}
				}
			}()
			<-first
			return nil, nil
		})
		n := <-ended
		if err != nil {
			p.expect(t, 0, 0, 0)
			return
		}
		p.expect(t, n, 1, 0)
	})
}

func TestTx_ForgottenRowsHoldNothingUp(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		p.db.SetMaxOpenConns(1)
		in := p.inbox(t, nil)
		err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
			tx, err := handlerTx(msg.Context())
			if err != nil {
				return nil, err
			}
			if err := addEffect(msg); err != nil {
				return nil, err
			}
			rows, err := tx.QueryContext(context.WithoutCancel(msg.Context()), `select 1 union select 2`) //nolint:rowserrcheck,sqlclosecheck // forgotten on purpose
			if err == nil {
				rows.Next()
			}
			return nil, err
		})
		// Drivers differ in whether they can go on; the attempt is whole or nothing.
		if err != nil {
			p.expect(t, 0, 0, 0)
		} else {
			p.expect(t, 1, 1, 0)
		}
		expectNoError(t, deliver(t, in, "b", effect))
	})
}

func TestTx_IsRefusedOnceItsContextHasEnded(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		err := deliverMessage(t, p.inbox(t, nil), message.NewMessageWithContext(ctx, "a", nil), func(msg *message.Message) ([]*message.Message, error) {
			tx, err := handlerTx(msg.Context())
			if err != nil {
				return nil, err
			}
			cancel()
			testserver.Poll(t.Context(), func() bool { return p.db.Stats().InUse == 0 }) // database/sql rolls back on its own
			useLeaked(t, tx, inbox.ErrTxEnded)
			return nil, nil
		})
		if err == nil {
			t.Error("no error")
		}
		p.expect(t, 0, 0, 0)
	})
}
