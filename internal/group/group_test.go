package group

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

// died is work that ends the goroutine of its leader.
type died struct{}

func (died) Together(context.Context, []*Member[int, int]) ([]*Member[int, int], Result) {
	panic("the goroutine ends")
}
func (died) Alone(context.Context, int) (int, Result) { return 0, Clean }

func newDying() *Group[int, int] {
	return New(Limits{Size: 100, Bytes: 1 << 20}, Work[int, int](died{}))
}

func (g *Group[W, R]) joined(ctx context.Context, id string, since time.Time) *Member[W, R] {
	m := &Member[W, R]{ID: id, Since: since}
	m.ctx, m.instruction = ctx, make(chan instruction[R], mostFailed+2)
	g.join(m)
	return m
}

// A group takes the oldest members first, in whatever order they joined: the broker gets
// one acknowledgement for everything before the first unsettled delivery.
func TestGroup_TakesTheOldestFirst(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		g := newDying()
		begin := time.Now()
		for _, i := range rng.Perm(90) {
			g.joined(t.Context(), fmt.Sprintf("%02d", i), begin.Add(time.Duration(i)*time.Millisecond))
		}
		for first := 0; first < 90; first += sizeAtFirst {
			var got, want []string
			for _, m := range g.take(&Member[int, int]{}) {
				got = append(got, m.ID)
			}
			slices.Sort(got)
			for i := first; i < min(90, first+sizeAtFirst); i++ {
				want = append(want, fmt.Sprintf("%02d", i))
			}
			if !slices.Equal(got, want) {
				t.Fatalf("seed %d: took %v, wanted %v", seed, got, want)
			}
		}
	}
}

// A handler ends the goroutine of a leader that is newer than its group and still waits.
// The leader no longer counts, and its group runs without it.
func TestGroup_SurvivesALeaderThatWaits(t *testing.T) {
	g := newDying()
	m := g.joined(t.Context(), "m", time.Now())
	<-m.instruction
	others := make([]*Member[int, int], sizeAtFirst)
	for i := range others {
		others[i] = g.joined(t.Context(), fmt.Sprint(i), m.Since.Add(-time.Hour))
	}
	func() {
		defer func() { _ = recover() }()
		g.lead(m)
	}()
	if g.leaders != 0 || len(g.pending) != 0 {
		t.Errorf("%d leaders, %d wait", g.leaders, len(g.pending))
	}
	if v := <-others[0].instruction; v.do != runAlone {
		t.Errorf("a member of the group was told %v", v)
	}
}

// slowOnce is contended once, for longer than MaxWait. Later groups last until a member
// has run alone.
type slowOnce struct {
	first, once sync.Once
	alone       chan struct{} // closed by the first member that runs alone
}

func (w *slowOnce) Together(ctx context.Context, members []*Member[int, string]) (again []*Member[int, string], result Result) {
	w.first.Do(func() {
		time.Sleep(60 * time.Millisecond)
		again, result = members, Contended
	})
	if again != nil {
		return again, result
	}
	select {
	case <-w.alone:
	case <-ctx.Done():
	}
	for _, m := range members {
		m.Finish("in a group")
	}
	return nil, Clean
}

func (w *slowOnce) Alone(context.Context, int) (string, Result) {
	w.once.Do(func() { close(w.alone) })
	return "alone", Clean
}

// MaxWait applies again to a member that was in a contended group.
func TestGroup_MaxWaitRestartsAfterEachGroup(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	g := New(Limits{Size: 8, Bytes: 1 << 20, Wait: 20 * time.Millisecond, Writers: 1, MaxWait: 30 * time.Millisecond},
		Work[int, string](&slowOnce{alone: make(chan struct{})}))
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			if _, done := g.Do(ctx, &Member[int, string]{ID: fmt.Sprint(i), Since: time.Now()}); !done || ctx.Err() != nil {
				t.Errorf("%d was not run", i)
			}
		})
	}
	all.Wait()
}

// A leader may be newer than all members that its group can take. Then it is promoted
// again.
func TestGroup_PromotesALeaderAgainThatItsGroupLeftOut(t *testing.T) {
	g := newDying()
	begin := time.Now()
	newest := g.joined(t.Context(), "newest", begin.Add(time.Second))
	if v := <-newest.instruction; v.do != lead {
		t.Fatal("nobody leads")
	}
	for i := range sizeAtFirst {
		g.joined(t.Context(), fmt.Sprint(i), begin.Add(time.Duration(i)*time.Millisecond))
	}
	if batch := g.take(newest); len(batch) != sizeAtFirst || slices.Contains(batch, newest) {
		t.Fatalf("took %d", len(batch))
	}
	g.mu.Lock()
	g.leaders--
	g.promote()
	g.mu.Unlock()
	select {
	case v := <-newest.instruction:
		if v.do != lead {
			t.Errorf("was told %v", v)
		}
	default:
		t.Error("the leader that was left out was not promoted again")
	}
}
