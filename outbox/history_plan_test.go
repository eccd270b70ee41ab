package outbox_test

import (
	"testing"

	"github.com/oncemill/oncemill/outbox"
)

// A page of a history of two full days reads little more than the page.
func TestPlans_APageOfTheHistoryReadsNoMoreThanItself(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	p.addDay(t, -1)
	const each = 20_000
	fill := func(n int) {
		p.exec(t, `insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
			select i, i % 32, 'orders', 'm' || i, 'key ' || i % 100, '', '', r, r
			from (select i, $2::timestamptz + i * interval '1 millisecond' as r from generate_series($3::int, $4::int) i) g
			where $1::int = 0`, 0, p.day(t, n), (n+1)*each, (n+2)*each-1)
	}
	fill(-1)
	fill(0)
	p.exec(t, `analyze {{outbox_history}}`)
	db, seen := explained(t, p.dsn+"&binary_parameters=yes")
	box, err := outbox.New(db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	middle := p.list(t, outbox.HistoryFilter{IDs: []int64{each - 10}})[0]
	for name, f := range map[string]outbox.HistoryFilter{
		"first page":  {},
		"middle page": {After: middle.Position()}, // and over midnight
		"id":          {IDs: []int64{each / 2, each + 5}},
		"one day":     {From: p.day(t, 0), Limit: 50},
	} {
		seen.take()
		rows, err := box.History().List(t.Context(), f)
		if err != nil || len(rows) == 0 {
			t.Fatalf("%s: %d rows, %v", name, len(rows), err)
		}
		used := seen.take()
		if len(used) != 1 {
			t.Fatalf("%s: %d plans", name, len(used))
		}
		for n := -1; n <= 0; n++ {
			if most := mostRows(t, used[0], "outbox_history_"+p.day(t, n).Format("20060102")); most > 500 {
				t.Errorf("%s: %v rows of a day were read in\n%s", name, most, used[0])
			}
		}
	}
}
