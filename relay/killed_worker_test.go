package relay_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// watchCharges makes the database itself write down every message that is charged
// with an attempt.
func (p testDB) watchCharges(t testing.TB) {
	t.Helper()
	p.execute(t, `create table charges (message_id text not null, attempts integer not null)`)
	if !p.postgres() {
		for _, event := range []string{"insert", "update"} {
			p.execute(t, `create trigger charge_`+event+` after `+event+` on {{parked}} when new.attempts > 0
				begin insert into charges values (new.message_id, new.attempts); end`)
		}
		return
	}
	p.execute(t, `create function charge() returns trigger language plpgsql set search_path from current as $$
		begin
			insert into charges values (new.message_id, new.attempts);
			return null;
		end $$`)
	p.execute(t, `create trigger charge after insert or update on {{parked}} for each row
		when (new.attempts > 0) execute function charge()`)
}

// confirmAfter is a broker that takes everything, and its time.
func confirmAfter(d time.Duration) func(frame) (outcome, time.Duration) {
	return func(frame) (outcome, time.Duration) { return confirmed, d }
}

// feed keeps messages of many keys owed until it is stopped, and returns them.
func feed(t *testing.T, p testDB, box *outbox.Outbox) (stop func() []*message.Message) {
	ctx, cancel := context.WithCancel(t.Context())
	var all []*message.Message
	var group sync.WaitGroup
	group.Go(func() {
		for i := 0; ctx.Err() == nil; testserver.Pause(ctx, 10*time.Millisecond) {
			if p.owed(t) > 400 {
				continue
			}
			var msgs []*message.Message
			for k := range 200 {
				msgs = append(msgs, keyed(fmt.Sprint("key", k), i, 1)...)
			}
			commit(t, box, msgs...)
			all = append(all, msgs...)
			i++
		}
	})
	t.Cleanup(func() { cancel(); group.Wait() })
	return func() []*message.Message {
		cancel()
		group.Wait()
		return all
	}
}

// Workers are killed with their windows full of messages that have done nothing.
func TestRelay_ChargesNobodyForAKilledWorker(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		kills, crashes := 2, 0
		if testserver.Long() {
			kills = 20
		}
		p.watchCharges(t)
		b := startBroker(t, confirmAfter(30*time.Millisecond))
		box := p.box(t)
		stop := feed(t, p, box)
		started := 0
		spec := workerSpec{Window: 8, Batch: 8}
		begin := func() *process {
			started++
			spec.Name = fmt.Sprint("worker", started)
			return startProcess(t, p, b, spec)
		}
		workers := []*process{begin(), begin()}
		for kill := range kills {
			victim := workers[kill%2]
			eventually(t, "a full window", func() bool {
				// A lane that is under suspicion has one message in flight, and
				// the next death would be that one's.
				return b.waiting(victim.name) == spec.Window && p.count(t, `select count(*) from {{relay_leases}} where crashes > 1`) == 0
			})
			victim.kill()
			p.letLeasesExpire(t, victim.name)
			workers[kill%2] = begin()
			eventually(t, "a takeover", func() bool { return p.leasesOf(t, victim.name) == 0 })
			crashes += p.count(t, `select count(*) from {{relay_leases}} where crashes > 0`)
		}
		all := stop()
		p.awaitNothingOwed(t)
		for _, w := range workers {
			w.end()
		}
		if n := p.count(t, `select count(*) from charges`); n > 0 {
			t.Errorf("%d messages are charged for the death of their workers", n)
		}
		if n := p.count(t, `select count(*) from {{dead_letters}}`); n > 0 {
			t.Errorf("%d messages are dead", n)
		}
		if crashes == 0 {
			t.Error("no crash was counted: the run says nothing")
		}
		w := wireOf(b)
		w.check(t, all, len(all))
		if w.count() == len(all) {
			t.Error("no message was in flight at any death: the run says nothing")
		}
		t.Logf("%d messages, %d deliveries, %d kills, %d lanes taken after one", len(all), w.count(), kills, crashes)
	})
}

// wireOf returns what a broker has as the wire of sinks.
func wireOf(b *broker) *wire {
	w := &wire{}
	for _, d := range b.all() {
		w.sent = append(w.sent, arrival{by: d.By, lane: d.Lane, id: d.ID, message: d.MessageID, key: d.Key, at: d.at})
	}
	return w
}

// A message that kills whatever worker sends it is found out, and nobody else.
func TestRelay_GivesUpAMessageThatKillsItsWorkers(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		p.watchCharges(t)
		b := startBroker(t, confirmAfter(5*time.Millisecond))
		box := p.box(t)
		var all []*message.Message
		for i := range 5 {
			for k := range 60 {
				all = append(all, keyed(fmt.Sprint("key", k), i, 1)...)
			}
		}
		lethal := message.NewMessage(watermill.NewUUID(), []byte("payload"))
		commit(t, box, all[:len(all)/4]...)
		commit(t, box, lethal)
		commit(t, box, all[len(all)/4:]...)

		spec := workerSpec{
			Window: 32, Batch: 16, Lethal: lethal.UUID,
			Retry: relay.Retry{MaxAttempts: 3, Initial: 5 * time.Millisecond, Max: 20 * time.Millisecond},
		}
		deaths, started := 0, 0
		begin := func() *process {
			started++
			spec.Name = fmt.Sprint("worker", started)
			return startProcess(t, p, b, spec)
		}
		workers := []*process{begin(), begin()}
		eventually(t, "the message is dead and nothing is owed", func() bool {
			for i, w := range workers {
				if !w.died() {
					continue
				}
				deaths++
				p.letLeasesExpire(t, w.name)
				workers[i] = begin()
				// Between two deaths lies a lease, in which the living take what the
				// dead left; else two are absent, as in an outage, and none is charged.
				eventually(t, "a takeover", func() bool { return p.leasesOf(t, w.name) == 0 || workers[1-i].died() })
			}
			return p.count(t, `select count(*) from {{dead_letters}}`) > 0 && p.owed(t) == 0
		})
		for _, w := range workers {
			w.end()
		}
		letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg})
		if err != nil {
			t.Fatal(err)
		}
		list, err := letters.List(t.Context(), dlq.Filter{})
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range list {
			if l.MessageID != lethal.UUID || l.Reason != "crashed" || l.Tries != spec.Retry.MaxAttempts || l.State != dlq.StateDead {
				t.Errorf("letter %+v, want one of the message that kills", l)
			}
		}
		// Two deaths make its lane suspicious, then each is charged. A death that
		// is found together with another one may count for the database's outage.
		if want := 2 + spec.Retry.MaxAttempts; deaths < want || deaths > 2*want || len(list) != 1 {
			t.Errorf("%d deaths and %d letters, want %d and one", deaths, len(list), want)
		}
		if n := p.count(t, `select count(*) from charges where message_id <> $1`, lethal.UUID); n > 0 {
			t.Errorf("others are charged %d times for what one message did", n)
		}
		w := wireOf(b)
		w.check(t, all, len(all))
		t.Logf("%d messages, %d deliveries, %d deaths", len(all), w.count(), deaths)
	})
}
