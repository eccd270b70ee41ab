package idempotency_test

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// However many records have expired, other writers get their turn between batches.
func TestPurge_OnSQLiteGivesWay(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	expired := testserver.Rounds(8_000, 30_000)
	p.exec(t, `with recursive n (i) as (select 1 union all select i + 1 from n where i < $1)
		insert into {{idempotency}} (key_hash, caller, fingerprint, state, owner, fence, endpoint, created_at, completed_at, lease_until, expires_at, forget_at, response)
		select randomblob(32), randomblob(16), randomblob(33), 2, randomblob(16), 1, 'POST /', i, i, i, i, i, randomblob(500) from n`, expired)
	waiting, stop := context.WithCancel(t.Context())
	var writing sync.WaitGroup
	for range 2 { // so that one waits while the other writes
		writing.Go(func() {
			for waiting.Err() == nil {
				err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, `insert into effects (name) values ('a')`)
					return err
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	defer writing.Wait()
	defer stop()
	turns := 0
	for p.count(t, `select count(*) from {{idempotency}}`) > 0 {
		switch n, err := p.store.Purge(t.Context(), expired); {
		case err == nil && n > 0:
			turns++
		case err != nil && !errors.Is(err, context.DeadlineExceeded): // a busy machine
			t.Fatal(err)
		}
	}
	if turns < 2 {
		t.Errorf("%d records in %d turn", expired, turns)
	}
}
