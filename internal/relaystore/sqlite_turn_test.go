package relaystore

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// However large the messages that are moved, others get their turn to write in between.
func TestRetries_OnSQLiteGivesWay(t *testing.T) {
	t.Parallel()
	db := testserver.OpenSQLite(t, migratedSQLite(t))
	p := newFixture(t, db, oncemill.Config{}, 24*time.Hour)
	p.exec(t, `create table effects (n int)`)

	found := database.Of(p.box.Config().Database).Expand(`insert into effects select count(*) from {{parked}}`)
	waiting, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for waiting.Err() == nil {
			_ = p.box.RunInTx(waiting, func(ctx context.Context, tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, found)
				return err
			})
		}
	}()
	t.Cleanup(func() { stop(); <-ended })
	// Another writer that finds a part of the messages moved has had its turn in between.
	givesWay := func(what string, do func()) {
		t.Helper()
		last := p.count(t, `select coalesce(max(rowid), 0) from effects`)
		before := p.count(t, `select count(*) from {{parked}}`)
		do()
		after := p.count(t, `select count(*) from {{parked}}`)
		if n := p.count(t, `select count(*) from effects where rowid > $1 and n not in ($2, $3)`, last, before, after); n == 0 {
			t.Errorf("%s: nobody wrote between the first message and the last", what)
		}
	}

	messages, size := testserver.Rounds(40, 120), 512<<10
	key := laneKey(1)
	publish := func(name string) []outboxstore.Ref {
		t.Helper()
		var refs []outboxstore.Ref
		for batch := range slices.Chunk(make([]int, messages), 20) {
			var msgs []*message.Message
			for range batch {
				msg := message.NewMessage(fmt.Sprint(name, len(refs)+len(msgs)), bytes.Repeat([]byte("x"), size))
				outbox.SetKey(msg, key)
				msgs = append(msgs, msg)
			}
			refs = append(refs, refsOf(p.publishAll(t, msgs))...)
		}
		return refs
	}
	list := publish("known")
	head := Failure{Ref: list[0], Attempt: 1, Fate: FateRetry, RetryIn: time.Hour, Class: "failed"}
	givesWay("failures with what follows", func() {
		if err := p.Fail(t.Context(), p.f, []Failure{head}, list[1:]); err != nil {
			t.Fatal(err)
		}
	})
	list = append(list, publish("unknown")...)
	givesWay("what follows", func() {
		for {
			moved, err := p.Follow(t.Context(), p.f, []string{key}, nil, 1000)
			if err != nil {
				t.Fatal(err)
			}
			if moved < 1000 {
				break
			}
		}
	})
	if n := p.count(t, `select count(*) from {{parked}}`); n != 2*messages {
		t.Fatalf("%d are parked", n)
	}
	var removal removed
	givesWay("what was confirmed", func() {
		var err error
		if removal, err = p.Remove(t.Context(), list); err != nil {
			t.Fatal(err)
		}
	})
	if left, kept := p.count(t, `select count(*) from {{parked}}`), p.count(t, `select count(*) from {{outbox_history}}`); left != 0 || kept != 2*messages {
		t.Errorf("%d are parked, %d in the history", left, kept)
	}
	if want := []Key{{testLane, key}}; !slices.Equal(removal.Ended, want) {
		t.Errorf("no message is left of %v, want %v", removal.Ended, want)
	}
}
