package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

func TestRelay_DeliversScheduledMessagesWhenTheyAreDue(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		box, w := p.box(t), &wire{}
		start(t, box, &sink{name: "w", wire: w}, p.unhurried())
		commit(t, box, keyed("first", 0, 1)...)
		w.await(t, 1) // it is at work
		const wait = 400 * time.Millisecond
		begin := time.Now()
		msgs := keyed("k", 0, 20)
		for i, msg := range msgs {
			outbox.SetDeliverAfter(msg, wait+time.Duration(i)*time.Millisecond)
		}
		commit(t, box, msgs...)
		never := keyed("never", 0, 1)
		outbox.SetDeliverAt(never[0], time.Now().Add(time.Hour))
		commit(t, box, never...)
		w.await(t, 1+len(msgs))
		for _, a := range w.all() {
			// Two clocks, one of milliseconds.
			if early := wait - a.at.Sub(begin); a.key == "k" && early > 2*time.Millisecond {
				t.Errorf("%s came %v early", a.message, early)
			}
		}
		p.awaitNothingOwed(t)
		w.check(t, append(keyed("first", 0, 1), msgs...), 0)
		if n := p.count(t, `select count(*) from {{scheduled}}`); n != 1 {
			t.Errorf("%d messages wait", n)
		}
	})
}

// A look that waited for somebody's lock is no sign of a slow table, after which the
// scheduler rests for ten times as long.
func TestRelay_MovesScheduledMessagesSoonAfterALock(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	box, w := p.box(t), &wire{}
	start(t, box, &sink{name: "w", wire: w}, p.unhurried())
	first := keyed("first", 0, 1)
	outbox.SetDeliverAfter(first[0], time.Millisecond)
	commit(t, box, first...)
	w.await(t, 1) // it moves messages
	unlock := p.lock(t, `lock table {{scheduled}} in access exclusive mode`)
	commit(t, box, keyed("wake", 0, 1)...)
	eventually(t, "it waits for the lock", func() bool {
		return p.count(t, `select count(*) from pg_locks where not granted and relation = '{{scheduled}}'::regclass`) > 0
	})
	const held = 1500 * time.Millisecond
	testserver.Pause(t.Context(), held)
	unlock()
	w.await(t, 2)
	next := keyed("next", 0, 1)
	outbox.SetDeliverAfter(next[0], time.Millisecond)
	begin := time.Now()
	commit(t, box, next...)
	w.await(t, 3)
	if took := time.Since(begin); took > 8*held {
		t.Errorf("it took %v", took)
	}
}

// Producers schedule, cancel and change their minds while the workers that move
// what is due, one at a time, come and go without notice.
func TestRelay_LosesAndRepeatsNoScheduledMessageWhenSchedulersChange(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		b := startBroker(t, func(frame) (outcome, time.Duration) { return confirmed, 0 })
		spec := workerSpec{History: outbox.NoHistory, Lease: time.Second}
		worker := func(n int) *process {
			spec.Name = fmt.Sprint("scheduler ", n)
			return startProcess(t, p, b, spec)
		}
		current := []*process{worker(0), worker(1)}
		box := p.box(t)

		producing, stop := context.WithCancel(t.Context())
		defer stop()
		var producers sync.WaitGroup
		var mu sync.Mutex
		owed, canceled := map[string]bool{}, 0
		for producer := range 3 {
			producers.Go(func() {
				for n := 0; producing.Err() == nil; n++ {
					msg := message.NewMessage(fmt.Sprintf("%d/%d", producer, n), nil)
					outbox.SetKey(msg, fmt.Sprint("key ", producer))
					outbox.SetDeliverAfter(msg, 300*time.Millisecond)
					commit(t, box, msg)
					was := false
					if rand.IntN(3) == 0 {
						rest(time.Duration(rand.IntN(400)) * time.Millisecond)
						err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) (err error) {
							was, err = box.CancelScheduled(ctx, tx, msg.UUID)
							rest(time.Duration(rand.IntN(20)) * time.Millisecond)
							return err
						})
						if err != nil {
							t.Error(err)
							return
						}
					}
					mu.Lock()
					if was {
						canceled++
					} else {
						owed[msg.UUID] = true
					}
					mu.Unlock()
				}
			})
		}
		kills := 2
		for i := range kills {
			seen := len(arrivals(b))
			eventually(t, "more messages", func() bool { return len(arrivals(b)) > seen+10 })
			var holder string
			eventually(t, "somebody keeps the tables", func() bool {
				holder = p.upkeepHolder(t)
				return holder != ""
			})
			for j, c := range current {
				if c.name == holder {
					p.outsideTransactions(t, c.kill)
					current[j] = worker(2 + i)
				}
			}
		}
		seen := len(arrivals(b))
		eventually(t, "messages after the last kill", func() bool { return len(arrivals(b)) > seen+10 })
		stop()
		producers.Wait()
		eventually(t, "all are delivered", func() bool {
			return p.count(t, `select count(*) from {{scheduled}}`) == 0 && p.owed(t) == 0 // in this order: rows move
		})
		for _, c := range current {
			c.end()
		}
		got := arrivals(b)
		for id := range owed {
			if !slices.Contains(got, id) {
				t.Errorf("%s is lost", id)
			}
		}
		latest := map[string]int{} // by key
		for _, id := range got {
			if !owed[id] {
				t.Errorf("%s was canceled, or never committed, and arrived", id)
			}
			key, number, _ := strings.Cut(id, "/")
			n, _ := strconv.Atoi(number)
			if before, ok := latest[key]; ok && n < before {
				t.Errorf("%s comes after number %d", id, before)
			}
			latest[key] = n
		}
		if canceled == 0 {
			t.Error("nothing was canceled in time: the test shows nothing")
		}
		t.Logf("%d delivered, %d canceled", len(got), canceled)
	})
}

// arrivals returns the messages in the order in which they first arrived.
func arrivals(b *broker) (ids []string) {
	seen := map[string]bool{}
	for _, d := range b.all() {
		if !seen[d.MessageID] {
			seen[d.MessageID] = true
			ids = append(ids, d.MessageID)
		}
	}
	return ids
}

// upkeepHolder returns the name of the worker that has the lease of the upkeep.
func (p testDB) upkeepHolder(t testing.TB) (name string) {
	t.Helper()
	err := p.db.QueryRowContext(t.Context(), database.Of(p.cfg).Expand(`
		select w.name from {{relay_workers}} w join {{relay_leases}} l on l.owner = w.owner where l.lane = -1`)).Scan(&name)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		t.Fatal(err)
	}
	return name
}

// rest makes a producer slow.
func rest(d time.Duration) { testserver.Pause(context.Background(), d) }

// A message that is too large for the usual limit of a move is given the time that it
// needs.
func TestRelay_MovesALargeScheduledMessage(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	box, err := outbox.New(p.db, outbox.Config{Database: p.cfg, History: outbox.NoHistory, MaxPayload: 16 << 20, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	w, m := &wire{}, message.NewMessage("large", make([]byte, 9<<20))
	outbox.SetDeliverAfter(m, 10*time.Millisecond)
	commit(t, box, m)
	start(t, box, &sink{name: "w", wire: w}, relay.Config{})
	w.await(t, 1)
	p.awaitNothingOwed(t)
}
