package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// connTx is a transaction that is begun and ended by SQL texts, as a transaction
// manager does.
type connTx struct{ *sql.Conn }

func (connTx) Commit() error   { return errors.New("not the library's business") }
func (connTx) Rollback() error { return errors.New("not the library's business") }

// cursor is a naive reader: it goes by the highest id that it has seen.
type cursor struct{ last int64 }

func (c *cursor) read(rows []outboxstore.Row) (found []string) {
	last := c.last
	for _, r := range rows {
		if r.ID > last {
			found = append(found, r.MessageID)
			c.last = max(c.last, r.ID)
		}
	}
	return found
}

// A message of a prepared transaction is owed from COMMIT PREPARED on, and is
// found however many later ids have been read and removed meanwhile.
func TestRead_FindsWhatAPreparedTransactionCommits(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		ctx := t.Context()
		gid := "'" + p.cfg.Database.Schema + "'"
		conn, err := p.db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		do := func(text string) {
			t.Helper()
			if _, err := conn.ExecContext(ctx, text); err != nil {
				t.Fatalf("%s: %v", text, err)
			}
		}
		prepare := func(id string) {
			t.Helper()
			do(`begin`)
			if err := p.box.Publisher(connTx{conn}).Publish("orders", newMessage(id, "k")); err != nil {
				t.Fatal(err)
			}
			do(`prepare transaction ` + gid)
		}
		t.Cleanup(func() { // else the schema could not be dropped after a failure
			_, _ = p.db.ExecContext(context.WithoutCancel(ctx), `rollback prepared `+gid)
		})

		var naive cursor
		prepare("prepared")
		for _, id := range []string{"later 1", "later 2", "later 3"} {
			p.publish(t, newMessage(id, "k"))
			rows := p.read(t)
			expectIDs(t, rows, id)
			naive.read(rows)
			p.remove(t, refs(rows)...)
		}
		expectNoError(t, p.queue.Check(ctx))
		do(`commit prepared ` + gid)
		rows := p.read(t)
		expectIDs(t, rows, "prepared")
		if found := naive.read(rows); len(found) != 0 {
			t.Errorf("a naive reader found %v: the test shows nothing", found)
		}
		p.remove(t, refs(rows)...)

		prepare("never")
		expectIDs(t, p.read(t))
		do(`rollback prepared ` + gid)
		p.publish(t, newMessage("after", "k"))
		expectIDs(t, p.read(t), "after")
	})
}

// The same for a transaction that is simply slow.
func TestRead_FindsWhatCommitsLate(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		slow, err := p.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer slow.Rollback()
		expectNoError(t, p.box.Publisher(slow).Publish("orders", newMessage("slow", "k")))
		var naive cursor
		for _, id := range []string{"1", "2"} {
			p.publish(t, newMessage(id, "k")) // nobody waits for the slow one
			rows := p.read(t)
			expectIDs(t, rows, id)
			naive.read(rows)
			p.remove(t, refs(rows)...)
		}
		expectNoError(t, slow.Commit())
		rows := p.read(t)
		expectIDs(t, rows, "slow")
		if found := naive.read(rows); len(found) != 0 {
			t.Errorf("a naive reader found %v: the test shows nothing", found)
		}
	})
}

// A partition that a prepared transaction has written to is not truncated.
func TestRing_PassesOverAPartitionWithAPreparedWriter(t *testing.T) {
	t.Parallel()
	p := ring(t)
	gid := "'" + p.cfg.Database.Schema + "'"
	p.leaveDead(t, 1)
	conn, err := p.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = conn.ExecContext(t.Context(), `begin`)
	expectNoError(t, err)
	expectNoError(t, p.box.Publisher(connTx{conn}).Publish("orders", newMessage("prepared", "")))
	_, err = conn.ExecContext(t.Context(), `prepare transaction `+gid)
	expectNoError(t, err)
	t.Cleanup(func() {
		_, _ = p.db.ExecContext(context.WithoutCancel(t.Context()), `rollback prepared `+gid)
	})
	p.enter(t, 3)
	start := time.Now()
	p.expectTruncated(t, 0)
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	p.exec(t, `commit prepared `+gid)
	p.expectTruncated(t, 0)
	expectIDs(t, p.read(t), "prepared")
}
