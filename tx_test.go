package oncemill_test

import (
	"context"
	"database/sql"
	"errors"
	"reflect"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// What is not a transaction does not compile where one is wanted; atomicity
// cannot be lost by passing the wrong handle.
func TestTx_OnlyATransactionFits(t *testing.T) {
	t.Parallel()
	for _, tx := range []reflect.Type{reflect.TypeFor[oncemill.Tx](), reflect.TypeFor[oncemill.ExecTx]()} {
		for _, handle := range []reflect.Type{reflect.TypeFor[*sql.DB](), reflect.TypeFor[*sql.Conn](), reflect.TypeFor[*sql.Stmt]()} {
			if handle.Implements(tx) {
				t.Errorf("%v is a %v", handle, tx)
			}
		}
		if !reflect.TypeFor[*sql.Tx]().Implements(tx) {
			t.Errorf("*sql.Tx is no %v", tx)
		}
	}
}

func TestContextWithTx_CarriesTheInnermostTransaction(t *testing.T) {
	t.Parallel()
	if tx, ok := oncemill.TxFromContext(t.Context()); ok || tx != nil {
		t.Errorf("an empty context carries %v", tx)
	}
	outer, inner := oncemill.Tx(new(sql.Tx)), oncemill.Tx(new(sql.Tx))
	ctx := oncemill.ContextWithTx(t.Context(), outer)
	below, cancel := context.WithCancel(oncemill.ContextWithTx(ctx, inner))
	defer cancel()
	if tx, ok := oncemill.TxFromContext(below); !ok || tx != inner {
		t.Errorf("got %v", tx)
	}
	if tx, ok := oncemill.TxFromContext(ctx); !ok || tx != outer {
		t.Errorf("got %v", tx)
	}
	for _, none := range []oncemill.ExecTx{nil, oncemill.FromPgx(&fakePgxTx{})} {
		if tx, ok := oncemill.TxFromContext(oncemill.ContextWithTx(ctx, none)); ok {
			t.Errorf("%v is %v", none, tx)
		}
	}
}

// fakeTag and fakePgxTx have the method sets of pgconn.CommandTag and pgx.Tx. The
// transaction behind is a *sql.Tx.
type fakeTag struct{ rows int64 }

func (t fakeTag) RowsAffected() int64 { return t.rows }
func (t fakeTag) String() string      { return "" }

type fakePgxTx struct {
	tx    *sql.Tx
	err   error
	ctx   context.Context
	query string
	args  []any
	ended int
}

func (f *fakePgxTx) Exec(ctx context.Context, query string, args ...any) (fakeTag, error) {
	f.ctx, f.query, f.args = ctx, query, args
	if f.err != nil || f.tx == nil {
		return fakeTag{7}, f.err
	}
	result, err := f.tx.ExecContext(ctx, query, args...)
	if err != nil {
		return fakeTag{}, err
	}
	n, err := result.RowsAffected()
	return fakeTag{n}, err
}

func (f *fakePgxTx) Commit(context.Context) error           { f.ended++; return nil }
func (f *fakePgxTx) Rollback(context.Context) error         { f.ended++; return nil }
func (f *fakePgxTx) Begin(context.Context) (*sql.Tx, error) { return f.tx, nil }

func TestFromPgx_PassesStatementsOnAndNeverEndsTheTransaction(t *testing.T) {
	t.Parallel()
	fake := &fakePgxTx{}
	tx := oncemill.FromPgx(fake)
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, "value")
	result, err := tx.ExecContext(ctx, "update x set y = $1", 1, "two", []byte{3})
	if err != nil {
		t.Fatal(err)
	}
	if fake.query != "update x set y = $1" || !reflect.DeepEqual(fake.args, []any{1, "two", []byte{3}}) || fake.ctx.Value(key{}) != "value" {
		t.Errorf("passed on: %q %v", fake.query, fake.args)
	}
	if n, err := result.RowsAffected(); n != 7 || err != nil {
		t.Errorf("rows affected: %d, %v", n, err)
	}
	if _, err := result.LastInsertId(); !errors.Is(err, oncemill.ErrNoLastInsertID) {
		t.Errorf("last insert id: %v", err)
	}
	for _, err := range []error{tx.Commit(), tx.Rollback()} {
		if !errors.Is(err, oncemill.ErrTxOwned) {
			t.Errorf("got %v", err)
		}
	}
	if fake.ended != 0 {
		t.Error("the transaction was ended")
	}
	fake.err = errors.New("refused")
	if result, err := tx.ExecContext(ctx, "select"); result != nil || err != fake.err { //nolint:errorlint // the very error
		t.Errorf("got %v, %v", result, err)
	}
}

func TestFromPgx_ServesThePublishers(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, outbox.Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(pg.DB, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	sqlTx, err := pg.DB.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sqlTx.Rollback()
	fake := &fakePgxTx{tx: sqlTx}
	bound, first, second := message.NewMessage("bound", []byte("1")), message.NewMessage("first", []byte("2")), message.NewMessage("second", nil)
	if err := box.Publisher(oncemill.FromPgx(fake)).Publish("orders", bound); err != nil {
		t.Error(err)
	}
	// Two adapters of one transaction are one transaction.
	first.SetContext(oncemill.ContextWithTx(t.Context(), oncemill.FromPgx(fake)))
	second.SetContext(oncemill.ContextWithTx(t.Context(), oncemill.FromPgx(fake)))
	if err := box.ContextPublisher().Publish("orders", first, second); err != nil {
		t.Error(err)
	}
	if err := sqlTx.Commit(); err != nil || fake.ended != 0 {
		t.Errorf("%v, ended %d times", err, fake.ended)
	}
	lanes := make([]int, outbox.Lanes)
	for i := range lanes {
		lanes[i] = i
	}
	rows, err := outboxqueue.Of(box).Read(t.Context(), outboxstore.ReadRequest{Lanes: lanes, Rows: 10, Bytes: 1000})
	if err != nil || len(rows) != 3 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
}
