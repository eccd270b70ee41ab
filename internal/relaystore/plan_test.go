package relaystore

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// fill loads many rows of the outbox; many parked rows of other lanes, of other keys, of one key behind its head,
// and of a stuck topic; dead letters and commands of other lanes.
func (p *fixture) fill(t *testing.T, n int) {
	t.Helper()
	p.exec(t, `
		insert into {{outbox}} (lane, id, topic, message_id, payload)
		select i % 32, i::bigint * (1 << 18) / $1::int, 't', 'm' || i, ''
		from generate_series(1, $1::int) i`, n) // in all partitions
	p.setSequence(t, 1<<18)
	p.exec(t, `
		insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
		select case when i % 2 = 0 then $2 else i % 32 end, i, 't', 'm' || i, case when i % 2 = 0 then $3 else 'other ' || i end, '', '', now(),
			case when i % 2 = 1 or i = 2 then now() + interval '1 hour' end
		from generate_series(1, $1::int) i`, n, testLane, laneKey(9))
	p.exec(t, `
		insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
		select $2, 1000000 + i, 't', 'unkeyed ' || i, '', '', '', now(), now() + interval '1 hour'
		from generate_series(1, $1::int / 10) i`, n, testLane)
	p.exec(t, `
		insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
		select $2, 3000000 + i, 'stuck', 'stuck ' || i, '', '', '', now(), now() - interval '1 hour'
		from generate_series(1, $1::int) i`, n, testLane)
	p.exec(t, `
		insert into {{dead_letters}} (state, held, source, lane, row_id, topic, message_id, key, payload, created_at, reason, error, fingerprint)
		select case when i % 10 = 0 then 'replaying' else 'dead' end, false, 'relay', case when i % 10 = 0 then 6 else i % 32 end, i, 't', 'm' || i, 'k', '', now(), 'refused', '', 'f'
		from generate_series(1, $1::int) i`, n)
}

// runEach runs each of the store's statements, on a few rows.
func (p *fixture) runEach(t *testing.T, round string) {
	t.Helper()
	ctx := t.Context()
	a, b := laneKey(1)+"x"+round, laneKey(2)+"y"+round
	insert := func(key string, n int) (rows []outboxstore.Row) {
		for i := range n {
			r := outboxstore.Row{Ref: outboxstore.Ref{Lane: testLane, MessageID: fmt.Sprintf("%s/%d", key, i)}, Topic: "t", Key: key}
			err := p.db.QueryRowContext(ctx, database.Of(p.box.Config().Database).Expand(`insert into {{outbox}} (lane, topic, message_id, key, payload) values ($1, 't', $2, $3, '') returning id, created_at -- test`),
				testLane, r.MessageID, key).Scan(&r.ID, &r.CreatedAt)
			if err != nil {
				t.Fatal(err)
			}
			rows = append(rows, r)
		}
		return rows
	}
	first, second := insert(a, 6), insert(b, 3)
	loose := insert("", 2)
	p.mustFail(t, []Failure{failing(first[0], FateRetry), failing(second[0], FateHoldKey), failing(loose[0], FateDeadLetter)}, slices.Concat(first[1:5], second[1:])...)
	p.mustFail(t, []Failure{failingAgain(Row{Row: first[0], Attempts: 1}, FateRetry)})
	p.mustFail(t, []Failure{failingAgain(Row{Row: first[0], Attempts: 2}, FateDeadLetter)}, first[5])
	look := func() []Row {
		t.Helper()
		due, _, err := p.due(ctx, DueRequest{Lanes: []int{testLane}, Known: []outboxstore.Known{{ID: -1}, {ID: -2}, {ID: -3}}, ExceptTopics: []string{"stuck"}, Heads: 64, Rows: 32})
		if err != nil {
			t.Fatal(err)
		}
		return due
	}
	due := look()
	if got := dueNames(due); len(got) != 5 {
		t.Fatalf("due %v", got)
	}
	p.mustFail(t, []Failure{failingAgain(due[0], FateHoldKey)})
	p.exec(t, `update {{dead_letters}} set state = case when message_id like '%x%' then 'replaying' else 'discarding' end where state = 'held' -- test`)
	commands, err := p.Commands(ctx, allLanes(), 100)
	if err != nil || len(commands) != 100 {
		t.Fatalf("commands %v, %v", commands, err)
	}
	commands, err = p.Commands(ctx, []int{testLane}, 100)
	if err != nil || len(commands) != 2 {
		t.Fatalf("commands %v, %v", commands, err)
	}
	if _, _, err := p.CarryOut(ctx, p.f, []int64{commands[0].DeadLetter, commands[1].DeadLetter}); err != nil {
		t.Fatal(err)
	}
	for _, r := range look() {
		p.mustRemove(t, r)
	}
	swept := insert(laneKey(3)+"z"+round, 4)
	p.mustFail(t, []Failure{failing(swept[0], FateRetry)})
	if n, err := p.Follow(ctx, p.f, []string{swept[0].Key}, []outboxstore.Known{{ID: -1}}, 100); err != nil || n != 3 {
		t.Fatalf("%d followed, %v", n, err)
	}
	postponed := failingAgain(Row{Row: swept[0], Attempts: 0}, FateRetry)
	postponed.Uncharged = true
	p.mustFail(t, []Failure{postponed})
	for _, r := range swept {
		p.mustRemove(t, Row{Row: r})
	}
	keys, err := p.Keys(ctx, []int{testLane})
	if err != nil || len(keys) != 1+p.count(t, `select count(distinct key) from {{parked}} where lane = 5 and key like 'other%' -- test`) {
		t.Fatalf("%d keys, %v", len(keys), err)
	}
	for _, id := range []int64{2, loose[1].ID} {
		if _, _, found, err := p.Find(ctx, testLane, id); !found || err != nil {
			t.Fatalf("row %d: found %v, %v", id, found, err)
		}
	}
	if _, err := outboxqueue.Of(p.box).Remove(ctx, []outboxstore.Ref{loose[1].Ref}); err != nil {
		t.Fatal(err)
	}
	p.exec(t, `update {{outbox}} set lane = 5 where id in (select id from {{outbox}} where lane = 6 limit 10) -- test`)
	p.exec(t, `update {{relay_leases}} set owner = 'dead', suspect = null, lease_until = now() - interval '1 hour' where lane = 5 -- test`)
	if got, err := p.Take(ctx, p.f.Owner, []int{testLane}, 1, longTerm); err != nil || got[testLane].Crashes == 0 {
		t.Fatalf("took %v, %v", got, err)
	}
	p.f.Epoch++
	// Nothing is owed, and what is parked is not due.
	p.exec(t, `update {{relay_leases}} set owner = 'dead', crashes = 0, lease_until = now() - interval '1 hour' where lane = 5 -- test`)
	p.exec(t, `update {{outbox}} set lane = 6 where lane = 5 -- test`)
	p.exec(t, `update {{parked}} set next_at = now() + interval '1 hour' where topic = 'stuck' -- test`)
	if got, err := p.Take(ctx, p.f.Owner, []int{testLane}, 1, longTerm); err != nil || got[testLane].Crashes != 0 {
		t.Fatalf("took %v, %v", got, err)
	}
	p.f.Epoch++
	p.exec(t, `update {{parked}} set next_at = now() - interval '1 hour' where topic = 'stuck' -- test`)
}

// However much is parked or dead, each statement looks at what it is about.
func TestPlans_TouchNothingElse(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	db, seen := testserver.Explained(t, pg.DSN)
	p := newFixture(t, db, pg.Config, time.Hour)
	// Analyzed while the rows are there and not committed, a table counts as empty.
	p.exec(t, `alter table {{parked}} set (autovacuum_enabled = off)`)
	p.exec(t, `alter table {{dead_letters}} set (autovacuum_enabled = off)`)
	p.exec(t, `analyze {{parked}}`)
	p.exec(t, `analyze {{dead_letters}}`)
	p.exec(t, `analyze {{outbox}}`)
	const rows = 20_000
	p.fill(t, rows)
	for _, situation := range []string{"never analyzed since it was empty", "analyzed"} {
		if situation == "analyzed" {
			p.exec(t, `analyze {{parked}}`)
			p.exec(t, `analyze {{dead_letters}}`)
		}
		seen.Take()
		p.runEach(t, situation[:1])
		checked := 0
		for _, plan := range seen.Take() {
			if strings.Contains(plan.Statement, "-- test") {
				continue
			}
			checked++
			// The most have the keys of the lane, the commands, and what scans the lane.
			most := 300.0
			if strings.Contains(plan.Statement, "p.held)") || strings.Contains(plan.Statement, "o.key in") {
				most = rows/32 + 100
			}
			faults := slices.DeleteFunc(plan.Faults, func(f string) bool {
				return f == "Seq Scan of relay_leases" || f == "Seq Scan of relay_workers" // 33 rows, and a row for each worker
			})
			if len(faults) > 0 || plan.Rows > most {
				t.Errorf("%s: looked at %v rows, %q:\n%s", situation, plan.Rows, faults, plan.Text)
			}
		}
		if checked < 25 {
			t.Errorf("%s: %d plans", situation, checked)
		}
	}
}
