package pgxtx_test

import (
	"context"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/pgxtx"
)

// Every way to commit early, past the check of its text, fails in the database. The handler
// overlooks the error and goes on: nothing of it is committed.
func TestSeal_TheDatabaseRefusesTheEndByTheHandler(t *testing.T) {
	texts := []string{
		`commit`, `end`, `commit and chain`, `rollback`, `rollback and chain`, `rollback; begin`, `commit; begin`,
		`commit; insert into effects (name) values ('more')`, `set constraints all immediate; commit`,
		`rollback; begin; insert into effects (name) values ('more')`,
	}
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for _, text := range texts {
			err := p.handle(t, text, func(ctx context.Context, tx *pgxtx.Tx) error {
				if err := writes["exec"](ctx, tx, "before"); err != nil {
					t.Error(err)
				}
				_, err := tx.Exec(ctx, `select 1`, instead(text))
				if strings.HasPrefix(text, "commit") && err == nil {
					t.Errorf("%s: the database committed", text)
				}
				late := writes["exec"](ctx, tx, "after")
				if !strings.Contains(text, "rollback; begin") && text != "rollback and chain" {
					expectError(t, err, oncemill.ErrTxOwned)
					expectError(t, late, oncemill.ErrTxOwned)
				}
				return nil
			})
			if err == nil {
				t.Errorf("%s: succeeded", text)
			}
			p.expectEffects(t)
			if t.Failed() {
				t.Fatalf("after %s", text)
			}
		}
		if err := p.handle(t, "good", func(ctx context.Context, tx *pgxtx.Tx) error { return writes["exec"](ctx, tx, "good") }); err != nil {
			t.Error(err)
		}
		p.expectEffects(t, "good")
	})
}

// What has ended the transaction by way of database/sql is noticed, too.
func TestSeal_NothingExecutesOnceTheTransactionIsOver(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for way, write := range writes {
			err := p.handle(t, way, func(ctx context.Context, tx *pgxtx.Tx) error {
				plain, _ := oncemill.TxFromContext(ctx)
				if _, err := plain.ExecContext(ctx, `select 1`, instead(`rollback`)); err != nil {
					return err
				}
				p.sent.take()
				expectError(t, write(ctx, tx, way), oncemill.ErrTxOwned)
				if sent := p.sent.take(); len(sent) > 0 {
					t.Errorf("%s: sent %q", way, sent)
				}
				return nil
			})
			expectError(t, err, oncemill.ErrTxOwned)
		}
		p.expectEffects(t)
	})
}
