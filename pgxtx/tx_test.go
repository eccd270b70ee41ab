package pgxtx_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	_ "modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/pgxtx"
)

// What sqlc generates for pgx/v5 wants this.
type dbtx interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
	Query(context.Context, string, ...any) (pgx.Rows, error)
	QueryRow(context.Context, string, ...any) pgx.Row
	CopyFrom(ctx context.Context, tableName pgx.Identifier, columnNames []string, rowSrc pgx.CopyFromSource) (int64, error)
	SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
}

var _ dbtx = (*pgxtx.Tx)(nil)

const addEffect = `insert into effects (name, n) values ($1, $2)`

var errUndo = errors.New("undo")

// writes are the ways to write an effect.
var writes = map[string]func(ctx context.Context, tx *pgxtx.Tx, name string) error{
	"exec": func(ctx context.Context, tx *pgxtx.Tx, name string) error {
		tag, err := tx.Exec(ctx, addEffect, name, 1)
		if err == nil && tag.RowsAffected() != 1 {
			return errors.New(tag.String())
		}
		return err
	},
	"query": func(ctx context.Context, tx *pgxtx.Tx, name string) error {
		rows, err := tx.Query(ctx, addEffect+` returning n`, name, 1)
		if err != nil {
			return err
		}
		n, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
		return errors.Join(err, expectOne(int64(n)))
	},
	"row": func(ctx context.Context, tx *pgxtx.Tx, name string) error {
		var n int64
		err := tx.QueryRow(ctx, addEffect+` returning n`, name, 1).Scan(&n)
		return errors.Join(err, expectOne(n))
	},
	"batch": func(ctx context.Context, tx *pgxtx.Tx, name string) error {
		var batch pgx.Batch
		batch.Queue(addEffect, name, 1)
		return tx.SendBatch(ctx, &batch).Close()
	},
	"copy": func(ctx context.Context, tx *pgxtx.Tx, name string) error {
		n, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"name", "n"}, pgx.CopyFromRows([][]any{{name, 1}}))
		return errors.Join(err, expectOne(n))
	},
}

func expectOne(n int64) error {
	if n != 1 {
		return errors.New("not one")
	}
	return nil
}

func TestTx_WritesWithTheClaimOrNotAtAll(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for name, write := range writes {
			for id, outcome := range map[string]error{name: nil, name + " undone": errUndo} {
				runs := 0
				handler := func(ctx context.Context, tx *pgxtx.Tx) error {
					runs++
					return errors.Join(write(ctx, tx, id), outcome)
				}
				for range 2 {
					if err := p.handle(t, id, handler); !errors.Is(err, outcome) {
						t.Errorf("%s: %v", id, err)
					}
				}
				if outcome == nil && runs != 1 {
					t.Errorf("%s: %d runs", id, runs)
				}
			}
		}
		p.expectEffects(t, "batch", "copy", "exec", "query", "row")
	})
}

// It is the transaction that database/sql's handle and the outbox write in.
func TestTx_IsTheOneTransactionInTheContext(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for id, outcome := range map[string]error{"a": nil, "b": errUndo} {
			err := p.handle(t, id, func(ctx context.Context, tx *pgxtx.Tx) error {
				plain, _ := oncemill.TxFromContext(ctx)
				other, err := pgxtx.From(ctx, plain)
				if err != nil {
					return err
				}
				var first, second, third int64
				_, err = plain.ExecContext(ctx, addEffect, id, 1)
				return errors.Join(
					err, outcome,
					p.box.Publish(ctx, plain, "orders", message.NewMessage(id, nil)),
					tx.QueryRow(ctx, `select txid_current()`).Scan(&first),
					plain.QueryRowContext(ctx, `select txid_current()`).Scan(&second),
					other.QueryRow(ctx, `select txid_current()`).Scan(&third),
					expectOne(first-second+1), expectOne(first-third+1),
					tx.QueryRow(ctx, `select n from effects where name = $1`, id).Scan(&first),
					expectOne(first),
				)
			})
			expectError(t, err, outcome)
		}
		p.expectEffects(t, "a")
		table, err := p.pg.Config.Table(p.pg.DB, "outbox")
		if err != nil {
			t.Fatal(err)
		}
		var messages int
		if err := p.pg.DB.QueryRowContext(t.Context(), `select count(*) from `+table).Scan(&messages); err != nil || messages != 1 {
			t.Errorf("%d messages, %v", messages, err)
		}
	})
}

// sends are the ways to send a text.
var sends = map[string]func(ctx context.Context, tx *pgxtx.Tx, text string, args ...any) error{
	"exec": func(ctx context.Context, tx *pgxtx.Tx, text string, args ...any) error {
		_, err := tx.Exec(ctx, text, args...)
		return err
	},
	"query": func(ctx context.Context, tx *pgxtx.Tx, text string, args ...any) error {
		rows, err := tx.Query(ctx, text, args...)
		if rows.Err() != err { //nolint:errorlint // the very error
			return errors.New("rows have another error")
		}
		return err
	},
	"row": func(ctx context.Context, tx *pgxtx.Tx, text string, args ...any) error {
		err := tx.QueryRow(ctx, text, args...).Scan()
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return err
	},
	"batch": func(ctx context.Context, tx *pgxtx.Tx, text string, args ...any) error {
		var batch pgx.Batch
		batch.Queue(`select 'harmless'`)
		batch.Queue(text, args...)
		return tx.SendBatch(ctx, &batch).Close()
	},
}

func TestTx_RefusesTextThatEndsTheTransaction(t *testing.T) {
	texts := []string{
		`commit`, `COMMIT;`, `end`, `rollback`, `abort`, `begin`, `start transaction`, `prepare transaction 'x'`, `commit and chain`,
		`select 1; commit`, `/* why */commit`, `-- why` + "\n" + `rollback`, `savepoint s; rollback`, `select '\'; commit; --'`,
	}
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for name, send := range sends {
			for _, text := range texts {
				err := p.handle(t, name+text, func(ctx context.Context, tx *pgxtx.Tx) error {
					p.sent.take()
					expectError(t, send(ctx, tx, text), oncemill.ErrTxOwned)
					if sent := p.sent.take(); len(sent) > 0 {
						t.Errorf("%s %q: sent %q", name, text, sent)
					}
					for way, write := range writes {
						if err := write(ctx, tx, "late"); !errors.Is(err, oncemill.ErrTxOwned) {
							t.Errorf("%s after %q: %v", way, text, err)
						}
					}
					return nil // overlooked: the attempt fails all the same
				})
				if err == nil {
					t.Errorf("%s %q: succeeded", name, text)
				}
			}
		}
		p.expectEffects(t)
	})
}

func TestTx_SendsTextThatDoesNotEndTheTransaction(t *testing.T) {
	texts := []string{
		`savepoint s; rollback to s`, `select ';commit'`, `do $$ begin perform 1; end $$`, `-- commit`, `select 1; select 2`,
		`insert into effects (name) values ('kept')`,
	}
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for _, text := range texts {
			if err := p.handle(t, text, func(ctx context.Context, tx *pgxtx.Tx) error { return sends["exec"](ctx, tx, text) }); err != nil {
				t.Errorf("%q: %v", text, err)
			}
		}
		p.expectEffects(t, "kept")
	})
}

// A quote that one text of a batch opens hides the next, where pgx sends them as one.
func TestTx_RefusesABatchThatEndsTheTransactionAsAWhole(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		err := p.handle(t, "a", func(ctx context.Context, tx *pgxtx.Tx) error {
			var batch pgx.Batch
			batch.Queue(`select '`)
			batch.Queue(`'; commit; --'`)
			return tx.SendBatch(ctx, &batch).Close()
		})
		expectError(t, err, oncemill.ErrTxOwned)
	})
}

// A handler that overlooks the failure of a statement has no effects.
func TestTx_AnOverlookedFailureFailsTheAttempt(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for name, send := range sends {
			err := p.handle(t, name, func(ctx context.Context, tx *pgxtx.Tx) error {
				if err := writes["exec"](ctx, tx, "before"); err != nil {
					t.Error(err)
				}
				var failure *pgconn.PgError
				if err := send(ctx, tx, `select 1 / $1::int`, 0); !errors.As(err, &failure) || failure.Code != "22012" {
					t.Errorf("%s: %v", name, err)
				}
				return nil
			})
			if err == nil {
				t.Errorf("%s: succeeded", name)
			}
		}
		err := p.handle(t, "a batch that nobody reads", func(ctx context.Context, tx *pgxtx.Tx) error {
			var batch pgx.Batch
			batch.Queue(addEffect, "before", 1)
			batch.Queue(`select 1 / $1::int`, 0)
			tx.SendBatch(ctx, &batch)
			return nil
		})
		if err == nil {
			t.Error("a batch that nobody reads succeeded")
		}
		p.expectEffects(t)
		// What a savepoint undoes is no failure.
		err = p.handle(t, "savepoint", func(ctx context.Context, tx *pgxtx.Tx) error {
			_, err := tx.Exec(ctx, `savepoint s`)
			if fails := sends["batch"](ctx, tx, `select 1 / $1::int`, 0); fails == nil {
				t.Error("no failure")
			}
			return errors.Join(err, sends["exec"](ctx, tx, `rollback to s`), writes["copy"](ctx, tx, "kept"))
		})
		if err != nil {
			t.Error(err)
		}
		p.expectEffects(t, "kept")
	})
}

func TestTx_IsRefusedAfterTheHandlerHasReturned(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for id, outcome := range map[string]error{"committed": nil, "failed": errUndo} {
			var leaked *pgxtx.Tx
			var within context.Context
			var rows pgx.Rows
			err := p.handle(t, id, func(ctx context.Context, tx *pgxtx.Tx) (err error) {
				leaked, within = tx, context.WithoutCancel(ctx)
				rows, err = tx.Query(ctx, `select i, 'x' || i from generate_series(1, 3) i`)
				return errors.Join(outcome, err)
			})
			expectError(t, err, outcome)
			p.sent.take()
			for _, write := range writes {
				expectError(t, write(t.Context(), leaked, "leaked"), p.ended)
			}
			_, err = pgxtx.FromContext(within)
			expectError(t, err, p.ended)
			if sent := p.sent.take(); len(sent) > 0 {
				t.Errorf("sent %q", sent)
			}
			n := 0
			for ; rows.Next(); n++ {
				if values, err := rows.Values(); err != nil || len(values) != 2 {
					t.Errorf("%v, %v", values, err)
				}
			}
			if n != 3 {
				t.Errorf("%d rows", n)
			}
		}
		p.expectEffects(t)
	})
}

// A goroutine that outlives its handler may write in the transaction, or be refused, but
// never outside.
func TestTx_LeakedIntoAGoroutineWritesWithTheTransactionOrNotAtAll(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for round := range 20 {
			id := strings.Repeat("x", round+1)
			written := make(chan int)
			err := p.handle(t, id, func(_ context.Context, tx *pgxtx.Tx) error {
				first := make(chan struct{})
				go func() {
					n := 0
					defer func() { written <- n }()
					for writes["batch"](t.Context(), tx, id) == nil {
						if n++; n == 1 {
							close(first)
						}
					}
				}()
				<-first
				return nil
			})
			n, got := <-written, 0
			for _, name := range p.effects(t) {
				if name == id {
					got++
				}
			}
			if err != nil {
				n = 0
			}
			if got != n {
				t.Errorf("%d of %d writes are committed (%v)", got, n, err)
			}
		}
	})
}

func TestTx_APanicOfASourceEndsNothingElse(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		sources := map[string]func() ([]any, error){
			"panics": func() ([]any, error) { panic("bad source") },
			"fails":  func() ([]any, error) { return nil, errUndo },
		}
		for name, next := range sources {
			err := p.handle(t, name, func(ctx context.Context, tx *pgxtx.Tx) error {
				_, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"name", "n"}, pgx.CopyFromFunc(next))
				var panicked *oncemill.PanicError
				if errors.As(err, &panicked) != (name == "panics") || err == nil {
					t.Errorf("%s: %v", name, err)
				}
				return err
			})
			if err == nil {
				t.Errorf("%s: succeeded", name)
			}
		}
		err := p.handle(t, "rewriter", func(ctx context.Context, tx *pgxtx.Tx) error {
			_, err := tx.Exec(ctx, addEffect, panicking{})
			var panicked *oncemill.PanicError
			if !errors.As(err, &panicked) {
				t.Errorf("rewriter: %v", err)
			}
			return err
		})
		if err == nil {
			t.Error("rewriter: succeeded")
		}
		p.expectEffects(t)
	})
}

type panicking struct{}

func (panicking) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	panic("bad rewriter")
}

func TestFrom_TakesTheTransactionOfAHandlerAndOfPgxOnly(t *testing.T) {
	t.Parallel()
	p := newTestDB(t)
	if _, err := pgxtx.FromContext(t.Context()); !errors.Is(err, pgxtx.ErrNoTx) {
		t.Errorf("no transaction: %v", err)
	}
	own, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Rollback()
	if _, err := pgxtx.From(t.Context(), own); !errors.Is(err, pgxtx.ErrNoTx) {
		t.Errorf("a transaction of its own: %v", err)
	}
	lite, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(t.TempDir(), "test.db")))
	if err != nil {
		t.Fatal(err)
	}
	defer lite.Close()
	liteCfg := oncemill.Config{Dialect: oncemill.SQLite}
	if err := oncemill.Migrate(t.Context(), lite, liteCfg, inbox.Migrations); err != nil {
		t.Fatal(err)
	}
	for name, other := range map[string]*testDB{
		"lib/pq": {pg: p.pg, db: p.pg.DB},
		"SQLite": {pg: testserver.PG{Config: liteCfg}, db: lite},
	} {
		withInbox(t, other)
		err := other.handle(t, "a", func(context.Context, *pgxtx.Tx) error { return nil })
		if !errors.Is(err, pgxtx.ErrNotPgx) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Handlers that share a transaction change none of its settings.
func TestTx_RefusesSettingsInAGroup(t *testing.T) {
	t.Parallel()
	p := newTestDB(t)
	in, err := inbox.New(p.db, inbox.Config{
		Consumer: "stock", Database: p.pg.Config, Retry: inbox.Retry{Tries: 1}, Group: inbox.Group{Size: 2, Wait: time.Second},
	})
	if err != nil {
		t.Fatal(err)
	}
	var refused []error
	handler := in.GroupMiddleware(func(msg *message.Message) ([]*message.Message, error) {
		tx, err := pgxtx.FromContext(msg.Context())
		if err != nil {
			return nil, err
		}
		if msg.UUID == "settings" {
			if err = sends["batch"](msg.Context(), tx, `set local work_mem = '1MB'`); err != nil {
				refused = append(refused, err)
				return nil, err
			}
		}
		return nil, writes["batch"](msg.Context(), tx, msg.UUID)
	})
	done := make(chan error)
	for _, id := range []string{"settings", "plain"} {
		go func() {
			_, err := handler(message.NewMessageWithContext(t.Context(), id, nil))
			done <- err
		}()
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if len(refused) != 1 || !errors.Is(refused[0], inbox.ErrShared) {
		t.Errorf("refused: %v", refused)
	}
	effects := p.effects(t)
	if slices.Sort(effects); !slices.Equal(effects, []string{"plain", "settings"}) {
		t.Errorf("effects: %q", effects)
	}
}
