package dlq_test

import (
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
)

func ids(letters []*dlq.Letter) []int64 {
	out := make([]int64, len(letters))
	for i, l := range letters {
		out[i] = l.ID
	}
	return out
}

func TestStore_ListsByEachFilter(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		all := []letter{
			{died: 9 * time.Hour},
			{died: 8 * time.Hour, state: "held", key: "k1"},
			{died: 7 * time.Hour, source: "consumer", consumer: "stock", reason: "panic"},
			{died: 6 * time.Hour, source: "consumer", consumer: "mail", key: "k1", state: "discarded"},
			{died: 5 * time.Hour, topic: "bills", messageID: "special"},
			{died: 4 * time.Hour, topic: "bills", fingerprint: "cafe", key: "k2", state: "replayed"},
		}
		written := make([]int64, len(all))
		for i, l := range all {
			written[i] = p.write(t, l)
		}
		cases := map[string]struct {
			filter dlq.Filter
			want   []int
		}{
			"all":                {dlq.Filter{}, []int{5, 4, 3, 2, 1, 0}},
			"oldest first":       {dlq.Filter{OldestFirst: true}, []int{0, 1, 2, 3, 4, 5}},
			"state":              {dlq.Filter{States: []dlq.State{dlq.StateDead}}, []int{4, 2, 0}},
			"states":             {dlq.Filter{States: []dlq.State{dlq.StateHeld, dlq.StateReplayed}, OldestFirst: true}, []int{1, 5}},
			"source":             {dlq.Filter{Source: dlq.FromConsumer}, []int{3, 2}},
			"consumer":           {dlq.Filter{Consumer: "stock"}, []int{2}},
			"topic":              {dlq.Filter{Topic: "bills"}, []int{5, 4}},
			"key":                {dlq.Filter{Key: "k1"}, []int{3, 1}},
			"message id":         {dlq.Filter{MessageID: "special"}, []int{4}},
			"reason":             {dlq.Filter{Reason: "panic"}, []int{2}},
			"fingerprint":        {dlq.Filter{Fingerprint: "cafe"}, []int{5}},
			"from":               {dlq.Filter{From: time.Now().Add(-6*time.Hour - time.Minute)}, []int{5, 4, 3}},
			"until":              {dlq.Filter{Until: time.Now().Add(-6*time.Hour + time.Minute)}, []int{3, 2, 1, 0}},
			"some of each":       {dlq.Filter{Source: dlq.FromRelay, Topic: "bills", States: []dlq.State{dlq.StateDead, dlq.StateHeld}}, []int{4}},
			"nothing is like it": {dlq.Filter{Key: "k1", Topic: "bills"}, nil},
		}
		for name, c := range cases {
			got, err := p.List(t.Context(), c.filter)
			must(t, err)
			want := make([]int64, len(c.want))
			for i, n := range c.want {
				want[i] = written[n]
			}
			if !slices.Equal(ids(got), want) {
				t.Errorf("%s: letters %v, want %v", name, ids(got), want)
			}
		}
	})
}

func TestStore_PagesMissNothingAndRepeatNothing(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		var there []int64
		for range 25 {
			there = append(there, p.write(t, letter{died: time.Hour}))
		}
		// Many died in the same microsecond.
		p.exec(t, `update {{dead_letters}} set died_at = (select min(died_at) from {{dead_letters}}) where id > 5 and id < 20`)
		for _, oldest := range []bool{false, true} {
			var got []int64
			for f := (dlq.Filter{OldestFirst: oldest, Limit: 4}); len(got) < 100; {
				page, err := p.List(t.Context(), f)
				must(t, err)
				if len(page) == 0 {
					break
				}
				got = append(got, ids(page)...)
				f.After = page[len(page)-1].Cursor()
				if len(got) < 20 { // others die meanwhile
					p.write(t, letter{})
				}
			}
			if n := len(slices.Compact(slices.Sorted(slices.Values(got)))); n != len(got) {
				t.Errorf("letters twice in %v", got)
			}
			for _, id := range there {
				if !slices.Contains(got, id) {
					t.Errorf("letter %d is missing in %v", id, got)
				}
			}
		}
	})
}

func TestStore_GetReturnsAllFieldsAndListAFew(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		relays, consumers := p.write(t, letter{key: "k"}), p.write(t, letter{source: "consumer", consumer: "stock"})
		p.exec(t, `update {{dead_letters}} set created_at = null, stack = 'main.go:1', trace_id = 'cafe', metadata = $1 where source = 'consumer'`, []byte("not JSON"))
		l, err := p.Get(t.Context(), relays)
		must(t, err)
		if l.Source != dlq.FromRelay || l.Lane != 3 || l.RowID != 77 || l.Consumer != "" || l.Topic != "orders" || l.MessageID != "m" || l.Key != "k" ||
			string(l.Payload) != "payload" || l.Size != 7 || l.Reason != "refused" || l.Error != "no queue" || l.Tries != 3 || l.Fingerprint != "f" ||
			l.TraceID != "0af7651916cd43dd8448eb211c80319c" || l.State != dlq.StateDead || l.Version != 1 {
			t.Errorf("got %+v", l)
		}
		if d := l.DiedAt.Sub(l.CreatedAt); d < 59*time.Minute || d > 61*time.Minute || !l.ActedAt.IsZero() || !l.ClosedAt.IsZero() {
			t.Errorf("times of %+v", l)
		}
		if fmt.Sprint(l.Metadata) != fmt.Sprint(message.Metadata{"a": "b", "traceparent": l.Metadata["traceparent"]}) {
			t.Errorf("metadata %v", l.Metadata)
		}
		want := []dlq.Attempt{{time.UnixMicro(1700000000000000).UTC(), "refused", "once"}, {time.UnixMicro(1700000001000000).UTC(), "crashed", "twice"}}
		if !slices.Equal(l.Attempts, want) {
			t.Errorf("attempts %v", l.Attempts)
		}
		l, err = p.Get(t.Context(), consumers)
		must(t, err)
		if l.Source != dlq.FromConsumer || l.Lane != -1 || l.RowID != 0 || l.Consumer != "stock" || !l.CreatedAt.IsZero() || l.Stack != "main.go:1" || l.TraceID != "cafe" || l.Metadata != nil {
			t.Errorf("got %+v", l)
		}
		list, err := p.List(t.Context(), dlq.Filter{})
		must(t, err)
		for _, l := range list {
			if l.Payload != nil || l.Metadata != nil || l.Attempts != nil || l.Size != 7 || l.TraceID == "" {
				t.Errorf("listed %+v", l)
			}
		}
		if _, err := p.Get(t.Context(), 99); !errors.Is(err, dlq.ErrNotFound) {
			t.Errorf("got %v", err)
		}
	})
}

func TestNew_NamesEveryBadValue(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	var bad *oncemill.ConfigError
	for _, c := range []struct {
		db    *sql.DB
		cfg   dlq.Config
		field string
	}{
		{nil, dlq.Config{}, "dlq.New db"},
		{db, dlq.Config{Retention: time.Minute}, "dlq.Config.Retention"},
		{db, dlq.Config{Retention: -1}, "dlq.Config.Retention"},
		{db, dlq.Config{Database: oncemill.Config{Schema: "x"}}, "oncemill.Config.Schema"},
	} {
		if s, err := dlq.New(c.db, c.cfg); s != nil || !errors.As(err, &bad) || bad.Field != c.field {
			t.Errorf("%+v: %v", c.cfg, err)
		}
	}
	s, err := dlq.New(db, dlq.Config{})
	must(t, err)
	for _, limit := range []int{-1, 1001} {
		if _, err := s.List(t.Context(), dlq.Filter{Limit: limit}); !errors.As(err, &bad) || bad.Field != "dlq.Filter.Limit" {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
}
