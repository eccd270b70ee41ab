package dlq_test

import (
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// many writes letters that differ in all that a list can be narrowed down by.
const many = `
	insert into {{dead_letters}} (state, source, consumer, topic, message_id, key, payload, reason, error, fingerprint, died_at, closed_at)
	with recursive n (i) as (select 1 union all select i + 1 from n where i < $1)
	select case when i % 500 = 0 then 'replayed' else 'dead' end, 'consumer', 'consumer ' || (i % 400), 'topic ' || (i % 300), 'm' || i, 'key ' || (i % 1000), '',
		'refused', '', 'f' || (i % 200), DIED, case when i % 500 = 0 then DIED end
	from n`

// narrow are filters that admit few of many letters.
func narrow() map[string]dlq.Filter {
	now := time.Now()
	return map[string]dlq.Filter{
		"newest":      {},
		"oldest":      {OldestFirst: true},
		"message":     {MessageID: "m77"},
		"key":         {Key: "key 7"},
		"fingerprint": {Fingerprint: "f7"},
		"consumer":    {Consumer: "consumer 7", OldestFirst: true},
		"topic":       {Topic: "topic 7"},
		"state":       {States: []dlq.State{dlq.StateReplayed}},
		"time":        {From: now.Add(-300 * time.Minute), Until: now.Add(-200 * time.Minute)},
		"cursor":      {After: dlq.Cursor{DiedAt: now.Add(-300 * time.Minute), ID: 1}},
	}
}

func TestPlans_ListsLookAtWhatTheyReturn(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	db, seen := testserver.Explained(t, pg.DSN)
	p := newTestDB(t, db, pg.Config)
	const letters = 20_000
	p.exec(t, strings.ReplaceAll(many, "DIED", "clock_timestamp() - i * interval '1 minute'"), letters)
	p.exec(t, `analyze {{dead_letters}}`)
	for name, f := range narrow() {
		seen.Take()
		list, err := p.List(t.Context(), f)
		must(t, err)
		plans := seen.Take()
		if len(plans) != 1 || len(list) == 0 {
			t.Fatalf("%s: %d plans, %d letters", name, len(plans), len(list))
		}
		if plan := plans[0]; plan.Rows > 3*float64(len(list))+10 || len(plan.Faults) > 0 {
			t.Errorf("%s: looked at %v rows for %d letters, %q\n%s", name, plan.Rows, len(list), plan.Faults, plan.Text)
		}
	}
	_, err := p.Replay(t.Context(), []int64{1, 2, 3}, ada)
	must(t, err)
	if _, err := p.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	replaying, err := p.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateReplaying}, Source: dlq.FromConsumer, OldestFirst: true})
	if err != nil || len(replaying) != 3 {
		t.Fatalf("%d letters are to be replayed, %v", len(replaying), err)
	}
	if !p.endReplay(t, "consumer 1", 1) {
		t.Fatal("the replay did not end")
	}
	for _, plan := range seen.Take() {
		if plan.Rows > 10 || len(plan.Faults) > 0 {
			t.Errorf("a command, or forgetting nothing, looked at %v rows, %q\n%s", plan.Rows, plan.Faults, plan.Text)
		}
	}
}
