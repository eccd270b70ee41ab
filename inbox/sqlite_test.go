package inbox_test

import (
	"context"
	"errors"
	"io/fs"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
)

func readFile(t *testing.T, files fs.FS, path string) string {
	t.Helper()
	text, err := fs.ReadFile(files, path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// SQLite rolls the whole transaction back there. A handler that overlooks it must
// not go on outside of the transaction.
func TestSQLite_TransactionThatTheDatabaseEndsIsNoticed(t *testing.T) {
	t.Parallel()
	p := testDBs["sqlite"](t)
	in := p.inbox(t, nil)
	p.exec(t, `create table things (id integer primary key on conflict rollback)`)
	p.exec(t, `insert into things values (1)`)
	const endless = `insert into effects (message_id) with recursive n (i) as (select 1 union all select i + 1 from n) select i from n`
	for id, lose := range map[string]func(tx oncemill.Tx, msg *message.Message) error{
		"on conflict rollback": func(tx oncemill.Tx, msg *message.Message) error {
			_, err := tx.ExecContext(msg.Context(), `insert into things values (1)`)
			return err
		},
		"insert or rollback": func(tx oncemill.Tx, msg *message.Message) error {
			return tx.QueryRowContext(msg.Context(), `insert or rollback into things values (1) returning id`).Scan(new(int))
		},
		"interrupted": func(tx oncemill.Tx, msg *message.Message) error {
			ctx, cancel := context.WithTimeout(msg.Context(), 50*time.Millisecond)
			defer cancel()
			_, err := tx.ExecContext(ctx, endless)
			return err
		},
	} {
		err := deliver(t, in, id, func(msg *message.Message) ([]*message.Message, error) {
			tx, err := handlerTx(msg.Context())
			if err != nil {
				return nil, err
			}
			expectNoError(t, addEffect(msg))
			expectError(t, lose(tx, msg), inbox.ErrTxEnded)
			expectError(t, addEffect(msg), inbox.ErrTxEnded)
			return nil, nil
		})
		expectError(t, err, inbox.ErrTxEnded)
		p.expect(t, 0, 0, 0)
		if t.Failed() {
			t.Fatalf("in %q", id)
		}
	}
	expectNoError(t, deliver(t, in, "a", effect))
	p.expect(t, 1, 1, 0)
}

func TestSQLite_FailedStatementThatEndsNothingMayBeOverlooked(t *testing.T) {
	t.Parallel()
	p := testDBs["sqlite"](t)
	p.exec(t, `create table things (id integer primary key)`)
	p.exec(t, `insert into things values (1)`)
	err := deliver(t, p.inbox(t, nil), "a", func(msg *message.Message) ([]*message.Message, error) {
		if err := handlerExec(msg, `insert into things values (1)`); err == nil {
			t.Error("no error")
		}
		return effect(msg)
	})
	expectNoError(t, err)
	p.expect(t, 1, 1, 0)
}

// Reading may be given up; that ends nothing, and neither does a context that had
// ended before.
func TestSQLite_InterruptedReadEndsNothing(t *testing.T) {
	t.Parallel()
	p := testDBs["sqlite"](t)
	err := deliver(t, p.inbox(t, nil), "a", func(msg *message.Message) ([]*message.Message, error) {
		tx, err := handlerTx(msg.Context())
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(msg.Context(), 50*time.Millisecond)
		defer cancel()
		const endless = `with recursive n (i) as (select 1 union all select i + 1 from n) select max(i) from n`
		for range 2 {
			err = tx.QueryRowContext(ctx, endless).Scan(new(int))
			if err == nil || errors.Is(err, inbox.ErrTxEnded) {
				t.Errorf("got %v", err)
			}
		}
		return effect(msg)
	})
	expectNoError(t, err)
	p.expect(t, 1, 1, 0)
}
