package relaystore

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/outbox"
)

// expectTaken takes lanes and looks at the crashes that were counted.
func (s leaseFixture) expectTaken(t *testing.T, owner string, want map[int]Taken) {
	t.Helper()
	lanes := make([]int, 0, len(want))
	for lane := range want {
		lanes = append(lanes, lane)
	}
	all, err := s.Take(t.Context(), owner, lanes, len(lanes), shortTerm)
	if err != nil {
		t.Fatal(err)
	}
	for lane, w := range want {
		got := all[lane]
		got.UnsureUntil = time.Time{} // see TestLeases_TellsUntilWhenFormerOwnersMayHaveSent
		if got != w {
			t.Errorf("%s took lane %d: %+v, want %+v", owner, lane, got, w)
		}
	}
	s.awaitExpired(t, lanes...)
}

// insert writes a row into the outbox, or into parked, of a lane.
func (s leaseFixture) insert(t *testing.T, table string, lane int, more, values string) {
	t.Helper()
	text := `insert into {{` + table + `}} (lane, topic, message_id, key, payload, metadata` + more + `) values ($1, 't', 'm', '', '', ''` + values + `)`
	if _, err := s.db.ExecContext(t.Context(), database.Of(s.box.Config().Database).Expand(text), lane); err != nil {
		t.Fatal(err)
	}
}

func TestLeases_ATakeoverCountsACrashWhereAMessageMayHaveBeenInFlight(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		now, later := `now()`, `now() + interval '1 hour'`
		if s.box.Config().Database.Dialect == oncemill.SQLite {
			now, later = sqliteNow, sqliteNow+` + 3600000000`
		}
		s.insert(t, "outbox", 1, "", "")
		s.insert(t, "parked", 2, ", id, created_at, next_at", ", 1, "+now+", "+now)
		s.insert(t, "parked", 3, ", id, created_at, next_at", ", 1, "+now+", "+later)
		s.insert(t, "parked", 4, ", id, created_at, held", ", 1, "+now+", true")
		lanes := func(epoch int64, crashes ...int) map[int]Taken {
			want := map[int]Taken{UpkeepLane: {Epoch: epoch}}
			for i, n := range crashes {
				want[i+1] = Taken{Epoch: epoch, Crashes: n}
			}
			return want
		}
		s.expectTaken(t, "a", lanes(1, 0, 0, 0, 0, 0)) // from nobody
		s.expectTaken(t, "b", lanes(2, 1, 1, 0, 0, 0)) // from a, who is dead
		s.expectTaken(t, "b", lanes(3, 1, 1, 0, 0, 0)) // from itself
		s.expectTaken(t, "c", lanes(4, 2, 2, 0, 0, 0)) // from b, who is dead
		if err := s.Leave(t.Context(), "c", allLanes()); err != nil {
			t.Fatal(err)
		}
		s.awaitExpired(t, 1, 2, 3, 4, 5)
		s.expectTaken(t, "d", map[int]Taken{1: {Epoch: 5, Crashes: 2}, 2: {Epoch: 5, Crashes: 2}}) // given back in good order
	})
}

// With two crashes a lane has something in flight only while its lease names that.
func TestLeases_ALaneWithTwoCrashesCountsWhatItNames(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		for lane := range 3 {
			s.insert(t, "outbox", lane+1, "", "")
		}
		taken := func(epoch int64, first, second, third Taken) {
			t.Helper()
			first.Epoch, second.Epoch, third.Epoch = epoch, epoch, epoch
			s.expectTaken(t, string(rune('a'+epoch)), map[int]Taken{1: first, 2: second, 3: third})
		}
		taken(1, Taken{}, Taken{}, Taken{})
		taken(2, Taken{Crashes: 1}, Taken{Crashes: 1}, Taken{Crashes: 1})
		taken(3, Taken{Crashes: 2}, Taken{Crashes: 2}, Taken{Crashes: 2})
		expectErr(t, s.SetAlone(t.Context(), Fence{1, "d", 3}, WholeLane), nil)
		expectErr(t, s.SetAlone(t.Context(), Fence{2, "d", 3}, 42), nil)
		taken(4, Taken{Crashes: 3, Alone: WholeLane}, Taken{Crashes: 3, Alone: 42}, Taken{Crashes: 2})
		expectErr(t, s.SetAlone(t.Context(), Fence{1, "e", 4}, 0), nil)
		taken(5, Taken{Crashes: 3}, Taken{Crashes: 4, Alone: 42}, Taken{Crashes: 2})
	})
}

// The end of the crashes commits, but its answer is lost, and the worker records again that the lane is in
// flight. The next end clears that, although the database counts no crash any more.
func TestLeases_AnEndOfCrashesClearsTheRecord(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		s.expectTaken(t, "a", map[int]Taken{1: {Epoch: 1}})
		expectErr(t, s.SetAlone(t.Context(), Fence{1, "a", 1}, WholeLane), nil)
		expectErr(t, s.ClearCrashes(t.Context(), "a", map[int]int64{1: 1}), nil)
		s.expectTaken(t, "b", map[int]Taken{1: {Epoch: 2}})
	})
}

func TestLeases_TheOutageOfTheDatabaseIsNobodysCrash(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		for lane := range outbox.Lanes {
			s.insert(t, "outbox", lane, "", "")
		}
		s.expectTaken(t, "a", map[int]Taken{1: {Epoch: 1}, 2: {Epoch: 1}})
		s.expectTaken(t, "b", map[int]Taken{3: {Epoch: 1}})
		// Both are absent, whichever of their lanes are taken.
		s.expectTaken(t, "c", map[int]Taken{1: {Epoch: 2}})
		// c's own lease expired too, and b is the only other one when a takes.
		s.expectTaken(t, "c", map[int]Taken{2: {Epoch: 2}})
		s.expectTaken(t, "c", map[int]Taken{3: {Epoch: 2, Crashes: 1}, 1: {Epoch: 3}})
	})
}

func TestLeases_AMessageAloneInFlightIsHandedOver(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		store := s
		s.expectTaken(t, "a", map[int]Taken{1: {Epoch: 1}})
		expectErr(t, store.SetAlone(t.Context(), Fence{1, "a", 1}, 42), nil)
		s.expectTaken(t, "b", map[int]Taken{1: {Epoch: 2, Crashes: 1, Alone: 42}})
		expectErr(t, store.SetAlone(t.Context(), Fence{1, "a", 1}, 43), ErrFenced)
		expectErr(t, store.SetAlone(t.Context(), Fence{1, "b", 1}, 43), ErrFenced)
		s.expectTaken(t, "b", map[int]Taken{1: {Epoch: 3, Crashes: 1, Alone: 42}})
		expectErr(t, store.SetAlone(t.Context(), Fence{1, "b", 3}, 0), nil)
		expectErr(t, store.ClearCrashes(t.Context(), "b", map[int]int64{1: 2}), nil) // of another taken
		s.expectTaken(t, "c", map[int]Taken{1: {Epoch: 4, Crashes: 1}})
		expectErr(t, store.ClearCrashes(t.Context(), "b", map[int]int64{1: 4}), nil) // another's
		s.expectTaken(t, "c", map[int]Taken{1: {Epoch: 5, Crashes: 1}})
		expectErr(t, store.ClearCrashes(t.Context(), "c", map[int]int64{1: 5, 2: 7}), nil)
		s.expectTaken(t, "c", map[int]Taken{1: {Epoch: 6}})
		// Given back in good order, with its last message confirmed.
		expectErr(t, store.SetAlone(t.Context(), Fence{1, "c", 6}, 44), nil)
		expectErr(t, s.Release(t.Context(), "c", map[int]int64{1: 6}, nil), nil)
		s.awaitExpired(t, 1)
		s.expectTaken(t, "d", map[int]Taken{1: {Epoch: 7}})
		// Given back with an attempt that had no answer: no crash.
		s.insert(t, "outbox", 1, "", "")
		expectErr(t, s.Release(t.Context(), "d", map[int]int64{1: 7}, []int{1}), nil)
		s.awaitExpired(t, 1)
		s.expectTaken(t, "e", map[int]Taken{1: {Epoch: 8}})
		// The same of a worker that leaves.
		expectErr(t, s.SetAlone(t.Context(), Fence{1, "e", 8}, 45), nil)
		expectErr(t, s.Leave(t.Context(), "e", nil), nil)
		s.awaitExpired(t, 1)
		s.expectTaken(t, "f", map[int]Taken{1: {Epoch: 9}})
	})
}

// A worker that beats on has not died of what it could not finish in time.
func TestLeases_AnOwnerThatLivesOnHasNotCrashed(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		store := s
		s.insert(t, "outbox", 1, "", "")
		beat := func(owner string) {
			t.Helper()
			if _, err := s.Beat(t.Context(), Identity{Owner: owner, Name: owner, Ready: true}, nil, longTerm); err != nil {
				t.Fatal(err)
			}
		}
		s.expectTaken(t, "a", map[int]Taken{1: {Epoch: 1}})
		expectErr(t, store.SetAlone(t.Context(), Fence{1, "a", 1}, 42), nil)
		beat("a")
		s.expectTaken(t, "b", map[int]Taken{1: {Epoch: 2}})
		expectErr(t, store.SetAlone(t.Context(), Fence{1, "b", 2}, 43), nil)
		s.expectTaken(t, "c", map[int]Taken{1: {Epoch: 3, Crashes: 1, Alone: 43}}) // b has never beaten
		beat("c")
		s.expectTaken(t, "c", map[int]Taken{1: {Epoch: 4, Crashes: 1}})
		// A worker that died was seen as long as its lease, no longer.
		if _, err := s.Beat(t.Context(), Identity{Owner: "d", Name: "d", Ready: true}, nil, shortTerm); err != nil {
			t.Fatal(err)
		}
		if got := s.mustTake(t, "d", []int{1}, 1, shortTerm); got[1] != 5 {
			t.Fatalf("took %v", got)
		}
		s.awaitExpired(t, 1)
		s.expectTaken(t, "e", map[int]Taken{1: {Epoch: 6, Crashes: 2}})
	})
}

// A worker that has not given a lane back may have had messages in flight, also where that counts no crash; one
// that gives it back says if it may. Whoever takes the lane later is told, as long as nothing new happens the same
// time: rows of parked may not have been looked at.
func TestLeases_TellsUntilWhenFormerOwnersMayHaveSent(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		const never, same, later = 0, 1, 2
		last := map[int]time.Time{}
		for i, c := range []struct {
			owner   string
			until   map[int]int // by lane
			release []int       // lanes; nil: it leaves
			unsure  []int       // of these; of a worker that leaves: the others
		}{
			{"a", map[int]int{1: never, 2: never, UpkeepLane: never}, []int{}, nil},
			{"b", map[int]int{1: later, 2: later}, []int{1}, nil},
			{"b", map[int]int{1: same, 2: later}, []int{1, 2}, []int{2}},
			{"c", map[int]int{1: same, 2: later, UpkeepLane: later}, []int{1, 2, UpkeepLane}, nil},
			{"d", map[int]int{1: same, 2: same, UpkeepLane: same}, nil, []int{1}},
			{"e", map[int]int{1: later, 2: same, UpkeepLane: same}, []int{}, nil},
		} {
			lanes := slices.Sorted(maps.Keys(c.until))
			got, err := s.Take(t.Context(), c.owner, lanes, len(lanes), shortTerm)
			if err != nil || len(got) != len(lanes) {
				t.Fatalf("%d: %v, %v", i, got, err)
			}
			for lane, want := range c.until {
				until := got[lane].UnsureUntil
				is := later
				switch {
				case until.IsZero():
					is = never
				case until.Equal(last[lane]):
					is = same
				case until.Before(last[lane]) || time.Until(until).Abs() > 10*time.Minute:
					t.Errorf("%d: lane %d: until %v, after %v", i, lane, until, last[lane])
				}
				if is != want {
					t.Errorf("%d: %s took lane %d: unsure until %v, before until %v", i, c.owner, lane, until, last[lane])
				}
				last[lane] = until
			}
			if c.release == nil {
				expectErr(t, s.Leave(t.Context(), c.owner, slices.DeleteFunc(lanes, func(lane int) bool { return slices.Contains(c.unsure, lane) })), nil)
				lanes = nil
			}
			epochs := map[int]int64{}
			for _, lane := range c.release {
				epochs[lane] = got[lane].Epoch
			}
			expectErr(t, s.Release(t.Context(), c.owner, epochs, c.unsure), nil)
			s.awaitExpired(t, lanes...)
		}
	})
}

// Nobody has sent what was created long after the lease expired. If the clock is set back, what is older stays unsure.
func TestLeases_OnlyWhatIsOlderThanTheLeaseIsUnsure(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		ago, ahead := `now() - interval '1 hour'`, `now() + interval '1 hour'`
		if s.box.Config().Database.Dialect == oncemill.SQLite {
			ago, ahead = sqliteNow+` - 3600000000`, sqliteNow+` + 3600000000`
		}
		begin := time.Now()
		for _, set := range []string{
			`set owner = 'dead', lease_until = ` + ago + ` where lane = 1`,
			`set owner = 'dead', lease_until = ` + ago + `, unsure_until = ` + ahead + ` where lane = 2`,
			`set owner = 'me', unsure_until = ` + ahead + ` where lane = 3`,
			`set owner = 'dead', lease_until = ` + ahead + ` where lane = 4`,
			`set owner = 'former', lease_until = ` + ahead + ` where lane = 5`,
		} {
			if _, err := s.db.ExecContext(t.Context(), database.Of(s.box.Config().Database).Expand(`update {{relay_leases}} `+set)); err != nil {
				t.Fatal(err)
			}
		}
		took := time.Since(begin)
		expectErr(t, s.Release(t.Context(), "me", map[int]int64{3: 0}, []int{3}), nil)
		s.awaitExpired(t, 3)
		// What ends a lease before its time keeps until when its owner may have sent.
		leases, _, err := s.Census(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		expectErr(t, s.Expire(t.Context(), slices.DeleteFunc(leases, func(l Lease) bool { return l.Lane != 4 }), nil), nil)
		if _, err := s.Beat(t.Context(), Identity{Owner: "former", Name: "n"}, nil, longTerm); err != nil {
			t.Fatal(err)
		}
		expectErr(t, s.ExpireFormer(t.Context(), Identity{Owner: "a", Name: "n"}), nil)
		got, err := s.Take(t.Context(), "a", []int{1, 2, 3, 4, 5}, 5, longTerm)
		if err != nil {
			t.Fatal(err)
		}
		for lane, want := range map[int]time.Duration{1: -59 * time.Minute, 2: time.Hour, 3: time.Hour, 4: 61 * time.Minute, 5: 61 * time.Minute} {
			if in := got[lane].UnsureUntil.Sub(begin); in < want-time.Second || in > want+took+time.Second { // of clocks that are rounded
				t.Errorf("lane %d: unsure until in %v, want %v", lane, in, want)
			}
		}
	})
}
