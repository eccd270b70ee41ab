package relaystore

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

func TestLeases_TakeGivesFreeLanesWithANewEpoch(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		if taken := s.mustTake(t, "a", nil, 5, longTerm); len(taken) != 0 {
			t.Errorf("took %v of none", taken)
		}
		if taken := s.mustTake(t, "a", []int{1, 2, 3}, 2, longTerm); len(taken) != 2 {
			t.Errorf("took %v, want two", taken)
		}
		s.mustTake(t, "a", []int{1, 2, 3}, 3, longTerm)
		if taken := s.mustTake(t, "b", []int{1, 2, 3, 4, UpkeepLane}, 33, longTerm); !maps.Equal(taken, map[int]int64{4: 1, UpkeepLane: 1}) {
			t.Errorf("took %v, want what was free: 4 and the upkeep", taken)
		}
		leases, _ := s.mustCensus(t)
		for lane, want := range map[int]string{1: "a", 2: "a", 3: "a", 4: "b", UpkeepLane: "b", 5: ""} {
			l := leases[lane]
			if l.Owner != want || (l.Left > 0) != (want != "") || l.Epoch != int64(min(1, len(want))) {
				t.Errorf("lane %d: %+v, want owner %q", lane, l, want)
			}
			if want != "" && (l.Left > longTerm || l.Left < longTerm/2) {
				t.Errorf("lane %d has %v left of %v", lane, l.Left, longTerm)
			}
		}
	})
}

func TestLeases_BeatShowsTheWorkerAndExtendsItsLanes(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		a, b := Identity{Owner: "a", Name: "host", Ready: true}, Identity{Owner: "b", Stopping: true}
		if held := s.mustBeat(t, a, nil, longTerm); len(held) != 0 {
			t.Errorf("holds %v before it took anything", held)
		}
		s.mustBeat(t, b, nil, longTerm)
		_, peers := s.mustCensus(t)
		want := map[string]Worker{"a": {Owner: "a", Ready: true}, "b": {Owner: "b", Stopping: true}}
		if !maps.Equal(peers, want) {
			t.Errorf("peers %+v, want %+v", peers, want)
		}
		a.Ready, a.Stopping = false, true
		s.mustTake(t, "a", []int{1, 2}, 2, longTerm/2)
		s.mustTake(t, "b", []int{3}, 1, longTerm/2)
		if held := s.mustBeat(t, a, []int{1, 3}, longTerm); !maps.Equal(held, map[int]Renewal{1: {1, true}, 2: {1, false}}) {
			t.Errorf("holds %v, want its two lanes, the one left out too", held)
		}
		leases, peers := s.mustCensus(t)
		if peers["a"] != (Worker{Owner: "a", Stopping: true}) {
			t.Errorf("peer %+v after it said that it stops", peers["a"])
		}
		if leases[1].Left <= longTerm/2 || leases[2].Left > longTerm/2 || leases[3].Left > longTerm/2 || leases[3].Owner != "b" {
			t.Errorf("extended %+v, %+v, %+v; want the first alone", leases[1], leases[2], leases[3])
		}
	})
}

func TestLeases_AnExpiredLeaseIsTheFirstTakers(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		a := Identity{Owner: "a"}
		s.mustTake(t, "a", []int{1, 2}, 2, shortTerm)
		s.awaitExpired(t, 1, 2)
		// Nobody took it: extending it is right, and the epoch stays.
		if held := s.mustBeat(t, a, []int{1, 2}, shortTerm); !maps.Equal(held, map[int]Renewal{1: {1, true}, 2: {1, true}}) {
			t.Errorf("holds %v after extending expired leases", held)
		}
		s.awaitExpired(t, 1, 2)
		if taken := s.mustTake(t, "b", []int{1}, 1, longTerm); taken[1] != 2 {
			t.Errorf("took %v, want lane 1 at epoch 2", taken)
		}
		// The former owner is refused whatever it tries.
		if held := s.mustBeat(t, a, []int{1, 2}, longTerm); !maps.Equal(held, map[int]Renewal{2: {1, true}}) {
			t.Errorf("former owner holds %v, want lane 2", held)
		}
		if err := s.Release(t.Context(), "a", map[int]int64{1: 1}, nil); err != nil {
			t.Fatal(err)
		}
		if taken := s.mustTake(t, "a", []int{1}, 1, longTerm); len(taken) != 0 {
			t.Errorf("former owner took %v back", taken)
		}
		if s.guarded(t, 1, "a", 1) {
			t.Error("former owner passes the guard")
		}
		if !s.guarded(t, 1, "b", 2) {
			t.Error("owner does not pass the guard")
		}
		if s.guarded(t, 1, "b", 1) || s.guarded(t, 2, "b", 1) {
			t.Error("the guard goes by less than lane, owner and epoch")
		}
		leases, _ := s.mustCensus(t)
		if l := leases[1]; l.Owner != "b" || l.Epoch != 2 || l.Left <= 0 {
			t.Errorf("lane 1: %+v, want b's", l)
		}
	})
}

func TestLeases_ReleaseAndLeave(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		s.mustTake(t, "a", []int{1, 2, UpkeepLane}, 3, longTerm)
		s.mustBeat(t, Identity{Owner: "a"}, nil, longTerm)
		s.mustBeat(t, Identity{Owner: "b"}, nil, shortTerm)
		if err := s.Release(t.Context(), "a", map[int]int64{1: 1, 2: 0, UpkeepLane: 1}, nil); err != nil {
			t.Fatal(err)
		}
		leases, _ := s.mustCensus(t)
		for lane, owner := range map[int]string{1: "", UpkeepLane: "", 2: "a"} { // lane 2 was taken again since
			if l := leases[lane]; l.Owner != owner || (l.Left < 0) != (owner == "") {
				t.Errorf("lane %d: %+v, want owner %q", lane, l, owner)
			}
		}
		if taken := s.mustTake(t, "b", allLanes(), 33, longTerm); len(taken) != outbox.Lanes-1 || taken[1] != 2 {
			t.Errorf("took %v, want all but lane 2, lane 1 at epoch 2", taken)
		}
		if err := s.Leave(t.Context(), "a", nil); err != nil {
			t.Fatal(err)
		}
		if leases, _ = s.mustCensus(t); leases[2].Owner != "" || leases[2].Left >= 0 || leases[1].Owner != "b" {
			t.Errorf("after a has left: lane 1: %+v, lane 2: %+v", leases[1], leases[2])
		}
		// A worker that is not heard of is not counted.
		eventually(t, "nobody is counted", func() bool {
			_, peers := s.mustCensus(t)
			return len(peers) == 0
		})
	})
}

func TestLeases_TheDeadAreForgotten(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		s.mustBeat(t, Identity{Owner: "dead"}, nil, -2*time.Hour)
		s.mustBeat(t, Identity{Owner: "lately"}, nil, -time.Minute)
		s.mustBeat(t, Identity{Owner: "a"}, nil, longTerm)
		if err := s.Leave(t.Context(), "a", nil); err != nil {
			t.Fatal(err)
		}
		var left string
		if err := s.db.QueryRowContext(t.Context(), `select owner from `+database.Of(s.box.Config().Database).Table("relay_workers")).Scan(&left); err != nil || left != "lately" {
			t.Errorf("worker %q is remembered, %v; want the one that died lately", left, err)
		}
	})
}

// A takeover waits for a guarded write under way, and the former owner's next
// one is refused.
func TestLeases_AGuardedTransactionExcludesATakeover(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		epoch := s.mustTake(t, "a", []int{UpkeepLane}, 1, shortTerm)[UpkeepLane]
		s.inGuard(t, UpkeepLane, "a", epoch, func(held bool) {
			if !held {
				t.Fatal("owner does not pass the guard")
			}
			s.awaitExpired(t, UpkeepLane)
			taken, err := s.other.Take(t.Context(), "b", []int{UpkeepLane}, 1, longTerm)
			if len(taken) != 0 {
				t.Errorf("took %v from under a guarded transaction (%v)", taken, err)
			}
		})
		if taken := s.mustTake(t, "b", []int{UpkeepLane}, 1, longTerm); taken[UpkeepLane] != epoch+1 {
			t.Errorf("took %v after the guarded transaction", taken)
		}
		if s.guarded(t, UpkeepLane, "a", epoch) {
			t.Error("former owner passes the guard")
		}
	})
}

// The scheduler may move messages for longer than a lease lasts. Meanwhile the
// worker's heartbeat goes on, and after a release nobody else begins before the end.
// (SQLite has one writer at a time.)
func TestLeases_AGuardedTransactionKeepsNoHeartbeatWaiting(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		if s.box.Config().Database.Dialect == oncemill.SQLite {
			return
		}
		epoch := s.mustTake(t, "a", []int{UpkeepLane}, 1, shortTerm)[UpkeepLane]
		s.inGuard(t, UpkeepLane, "a", epoch, func(bool) {
			ctx, cancel := context.WithTimeout(t.Context(), longTerm/2)
			defer cancel()
			kept, err := s.other.Beat(ctx, Identity{Owner: "a", Name: "a", Ready: true}, []int{UpkeepLane}, longTerm)
			if err != nil || kept[UpkeepLane].Epoch != epoch {
				t.Errorf("kept %v, %v", kept, err)
			}
			if err := s.other.Release(ctx, "a", map[int]int64{UpkeepLane: epoch}, nil); err != nil {
				t.Error(err)
			}
			if taken, err := s.other.Take(ctx, "b", []int{UpkeepLane}, 1, longTerm); len(taken) != 0 {
				t.Errorf("took %v from under a guarded transaction (%v)", taken, err)
			}
		})
		if taken := s.mustTake(t, "b", []int{UpkeepLane}, 1, longTerm); taken[UpkeepLane] != epoch+1 {
			t.Errorf("took %v after the guarded transaction", taken)
		}
	})
}

// A process that is stopped in the middle of a guarded transaction keeps its
// locks only for a moment. (On SQLite it keeps the whole database waiting.)
func TestLeases_AGuardedTransactionThatIdlesIsEndedByTheServer(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		if s.box.Config().Database.Dialect == oncemill.SQLite {
			return
		}
		epoch := s.mustTake(t, "a", []int{UpkeepLane}, 1, shortTerm)[UpkeepLane]
		s.inGuard(t, UpkeepLane, "a", epoch, func(bool) {
			eventually(t, "the lease is taken over", func() bool { return len(s.mustTake(t, "b", []int{UpkeepLane}, 1, longTerm)) == 1 })
		})
	})
}

func TestLeases_UpkeepWithAStaleLeaseDoesNothing(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		if names := database.Of(s.box.Config().Database); names.Dialect == oncemill.SQLite { // on PostgreSQL days are missing
			if _, err := s.db.ExecContext(t.Context(), names.Expand(`
				insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
				values (1, 1, 't', 'm', '', '', '', 0, 0)`)); err != nil {
				t.Fatal(err)
			}
		}
		stale := s.mustTake(t, "a", []int{UpkeepLane}, 1, shortTerm)[UpkeepLane]
		s.awaitExpired(t, UpkeepLane)
		fresh := s.mustTake(t, "b", []int{UpkeepLane}, 1, longTerm)[UpkeepLane]
		maintain := func(owner string, epoch int64) outboxstore.Maintained {
			done, err := outboxqueue.Of(s.box).Maintain(t.Context(), func(ctx context.Context, tx *sql.Tx) (bool, error) {
				return s.Guard(ctx, tx, UpkeepLane, owner, epoch)
			})
			if err != nil {
				t.Fatal(err)
			}
			return done
		}
		if done := maintain("a", stale); done != (outboxstore.Maintained{}) {
			t.Errorf("the former owner did %+v", done)
		}
		if done := maintain("b", fresh); done == (outboxstore.Maintained{}) {
			t.Error("the owner did nothing: the test shows nothing")
		}
	})
}

func TestLeases_ManyTakersShareNoLane(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		const takers = 8
		var group sync.WaitGroup
		var mu sync.Mutex
		owners := map[int][]string{}
		for i := range takers {
			group.Go(func() {
				owner := fmt.Sprint("owner", i)
				for range 50 {
					taken, err := s.Take(t.Context(), owner, allLanes(), 5, longTerm)
					if err != nil && !sqlerr.Retryable(err) {
						t.Error(err)
					}
					mu.Lock()
					for lane, got := range taken {
						owners[lane] = append(owners[lane], owner)
						if got.Epoch != 1 {
							t.Errorf("lane %d has epoch %d", lane, got.Epoch)
						}
					}
					total := len(owners)
					mu.Unlock()
					if total == outbox.Lanes {
						return
					}
				}
			})
		}
		group.Wait()
		if len(owners) != outbox.Lanes {
			t.Errorf("%d lanes are taken", len(owners))
		}
		leases, _ := s.mustCensus(t)
		for lane, got := range owners {
			if len(got) != 1 || leases[lane].Owner != got[0] {
				t.Errorf("lane %d was given to %v, the table says %q", lane, got, leases[lane].Owner)
			}
		}
	})
}

// The rows of a statement come before its commit, which may fail after them.
func TestLeases_NothingIsTakenByAStatementThatDoesNotCommit(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		names := database.Of(s.box.Config().Database)
		if names.Dialect == oncemill.SQLite {
			return // a statement there has committed when its last row is read
		}
		for _, text := range []string{
			`create function {{refuse}}() returns trigger language plpgsql as $$ begin raise serialization_failure; end $$`,
			`create constraint trigger refuse after update on {{relay_leases}} deferrable initially deferred for each row execute function {{refuse}}()`,
		} {
			if _, err := s.db.ExecContext(t.Context(), names.Expand(text)); err != nil {
				t.Fatal(err)
			}
		}
		if taken, err := s.Take(t.Context(), "a", allLanes(), 5, longTerm); !sqlerr.Retryable(err) || len(taken) > 0 {
			t.Errorf("took %v, %v", taken, err)
		}
		if held, err := s.Beat(t.Context(), Identity{Owner: "a", Name: "a"}, []int{1}, longTerm); err != nil || len(held) > 0 {
			t.Errorf("holds %v, %v", held, err) // nobody's lanes were touched
		}
	})
}

// The server's clock was set back after a worker had died: its leases would last for
// as long as the clock was wrong. What is renewed meanwhile stays.
func TestLeases_EndsWhatNobodyRenewsAfterTheClockWasSetBack(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		const term = time.Hour
		s.mustTake(t, "dead", []int{1, 2}, 2, term)
		s.mustBeat(t, Identity{Owner: "dead", Ready: true}, []int{1, 2}, term)
		s.mustTake(t, "alive", []int{3, 4}, 2, term)
		s.mustTake(t, "me", []int{5}, 1, term)
		alive, me := Identity{Owner: "alive", Ready: true}, Identity{Owner: "me", Ready: true}
		me.Name = "me"
		s.mustBeat(t, alive, []int{3, 4}, term)
		s.mustBeat(t, me, nil, term)
		leases, workers, err := s.Census(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		old := slices.DeleteFunc(leases, func(l Lease) bool { return l.Owner != "dead" })
		gone := slices.DeleteFunc(workers, func(w Worker) bool { return w.Owner != "dead" })
		if len(old) != 2 || len(gone) != 1 {
			t.Fatalf("%v, %v; want the dead worker and its two lanes", old, gone)
		}

		// One of them is renewed before it is ended.
		s.mustBeat(t, Identity{Owner: "dead", Ready: true}, []int{1}, 2*term)
		if err := s.Expire(t.Context(), old, gone); err != nil {
			t.Fatal(err)
		}
		now, peers := s.mustCensus(t)
		if now[1].Left < 0 || now[2].Left >= 0 || now[3].Left < 0 || now[5].Left < 0 || len(peers) != 3 {
			t.Errorf("leases %v, workers %v; want lane 2 alone to be free", now, peers)
		}
		if taken := s.mustTake(t, "me", allLanes(), outbox.Lanes, term); len(taken) != outbox.Lanes-4 || taken[2] != 2 {
			t.Errorf("took %v", taken)
		}
	})
}

// Another name, another owner of the same name that comes later, and lanes that have gone
// to somebody else meanwhile are left alone.
func TestLeases_ExpireFormerEndsThoseOfTheSameName(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		const term = time.Hour
		former, other := Identity{Owner: "former", Name: "worker-1", Ready: true}, Identity{Owner: "other", Name: "worker-2", Ready: true}
		me := Identity{Owner: "me", Name: "worker-1", Ready: true}
		s.mustBeat(t, former, nil, term)
		s.mustBeat(t, other, nil, term)
		s.mustTake(t, "former", []int{1, 2}, 2, term)
		s.mustTake(t, "other", []int{3}, 1, term)
		if err := s.ExpireFormer(t.Context(), me); err != nil {
			t.Fatal(err)
		}
		leases, peers := s.mustCensus(t)
		if leases[1].Left >= 0 || leases[2].Left >= 0 || leases[3].Left < 0 || len(peers) != 1 || peers["other"].Owner == "" {
			t.Errorf("leases %v, workers %v; want those of the former worker to be over", leases, peers)
		}
		s.mustBeat(t, me, nil, term)
		if taken := s.mustTake(t, "me", []int{1, 2, 3}, 3, term); len(taken) != 2 {
			t.Errorf("took %v", taken)
		}
		// The former one was frozen: what it holds no longer it does not get back.
		if held := s.mustBeat(t, former, []int{1, 2}, term); len(held) != 0 {
			t.Errorf("the former worker holds %v", held)
		}
		if err := s.ExpireFormer(t.Context(), me); err != nil {
			t.Fatal(err)
		}
		if held := s.mustBeat(t, me, []int{1, 2}, term); len(held) != 2 {
			t.Errorf("the worker has ended its own leases: %v are left", held)
		}
	})
}
