package turn_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/oncemill/oncemill/internal/turn"
	"github.com/oncemill/oncemill/internal/txcontext"
)

// newTurns returns the turn of a handle that opens nothing.
func newTurns(t *testing.T) *turn.Turns {
	t.Helper()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return turn.Of(db)
}

func take(t *testing.T, turns *turn.Turns, kind turn.Kind) *turn.Turn {
	t.Helper()
	taken, err := turns.Take(t.Context(), kind)
	if err != nil {
		t.Fatal(err)
	}
	return taken
}

// Heartbeats go first. Then callers and background work alternate, each kind in the order
// of asking.
func TestTake_GoesInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(t)
		first := take(t, turns, turn.Caller)
		var mu sync.Mutex
		var order []string
		for _, who := range []struct {
			name string
			kind turn.Kind
		}{
			{"caller 1", turn.Caller},
			{"caller 2", turn.Caller},
			{"caller 3", turn.Caller},
			{"background 1", turn.Background},
			{"background 2", turn.Background},
			{"heartbeat", turn.Heartbeat},
		} {
			go func() {
				taken := take(t, turns, who.kind)
				mu.Lock()
				order = append(order, who.name)
				mu.Unlock()
				taken.Give()
			}()
			synctest.Wait() // it waits in line
		}
		first.Give()
		synctest.Wait()
		want := []string{"heartbeat", "caller 1", "background 1", "caller 2", "background 2", "caller 3"}
		if !slices.Equal(order, want) {
			t.Errorf("got %v, want %v", order, want)
		}
	})
}

// One writer at a time, no writer is forgotten, and a wait ends exactly with its context,
// under random schedules.
func TestTake_UnderAnySchedule(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2000) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 13)) //nolint:gosec // a schedule, no secret
			turns := newTurns(t)
			var holders, served, late atomic.Int64
			var running sync.WaitGroup
			for range 2 + random.IntN(20) {
				kind := turn.Kind(random.IntN(3))
				start, hold := millis(random, 20), millis(random, 12)
				within := millis(random, 40)
				running.Go(func() {
					time.Sleep(start)
					ctx, cancel := context.WithTimeout(t.Context(), within)
					defer cancel()
					begin := time.Now()
					taken, err := turns.Take(ctx, kind)
					if waited := time.Since(begin); waited > within {
						t.Errorf("seed %d: waited %v of %v", seed, waited, within)
					}
					if err != nil {
						late.Add(1)
						if !errors.Is(err, context.DeadlineExceeded) {
							t.Errorf("seed %d: %v", seed, err)
						}
						return
					}
					if n := holders.Add(1); n != 1 {
						t.Errorf("seed %d: %d have the turn", seed, n)
					}
					time.Sleep(hold)
					served.Add(1)
					holders.Add(-1)
					taken.Give()
					taken.Give() // does nothing
				})
			}
			running.Wait()
			time.Sleep(time.Second) // the pause after the last one
			if turns.Held() || turns.Waiting() != 0 {
				t.Errorf("seed %d: after %d served and %d late, held %v, %d waiting", seed, served.Load(), late.Load(), turns.Held(), turns.Waiting())
			}
		})
	}
}

func millis(random *rand.Rand, most int) time.Duration {
	return time.Duration(random.IntN(most)) * time.Millisecond
}

func TestTake_WaitsAsLongAsTheTurnMoves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(t)
		for range 5 {
			go func() {
				taken := take(t, turns, turn.Caller)
				time.Sleep(turn.MaxWait - time.Second)
				taken.Give()
			}()
		}
		synctest.Wait()
		take(t, turns, turn.Caller) // and keeps it
		begin := time.Now()
		if _, err := turns.Take(context.WithoutCancel(t.Context()), turn.Caller); !errors.Is(err, turn.ErrLocked) {
			t.Errorf("got %v", err)
		}
		if waited := time.Since(begin); waited < turn.MaxWait || waited > 2*turn.MaxWait {
			t.Errorf("waited %v", waited)
		}
	})
}

// The holder asks again, under the context of its own transaction.
func TestTake_RefusesTheHolder(t *testing.T) {
	t.Parallel()
	turns := newTurns(t)
	taken, tx := take(t, turns, turn.Caller), new(sql.Tx)
	taken.Runs(tx)
	ctx := txcontext.With(t.Context(), tx)
	if _, err := turns.Take(ctx, turn.Background); !errors.Is(err, turn.ErrNested) {
		t.Errorf("got %v", err)
	}
	taken.Give()
	again, err := turns.Take(ctx, turn.Background)
	if err != nil {
		t.Fatal(err)
	}
	again.Give()
}

func TestOver_ComesSoonerWhenOthersWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(t)
		until := func() time.Duration {
			taken := take(t, turns, turn.Background)
			defer taken.Give()
			begin := time.Now()
			for !taken.Over() {
				time.Sleep(time.Millisecond)
			}
			return time.Since(begin)
		}
		alone := until()
		time.Sleep(time.Second)
		go func() {
			time.Sleep(time.Millisecond)
			take(t, turns, turn.Heartbeat).Give()
		}()
		wanted := until()
		time.Sleep(time.Second) // the heartbeat has had its turn
		if alone < 5*wanted || wanted < turn.Slice || wanted > 2*turn.Slice {
			t.Errorf("%v alone, %v while others wait", alone, wanted)
		}
	})
}

// The wait for the lock does not count. Otherwise a transaction beside another process
// that writes all the time would never do any work.
func TestOver_CountsFromTheLock(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	taken := take(t, turn.Of(db), turn.Background)
	defer taken.Give()
	begun := errors.New("a BEGIN that takes long")
	err = taken.Begin(t.Context(), conn, func(context.Context) error {
		for !taken.Over() { // it waits for the lock
			time.Sleep(time.Millisecond)
		}
		begun = nil
		return nil
	})
	if err != nil || begun != nil || taken.Over() {
		t.Errorf("%v, %v; over as soon as it has begun: %v", err, begun, taken.Over())
	}
}

func TestOf_KeepsNoHandleAlive(t *testing.T) {
	before := turn.Handles()
	func() {
		for i := range 10 {
			db, err := sql.Open("sqlite", fmt.Sprintf("file:%d", i))
			if err != nil {
				t.Fatal(err)
			}
			if first := turn.Of(db); first != turn.Of(db) {
				t.Error("two turns of one handle")
			}
			db.Close()
		}
	}()
	for begin := time.Now(); turn.Handles() > before; runtime.GC() {
		if time.Since(begin) > time.Minute {
			t.Fatalf("%d turns are kept", turn.Handles()-before)
		}
	}
}
