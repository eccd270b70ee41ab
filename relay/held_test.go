package relay_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A transaction that stays open holds back the oldest snapshot of the whole
// cluster: a reader that waits for it sees nothing of what others commit.
func TestRelay_IsNotDelayedByAnOpenTransaction(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	p := onServer(t, server)
	p.execute(t, `create table business (id bigint)`)
	p.execute(t, `create database elsewhere`)
	elsewhere := server.Open("dbname=elsewhere")
	for name, db := range map[string]*sql.DB{"of the same database": p.db, "of another database": elsewhere} {
		t.Run(name, func(t *testing.T) {
			if _, err := db.ExecContext(t.Context(), `create table if not exists held (id bigint)`); err != nil {
				t.Fatal(err)
			}
			box, w := p.box(t), &wire{}
			s := &sink{name: "w", wire: w}
			start(t, box, s, short)

			open, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer open.Rollback()
			if _, err := open.ExecContext(t.Context(), `insert into held values (1)`); err != nil {
				t.Fatal(err)
			}
			held := keyed("held", 0, 10)
			if db == p.db {
				// It has the lowest ids, in lanes that others go through.
				if err := box.Publisher(open).Publish("orders", held...); err != nil {
					t.Fatal(err)
				}
			}
			others := spread(100, 20)
			err = box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
				if _, err := tx.ExecContext(ctx, `insert into business select generate_series(1, 100)`); err != nil {
					return err
				}
				return box.Publisher(tx).Publish("orders", others...)
			})
			if err != nil {
				t.Fatal(err)
			}
			w.await(t, len(others))
			p.awaitNothingOwed(t)
			if n := p.count(t, `select count(*) from business where xmin::text::bigint < pg_snapshot_xmin(pg_current_snapshot())::text::bigint`); n != 0 {
				t.Errorf("a reader that waits for the oldest transaction sees %d rows: the test shows nothing", n)
			}
			all := others
			if db == p.db {
				if err := open.Commit(); err != nil {
					t.Fatal(err)
				}
				all = append(all, held...)
				w.await(t, len(all))
			}
			w.check(t, all, 0)
			p.execute(t, `truncate business`)
		})
	}
}

// SQLite has one writer at a time; a reader must not hold anybody up.
func TestRelay_IsNotDelayedByAnOpenReaderOfSQLite(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	box, w := p.box(t), &wire{}
	start(t, box, &sink{name: "w", wire: w}, short)
	commit(t, box, keyed("first", 0, 1)...)
	conn, err := p.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(t.Context(), `begin deferred`); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := conn.QueryRowContext(t.Context(), database.Of(p.cfg).Expand(`select count(*) from {{outbox}}`)).Scan(&n); err != nil {
		t.Fatal(err)
	}
	msgs := spread(20, 5)
	commit(t, box, msgs...)
	w.await(t, len(msgs)+1)
	p.awaitNothingOwed(t)
	if _, err := conn.ExecContext(t.Context(), `rollback`); err != nil {
		t.Fatal(err)
	}
	w.check(t, append(keyed("first", 0, 1), msgs...), 0)
}

// 20,000 rows of one key stand before 1,000 rows of others in the same lane, and
// the broker takes its time for each message.
func TestRelay_DoesNotStarveOthersBehindABurstOfOneKey(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		burst, others := 20_000, 1000
		if !p.postgres() {
			burst, others = 1000, 50
		}
		keys := keysOfLane(7, others+1)
		box, w := p.box(t), &wire{}
		commit(t, box, keyed(keys[0], 0, burst)...)
		var rest []*message.Message
		for _, key := range keys[1:] {
			rest = append(rest, keyed(key, 0, 1)...)
		}
		commit(t, box, rest...)

		start(t, box, &sink{name: "w", wire: w, handle: slow(time.Millisecond)}, short)
		var ahead int
		eventually(t, "the others", func() bool {
			hot, passed := 0, 0
			for _, a := range w.all() {
				if a.key == keys[0] {
					hot++
				} else {
					passed++
				}
				if passed == others {
					break
				}
			}
			ahead = hot
			return passed == others
		})
		t.Logf("%d of the burst's %d were published when the last of the %d others was", ahead, burst, others)
		if ahead > burst/10 {
			t.Errorf("%d of %d published before the last of the others", ahead, burst)
		}
	})
}
