package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// business holds the tables of a service that publishes: a counter for each key,
// whose row lock serialises the key, and a journal of what was published,
// written in the same transactions. The journal is the truth that the wire is
// compared with. Its ids are taken like those of the outbox.
type business struct {
	testDB
	box *outbox.Outbox

	late  atomic.Int64 // rows that committed behind rows that were gone
	kinds sync.Map     // name of a kind of transaction to *atomic.Int64
}

func newBusiness(t testing.TB, p testDB, history time.Duration, keys []string) *business {
	t.Helper()
	id := "bigint generated always as identity primary key"
	if !p.postgres() {
		id = "integer primary key autoincrement"
	}
	p.execute(t, `create table counters (key text primary key, n bigint not null)`)
	p.execute(t, `create table journal (id `+id+`, key text not null, n bigint not null, message_id text not null)`)
	for _, key := range keys {
		p.execute(t, `insert into counters values ($1, 0)`, key)
	}
	return &business{testDB: p, box: p.boxOn(t, p.db, history)}
}

func (b *business) saw(kind string) {
	n, _ := b.kinds.LoadOrStore(kind, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
}

func (b *business) seen(kind string) int64 {
	if n, ok := b.kinds.Load(kind); ok {
		return n.(*atomic.Int64).Load()
	}
	return 0
}

// session is what *sql.Tx and *sql.Conn have in common.
type session interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// connTx is a transaction that was begun by a statement on a connection, so that
// it can be prepared.
type connTx struct{ session }

func (connTx) Commit() error   { return errors.New("not called") }
func (connTx) Rollback() error { return errors.New("not called") }

// write publishes n messages of a key, after the write that serialises the key,
// and returns their lane and an id that none of theirs exceeds.
func (b *business) write(ctx context.Context, tx session, key string, n int) (written, error) {
	first := 0
	if key != "" {
		if err := tx.QueryRowContext(ctx, `update counters set n = n + $2 where key = $1 returning n`, key, n).Scan(&first); err != nil {
			return written{}, err
		}
		first -= n - 1
	}
	msgs := make([]*message.Message, n)
	values := make([]string, n)
	for i := range msgs {
		msgs[i] = message.NewMessage(watermill.NewUUID(), fmt.Append(nil, key, ":", first+i))
		msgs[i].SetContext(ctx)
		outbox.SetKey(msgs[i], key)
		values[i] = fmt.Sprintf("('%s', %d, '%s')", key, first+i, msgs[i].UUID)
	}
	owned, ok := tx.(oncemill.ExecTx)
	if !ok {
		owned = connTx{tx}
	}
	if err := b.box.Publisher(owned).Publish("orders", msgs...); err != nil {
		return written{}, err
	}
	w := written{rows: n, lane: outbox.Lane(key, msgs[0].UUID)}
	if b.postgres() {
		if err := tx.QueryRowContext(ctx, database.Of(b.cfg).Expand(`select currval('{{outbox_id}}')`)).Scan(&w.highest); err != nil {
			return written{}, err
		}
	}
	_, err := tx.ExecContext(ctx, `insert into journal (key, n, message_id) values `+strings.Join(values, ", "))
	return w, err
}

type written struct {
	rows, lane int
	highest    int64
}

// lateRows counts, just before the commit, the rows whose lane has rows with a
// higher id that were delivered and are gone. It counts too few rather than too
// many.
func (b *business) lateRows(ctx context.Context, all []written) (late int64, err error) {
	for _, w := range all {
		var gone int64
		err := b.db.QueryRowContext(ctx, database.Of(b.cfg).Expand(`select coalesce(max(id), 0) from {{outbox_history}} where lane = $1`), w.lane).Scan(&gone)
		if err != nil {
			return 0, err
		}
		if gone > w.highest {
			late += int64(w.rows)
		}
	}
	return late, nil
}

// writer commits transactions of all kinds on its keys, which it may share with
// other writers.
type writer struct {
	*business
	rng  *rand.Rand
	keys []string
	hold time.Duration // a transaction is held open for up to so long
	bulk int           // up to so many messages of a key at once

	rolledBack bool // a transaction was rolled back on purpose
}

// run writes until ctx ends. The transaction under way is finished.
func (w *writer) run(ctx context.Context, t testing.TB) {
	for ctx.Err() == nil {
		within := context.WithoutCancel(ctx)
		var err error
		if w.postgres() && w.rng.IntN(2) == 0 {
			err = w.onConnection(within)
		} else {
			err = w.inTx(within)
		}
		if err != nil {
			t.Errorf("writer: %v", err)
			return
		}
		w.pause(5 * time.Millisecond)
	}
}

func (w *writer) pause(most time.Duration) {
	testserver.Pause(context.Background(), time.Duration(w.rng.Int64N(int64(most))))
}

var errUndo = errors.New("rolled back on purpose")

// inTx lets RunInTx end the transaction.
func (w *writer) inTx(ctx context.Context) error {
	// The first time in any case: a slow machine may not get far.
	undo := !w.rolledBack || w.rng.IntN(10) == 0
	w.rolledBack = true
	err := w.box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if _, err := w.body(ctx, tx); err != nil {
			return err
		}
		if undo {
			return errUndo
		}
		return nil
	})
	if errors.Is(err, errUndo) {
		w.saw("rolled back")
		return nil
	}
	return err
}

// onConnection ends the transaction in one of PostgreSQL's ways.
func (w *writer) onConnection(ctx context.Context) (err error) {
	conn, err := w.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, `begin`); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_, _ = conn.ExecContext(ctx, `rollback`)
		}
	}()
	all, err := w.body(ctx, conn)
	if err != nil {
		return err
	}
	id := "mill_" + watermill.NewShortUUID()
	end := []string{`commit`}
	kind := "held"
	switch w.rng.IntN(8) {
	case 0:
		end, kind = []string{`rollback`}, "rolled back"
	case 1:
		end, kind = []string{`prepare transaction '` + id + `'`, `rollback prepared '` + id + `'`}, "rolled back prepared"
	case 2, 3:
		end, kind = []string{`prepare transaction '` + id + `'`, `commit prepared '` + id + `'`}, "prepared"
	}
	for i, statement := range end {
		late := int64(0)
		if i == len(end)-1 && strings.HasPrefix(statement, "commit") {
			w.pause(w.hold)
			if late, err = w.lateRows(ctx, all); err != nil {
				return err
			}
		}
		if _, err := conn.ExecContext(ctx, statement); err != nil {
			return err
		}
		w.late.Add(late)
	}
	w.saw(kind)
	return nil
}

// body publishes for a few keys, in an order that avoids deadlocks, with pauses
// and savepoints.
func (w *writer) body(ctx context.Context, tx session) ([]written, error) {
	var all []written
	keys := make([]string, 1+w.rng.IntN(3))
	for i := range keys {
		keys[i] = w.keys[w.rng.IntN(len(w.keys))]
	}
	slices.Sort(keys)
	if w.rng.IntN(5) == 0 {
		keys = append([]string{""}, keys...) // an unkeyed message, which takes an early id
	}
	for _, key := range keys {
		n := 1
		if key != "" && w.rng.IntN(3) == 0 {
			n += w.rng.IntN(w.bulk)
		}
		if w.rng.IntN(5) == 0 {
			if err := w.undone(ctx, tx, key, n); err != nil {
				return nil, err
			}
		}
		x, err := w.write(ctx, tx, key, n)
		if err != nil {
			return nil, err
		}
		all = append(all, x)
		w.pause(w.hold / 3)
	}
	return all, nil
}

// undone writes what a savepoint takes back.
func (w *writer) undone(ctx context.Context, tx session, key string, n int) error {
	if _, err := tx.ExecContext(ctx, `savepoint s`); err != nil {
		return err
	}
	if _, err := w.write(ctx, tx, key, n); err != nil {
		return err
	}
	w.saw("savepoint")
	_, err := tx.ExecContext(ctx, `rollback to savepoint s`)
	return err
}

// commit writes one message of a key in a transaction of its own.
func (b *business) commit(t testing.TB, key string) {
	t.Helper()
	err := b.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		_, err := b.write(ctx, tx, key, 1)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
