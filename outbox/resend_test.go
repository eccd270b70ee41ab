package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// deliver publishes messages, one a transaction, and settles them as delivered.
func (p *fixture) deliver(t *testing.T, topic, key string, ids ...string) {
	t.Helper()
	for _, id := range ids {
		err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			msg := newMessage(id, key)
			msg.Metadata.Set("of", id)
			return p.box.Publisher(tx).Publish(topic, msg)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	p.remove(t, refs(p.read(t))...)
}

func (p *fixture) list(t *testing.T, f outbox.HistoryFilter) []outbox.HistoryRow {
	t.Helper()
	rows, err := p.box.History().List(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func historyIDs(rows []outbox.HistoryRow) string {
	var ids []string
	for _, r := range rows {
		ids = append(ids, r.MessageID)
	}
	return strings.Join(ids, " ")
}

func TestHistory_ListFindsByEachConditionAndAllOfThem(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		start := p.now(t).Add(-time.Millisecond)
		p.deliver(t, "orders", "k", "a", "b")
		p.deliver(t, "orders", "", "c")
		p.deliver(t, "bills", "k", "d")
		p.deliver(t, "orders", "it's", "o'hara; --", "{x,\"y\"}")
		all := p.list(t, outbox.HistoryFilter{})
		if got := historyIDs(all); got != `a b c d o'hara; -- {x,"y"}` {
			t.Fatalf("listed %s", got)
		}
		first := all[0]
		metadata, err := outboxstore.DecodeMetadata(first.Metadata)
		if err != nil || string(first.Payload) != "payload of a" || first.Key != "k" || first.Topic != "orders" || first.Lane != outbox.Lane("k", "") ||
			metadata["of"] != "a" || first.CreatedAt.Before(start) || first.RelayedAt.Before(first.CreatedAt) {
			t.Errorf("%+v, %v", first, err)
		}
		end := all[5].RelayedAt.Add(time.Millisecond)
		for name, c := range map[string]struct {
			f    outbox.HistoryFilter
			want string
		}{
			"id":           {outbox.HistoryFilter{IDs: []int64{all[1].ID, all[3].ID, 1 << 40}}, "b d"},
			"message id":   {outbox.HistoryFilter{MessageIDs: []string{"o'hara; --", `{x,"y"}`, "c"}}, `c o'hara; -- {x,"y"}`},
			"key":          {outbox.HistoryFilter{Key: "k"}, "a b d"},
			"odd key":      {outbox.HistoryFilter{Key: "it's"}, `o'hara; -- {x,"y"}`},
			"topic":        {outbox.HistoryFilter{Topic: "bills"}, "d"},
			"key of topic": {outbox.HistoryFilter{Key: "k", Topic: "orders"}, "a b"},
			"from":         {outbox.HistoryFilter{From: all[2].RelayedAt, Topic: "bills"}, "d"},
			"before":       {outbox.HistoryFilter{To: start}, ""},
			"after":        {outbox.HistoryFilter{From: end}, ""},
			"times":        {outbox.HistoryFilter{From: start, To: end}, historyIDs(all)},
			"until":        {outbox.HistoryFilter{To: all[0].RelayedAt}, ""},
			"everything":   {outbox.HistoryFilter{IDs: []int64{all[0].ID}, MessageIDs: []string{"a", "b"}, Key: "k", Topic: "orders", From: start, To: end}, "a"},
			"limit":        {outbox.HistoryFilter{Limit: 2}, "a b"},
		} {
			if got := historyIDs(p.list(t, c.f)); got != c.want {
				t.Errorf("%s: listed %q, want %q", name, got, c.want)
			}
		}
	})
}

func TestHistory_PagesShowEveryRowOnce(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, messages("m", 95)...)
		p.remove(t, refs(p.read(t))...)
		// An id that a server gave out twice, on both sides of a page's end.
		for i := range 10 {
			p.remember(t, fmt.Sprint("twin ", i), p.now(t).Add(time.Duration(i)*time.Millisecond))
		}
		p.exec(t, `update {{outbox_history}} set id = 1000 where message_id like 'twin%'`)
		seen := map[string]int{}
		pages := 0
		var last outbox.HistoryRow
		for f := (outbox.HistoryFilter{Limit: 10}); ; pages++ {
			rows := p.list(t, f)
			if len(rows) == 0 {
				break
			}
			for _, r := range rows {
				if r.ID < last.ID || r.ID == last.ID && !r.RelayedAt.After(last.RelayedAt) {
					t.Errorf("%+v comes after %+v", r.Position(), last.Position())
				}
				last = r
				seen[r.MessageID]++
			}
			f.After = last.Position()
		}
		if len(seen) != 105 || pages != 11 {
			t.Errorf("%d different rows on %d pages", len(seen), pages)
		}
	})
}

func TestResend_WritesTheSameMessagesAgainInOrder(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		var ids []string
		for i := range 30 {
			ids = append(ids, fmt.Sprint("k/", i))
		}
		p.deliver(t, "orders", "k", ids...)
		p.deliver(t, "orders", "other", "o")
		before := p.list(t, outbox.HistoryFilter{})
		f := outbox.HistoryFilter{Key: "k"}
		n, err := p.box.History().Count(t.Context(), f)
		if err != nil || n != 30 || len(p.read(t)) != 0 {
			t.Errorf("counted %d, %v", n, err)
		}
		wake, stop := p.queue.Listen()
		defer stop()
		if n, err := p.box.History().Resend(t.Context(), f); err != nil || n != 30 {
			t.Errorf("sent %d, %v", n, err)
		}
		expectWake(t, wake)
		rows := p.read(t)
		expectIDs(t, rows, ids...)
		for i, r := range rows {
			was := before[i]
			if r.ID <= before[len(before)-1].ID || r.MessageID != was.MessageID || !r.CreatedAt.Equal(was.CreatedAt) || r.Lane != was.Lane ||
				r.Topic != was.Topic || r.Key != was.Key || string(r.Payload) != string(was.Payload) || string(r.Metadata) != string(was.Metadata) {
				t.Errorf("%+v became %+v", was, r)
			}
		}
		if n := p.historyRows(t); n != len(before) {
			t.Errorf("%d rows in the history, were %d", n, len(before))
		}
		// Delivered twice, each is still one message.
		p.remove(t, refs(rows)...)
		if n, err := p.box.History().Resend(t.Context(), f); err != nil || n != 30 {
			t.Errorf("sent %d, %v", n, err)
		}
		expectIDs(t, p.read(t), ids...)
	})
}

func TestResend_ByEachConditionAndLimit(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.deliver(t, "orders", "k", "a", "b")
		p.deliver(t, "bills", "k", "b", "c")
		all := p.list(t, outbox.HistoryFilter{})
		for name, c := range map[string]struct {
			f     outbox.HistoryFilter
			count int
			want  string
		}{
			"id":         {outbox.HistoryFilter{IDs: []int64{all[3].ID}}, 1, "[c]"},
			"message id": {outbox.HistoryFilter{MessageIDs: []string{"b"}}, 2, "[b b]"}, // of two topics
			"topic":      {outbox.HistoryFilter{Topic: "bills"}, 2, "[b c]"},
			"time":       {outbox.HistoryFilter{From: all[0].RelayedAt, To: p.now(t).Add(time.Second)}, 4, "[a b b c]"},
			"limit":      {outbox.HistoryFilter{Key: "k", Limit: 2}, 4, "[a b]"},
			"nothing":    {outbox.HistoryFilter{Key: "none"}, 0, "[]"},
		} {
			n, err := p.box.History().Count(t.Context(), c.f)
			if err != nil || n != c.count {
				t.Errorf("%s: counted %d, %v", name, n, err)
			}
			if _, err := p.box.History().Resend(t.Context(), c.f); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			rows := p.read(t)
			if got := fmt.Sprint(ids(rows)); got != c.want {
				t.Errorf("%s: sent %s, want %s", name, got, c.want)
			}
			for _, r := range rows {
				p.exec(t, `delete from {{outbox}} where lane = $1 and id = $2`, r.Lane, r.ID)
			}
		}
	})
}

func TestResend_IsPartOfTheCallersTransaction(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.deliver(t, "orders", "k", "a", "b")
		err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			n, err := p.box.History().ResendTx(ctx, tx, outbox.HistoryFilter{Key: "k"})
			if n != 2 || err != nil {
				t.Errorf("sent %d, %v", n, err)
			}
			return errChangedMind
		})
		expectError(t, err, errChangedMind)
		expectIDs(t, p.read(t))
	})
}

func TestHistory_RefusesFiltersThatCannotBeRight(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.deliver(t, "orders", "k", "a")
		history, now := p.box.History(), time.Now()
		p.tap.sent()
		for _, f := range []outbox.HistoryFilter{{}, {Limit: 5}, {IDs: []int64{}, MessageIDs: []string{}}} {
			_, err := history.Resend(t.Context(), f)
			expectError(t, err, outbox.ErrEmptyFilter)
			_, err = history.Count(t.Context(), f)
			expectError(t, err, outbox.ErrEmptyFilter)
		}
		for field, f := range map[string]outbox.HistoryFilter{
			"Limit":      {Key: "k", Limit: -1},
			"To":         {From: now, To: now},
			"Key":        {Key: "a\x00"},
			"Topic":      {Topic: strings.Repeat("t", 256)},
			"MessageIDs": {MessageIDs: []string{"a", "\xff"}},
			"IDs":        {IDs: make([]int64, 10_001)},
			"After":      {After: outbox.HistoryPosition{ID: 3}},
		} {
			_, listErr := history.List(t.Context(), f)
			_, countErr := history.Count(t.Context(), f)
			for _, err := range []error{listErr, countErr} {
				var bad *outbox.FilterError
				if !errors.As(err, &bad) || bad.Field != field || bad.Problem == "" {
					t.Errorf("%s: got %v", field, err)
				}
			}
		}
		_, err := history.Resend(t.Context(), outbox.HistoryFilter{Key: "k", After: p.firstPosition()})
		if bad := (*outbox.FilterError)(nil); !errors.As(err, &bad) || bad.Field != "After" {
			t.Errorf("got %v", err)
		}
		for _, s := range p.tap.sent() {
			if strings.Contains(s.text, "outbox_history") {
				t.Errorf("sent %s", s.text)
			}
		}
	})
}

func (*fixture) firstPosition() outbox.HistoryPosition {
	return outbox.HistoryPosition{ID: 1, RelayedAt: time.Unix(1, 0)}
}
