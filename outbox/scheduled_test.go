package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// scheduled counts what waits.
func (p *fixture) scheduled(t *testing.T) int {
	t.Helper()
	return p.count(t, `select count(*) from {{scheduled}}`)
}

// now returns the database's time.
func (p *fixture) now(t *testing.T) time.Time {
	t.Helper()
	if p.isSQLite() {
		return time.UnixMicro(int64(p.count(t, `select cast(unixepoch('subsec') * 1000000 as integer)`)))
	}
	var now time.Time
	if err := p.db.QueryRowContext(t.Context(), `select clock_timestamp()`).Scan(&now); err != nil {
		t.Fatal(err)
	}
	return now
}

// moveAll moves all that is due and returns how many rows that were.
func (p *fixture) moveAll(t *testing.T) (rows int) {
	t.Helper()
	for {
		moved, err := p.queue.MoveDue(t.Context(), always)
		if err != nil {
			t.Fatal(err)
		}
		if moved.Rows == 0 {
			return rows
		}
		rows += moved.Rows
	}
}

func at(id, key string, when time.Time) *message.Message {
	msg := newMessage(id, key)
	outbox.SetDeliverAt(msg, when)
	return msg
}

func after(id, key string, wait time.Duration) *message.Message {
	msg := newMessage(id, key)
	outbox.SetDeliverAfter(msg, wait)
	return msg
}

func TestScheduled_WaitsForItsTimeAndComesWhole(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		msg := at("later", "k", p.now(t).Add(time.Hour))
		msg.Payload = everyByte()
		msg.Metadata.Set("colour", "gül\n")
		p.publish(t, newMessage("now", ""), msg, after("too", "", time.Hour))
		expectIDs(t, p.read(t), "now")
		moved, err := p.queue.MoveDue(t.Context(), always)
		if err != nil || moved.Rows != 0 || moved.Next < 500*time.Millisecond || moved.Next > time.Second {
			t.Errorf("%+v, %v", moved, err)
		}
		p.remove(t, refs(p.read(t))...)
		p.makeDue(t)
		before := p.now(t)
		wake, stop := p.queue.Listen()
		defer stop()
		defer expectWake(t, wake)
		if n := p.moveAll(t); n != 2 || p.scheduled(t) != 0 {
			t.Errorf("%d moved, %d left", n, p.scheduled(t))
		}
		rows := p.read(t)
		if len(rows) != 2 {
			t.Fatalf("%d rows", len(rows))
		}
		for _, r := range rows {
			if r.MessageID != "later" {
				continue
			}
			metadata, err := outboxstore.DecodeMetadata(r.Metadata)
			want := map[string]string{outbox.KeyMetadata: "k", "colour": "gül\n"}
			if err != nil || fmt.Sprint(metadata) != fmt.Sprint(message.Metadata(want)) {
				t.Errorf("metadata %v, %v", metadata, err)
			}
			if string(r.Payload) != string(everyByte()) || r.Key != "k" || r.Lane != outbox.Lane("k", "") || r.Topic != "orders" {
				t.Errorf("got %+v", r)
			}
			// The time of the move, to the millisecond of SQLite's clock.
			if r.CreatedAt.Before(before.Add(-2 * time.Millisecond)) {
				t.Errorf("created at %v, moved after %v", r.CreatedAt, before)
			}
		}
	})
}

// makeDue lets an hour and more pass for all that waits.
func (p *fixture) makeDue(t *testing.T) {
	t.Helper()
	if p.isSQLite() {
		p.exec(t, `update {{scheduled}} set deliver_at = deliver_at - 7200000000`)
		return
	}
	p.exec(t, `update {{scheduled}} set deliver_at = deliver_at - interval '2 hours'`)
}

func TestScheduled_ComesInTheOrderOfTimesThenOfPublishing(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		base := p.now(t).Add(-time.Hour).Truncate(time.Microsecond)
		var want []string
		var msgs []*message.Message
		const n = 2400 // more than a batch
		for i := range n {
			// Times fall in groups of ten, and the last group is published first.
			group := (n - 1 - i) / 10
			msgs = append(msgs, at(fmt.Sprintf("%d/%d", group, i), "one key", base.Add(time.Duration(group)*time.Microsecond)))
		}
		for group := range n / 10 {
			for i := range n {
				if (n-1-i)/10 == group {
					want = append(want, msgs[i].UUID)
				}
			}
		}
		p.publish(t, msgs...)
		if len(p.read(t)) != 0 {
			t.Error("a time that has passed is not for the publisher to judge")
		}
		if moved := p.moveAll(t); moved != n {
			t.Errorf("%d moved", moved)
		}
		expectIDs(t, p.read(t), want...)
	})
}

// A call's messages with one wait keep their order among themselves.
func TestScheduled_AfterAWaitKeepsTheOrderOfTheCall(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		var msgs []*message.Message
		for i := range 250 {
			msgs = append(msgs, after(fmt.Sprint(i), "k", time.Microsecond))
		}
		p.publish(t, msgs...)
		eventually(t, "all are due", func() bool { p.moveAll(t); return p.scheduled(t) == 0 })
		rows := p.read(t)
		for i, r := range rows {
			if r.MessageID != fmt.Sprint(i) {
				t.Fatalf("%s comes at position %d of %d", r.MessageID, i, len(rows))
			}
		}
	})
}

func TestScheduled_IsNotEarlyByTheDatabasesClock(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		wait := 300 * time.Millisecond
		for early := false; !early; wait *= 2 { // on a slow machine it is due at the first look
			start := p.now(t)
			p.publish(t, after("after", "", wait), at("at", "", start.Add(wait+time.Nanosecond)))
			eventually(t, "both are moved", func() bool {
				moved, err := p.queue.MoveDue(t.Context(), always)
				expectNoError(t, err)
				if moved.Rows == 0 && p.scheduled(t) > 0 && (moved.Next <= 0 || moved.Next > wait+20*time.Millisecond) {
					t.Errorf("next look in %v", moved.Next)
				}
				// SQLite's clock tells milliseconds.
				if ahead := start.Add(wait).Sub(p.now(t)); moved.Rows > 0 && ahead > 2*time.Millisecond {
					t.Errorf("moved %v early", ahead)
				}
				early = early || moved.Rows == 0
				return p.scheduled(t) == 0
			})
			p.exec(t, `delete from {{outbox}}`)
		}
	})
}

func TestScheduled_RollsBackWithItsTransaction(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			expectNoError(t, p.box.Publisher(tx).Publish("orders", after("a", "", time.Hour), newMessage("b", "")))
			return errChangedMind
		})
		expectError(t, err, errChangedMind)
		if n := p.scheduled(t) + len(p.read(t)); n != 0 {
			t.Errorf("%d rows are left", n)
		}
	})
}

func TestCancelScheduled_SaysWhetherItWasThere(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, after("a", "", time.Hour), after("b", "", time.Hour), newMessage("now", ""))
		cancel := func(id string) (was bool) {
			p.inTx(t, func(tx *sql.Tx) {
				var err error
				was, err = p.box.CancelScheduled(t.Context(), tx, id)
				expectNoError(t, err)
			})
			return was
		}
		for _, step := range []struct {
			id   string
			want bool
		}{{"a", true}, {"a", false}, {"never", false}, {"now", false}} {
			if got := cancel(step.id); got != step.want {
				t.Errorf("cancel %s: %v", step.id, got)
			}
		}
		// Rolled back, it is as if nobody had canceled.
		err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			was, err := p.box.CancelScheduled(t.Context(), tx, "b")
			if !was || err != nil {
				t.Errorf("%v, %v", was, err)
			}
			return errChangedMind
		})
		expectError(t, err, errChangedMind)
		p.makeDue(t)
		p.moveAll(t)
		if cancel("b") {
			t.Error("what is in the outbox was canceled")
		}
		if n := len(p.read(t)); n != 2 {
			t.Errorf("%d rows", n)
		}
	})
}

// An open cancellation keeps back its own key, whichever way it ends, and nobody
// else.
func TestMoveDue_AnOpenCancellationHoldsItsKeyAndNoOther(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		past := p.now(t).Add(-time.Hour)
		p.publish(t, at("k1", "k", past), at("k2", "k", past.Add(1)), at("loose", "", past.Add(2)), at("other", "o", past.Add(3)), at("alone", "", past.Add(4)))
		var tail []*message.Message
		for i := range 2100 { // the key alone is more than a batch
			tail = append(tail, at(fmt.Sprint("k", i+3), "k", past.Add(time.Second)))
		}
		p.publish(t, append(tail, at("last", "l", past.Add(time.Minute)))...)
		tx, err := p.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		for _, id := range []string{"k1", "loose"} {
			was, err := p.box.CancelScheduled(t.Context(), tx, id)
			if !was || err != nil {
				t.Fatalf("%v, %v", was, err)
			}
		}
		p.moveAll(t)
		if got := ids(p.read(t)); len(got) != 3 || !strings.Contains(fmt.Sprint(got), "other") || !strings.Contains(fmt.Sprint(got), "alone") || !strings.Contains(fmt.Sprint(got), "last") {
			t.Errorf("got %v", got)
		}
		expectNoError(t, tx.Rollback())
		p.remove(t, refs(p.read(t))...)
		p.moveAll(t)
		var ofKey []string
		for _, r := range p.read(t) {
			if r.Key == "k" {
				ofKey = append(ofKey, r.MessageID)
			}
		}
		for i, id := range ofKey {
			if id != fmt.Sprint("k", i+1) {
				t.Fatalf("%s comes at position %d", id, i)
			}
		}
		if len(ofKey) != 2102 || p.scheduled(t) != 0 {
			t.Errorf("%d of the key, %d left", len(ofKey), p.scheduled(t))
		}
	})
}

func TestMoveDue_DoesNothingWithoutTheLease(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, at("a", "", p.now(t).Add(-time.Hour)))
		moved, err := p.queue.MoveDue(t.Context(), func(context.Context, *sql.Tx) (bool, error) { return false, nil })
		if err != nil || moved.Rows != 0 || moved.Next <= 0 {
			t.Errorf("%+v, %v", moved, err)
		}
		refuse := errors.New("refuse")
		_, err = p.queue.MoveDue(t.Context(), func(context.Context, *sql.Tx) (bool, error) { return true, refuse })
		expectError(t, err, refuse)
		if p.scheduled(t) != 1 || len(p.read(t)) != 0 {
			t.Error("it was moved")
		}
	})
}

func TestMoveDue_WithNothingDueIsOneStatement(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, after("a", "", time.Hour))
		p.tap.sent()
		if _, err := p.queue.MoveDue(t.Context(), always); err != nil {
			t.Fatal(err)
		}
		if sent := p.tap.sent(); len(sent) != 1 || !strings.HasPrefix(strings.TrimSpace(sent[0].text), "select") {
			t.Errorf("sent %s", firstWords(sent))
		}
	})
}

func TestMoveDue_TakesLargeMessagesInPieces(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		var msgs []*message.Message
		for i := range 10 {
			msg := at(fmt.Sprint(i), "k", p.now(t).Add(-time.Hour))
			msg.Payload = make([]byte, 1<<20)
			msgs = append(msgs, msg)
		}
		p.publish(t, msgs...)
		var pieces []int
		for p.scheduled(t) > 0 && !t.Failed() {
			moved, err := p.queue.MoveDue(t.Context(), always)
			expectNoError(t, err)
			pieces = append(pieces, moved.Rows)
		}
		if len(pieces) != 2 || pieces[0] > 9 {
			t.Errorf("moved %v", pieces)
		}
	})
}

func TestPublish_RefusesBadTimesAndForeignReservedNames(t *testing.T) {
	both := at("both", "", time.Now())
	both.Metadata.Set(outbox.DeliverAfterMetadata, "1s")
	cases := map[string]struct {
		msg   *message.Message
		field string
	}{
		"negative":        {after("id", "", -time.Second), "deliver_after"},
		"no duration":     {withMetadata(outbox.DeliverAfterMetadata, "tomorrow"), "deliver_after"},
		"without unit":    {withMetadata(outbox.DeliverAfterMetadata, "5"), "deliver_after"},
		"before 1970":     {at("id", "", time.Unix(-1, 0)), "deliver_at"},
		"after 9999":      {at("id", "", time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)), "deliver_at"},
		"no time":         {withMetadata(outbox.DeliverAtMetadata, "2030-01-01"), "deliver_at"},
		"both":            {both, "deliver_at"},
		"reserved prefix": {withMetadata("oncemill_deliverat", "2030-01-01T00:00:00Z"), "metadata"},
	}
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.inTx(t, func(tx *sql.Tx) {
			p.tap.sent()
			for name, c := range cases {
				err := p.box.Publisher(tx).Publish("orders", newMessage("good", ""), after("good", "", time.Second), c.msg)
				var bad *outbox.MessageError
				if !errors.As(err, &bad) || bad.Index != 2 || bad.Field != c.field || bad.Problem == "" {
					t.Errorf("%s: got %v", name, err)
				}
			}
			if sent := p.tap.sent(); len(sent) != 0 {
				t.Errorf("sent %s", firstWords(sent))
			}
		})
	})
}

// A consumer passes metadata on; what belongs to the copy that came in does not
// come along, and the message that was given in is not changed.
func TestPublish_DropsTheRowThatAMessageCameFrom(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		msg := newMessage("a", "k")
		msg.Metadata.Set(outbox.RowMetadata, "3/17")
		for _, name := range []string{"oncemill_encoding", "oncemill_signature", "oncemill_topic"} { // of package payload
			msg.Metadata.Set(name, "kept")
		}
		p.publish(t, msg)
		metadata, err := outboxstore.DecodeMetadata(p.read(t)[0].Metadata)
		if err != nil || len(metadata) != 4 || metadata[outbox.KeyMetadata] != "k" || metadata["oncemill_topic"] != "kept" {
			t.Errorf("metadata %v, %v", metadata, err)
		}
		if msg.Metadata[outbox.RowMetadata] != "3/17" {
			t.Errorf("the caller's metadata are now %v", msg.Metadata)
		}
	})
}

func TestSetDeliver_OneReplacesTheOther(t *testing.T) {
	t.Parallel()
	msg := &message.Message{}
	outbox.SetDeliverAfter(msg, 0)
	outbox.SetDeliverAt(msg, time.Time{})
	if msg.Metadata != nil {
		t.Errorf("metadata are %v", msg.Metadata)
	}
	outbox.SetDeliverAt(msg, time.Unix(1, 1))
	outbox.SetDeliverAfter(msg, time.Second)
	if len(msg.Metadata) != 1 || msg.Metadata[outbox.DeliverAfterMetadata] != "1s" {
		t.Errorf("metadata are %v", msg.Metadata)
	}
	outbox.SetDeliverAt(msg, time.Unix(1, 1))
	if len(msg.Metadata) != 1 || msg.Metadata[outbox.DeliverAtMetadata] != "1970-01-01T00:00:01.000000001Z" {
		t.Errorf("metadata are %v", msg.Metadata)
	}
	outbox.SetDeliverAfter(msg, 0)
	if len(msg.Metadata) != 0 {
		t.Errorf("metadata are %v", msg.Metadata)
	}
}
