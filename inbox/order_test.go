package inbox

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// A group takes those first that came first, in whatever order they were handed out:
// a broker can be told at once of all before the first unsettled one.
func TestGroup_TakesTheOldestFirst(t *testing.T) {
	in := &Inbox{cfg: Config{Group: Group{Size: 100, Bytes: 1 << 20}}}
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		g := &group{in: in, pace: newPace(100, inParallel), filled: make(chan struct{}, 1)}
		begin := time.Now()
		for _, i := range rng.Perm(90) {
			id := fmt.Sprintf("%02d", i)
			g.join(&member{
				work:    &work{id: id, msg: message.NewMessage(id, nil)},
				since:   begin.Add(time.Duration(i) * time.Millisecond),
				verdict: make(chan verdict, mostFailed+2),
			})
		}
		for first := 0; first < 90; first += sizeAtFirst {
			var got, want []string
			for _, m := range g.take(&member{}) {
				got = append(got, m.id)
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

// A handler that ends the goroutine of a leader whose own message waits still, being
// newer than its group, takes that message along, and nobody waits for it to lead.
func TestGroup_OutlivesALeaderThatWaits(t *testing.T) {
	in := &Inbox{cfg: Config{Group: Group{Size: 100, Bytes: 1 << 20}}}
	g := &group{in: in, pace: newPace(100, inParallel), filled: make(chan struct{}, 1)}
	m := &member{work: &work{msg: message.NewMessage("", nil), id: "m"}, since: time.Now(), verdict: make(chan verdict, mostFailed+2)}
	g.join(m)
	<-m.verdict
	others := make([]*member, sizeAtFirst)
	for i := range others {
		others[i] = &member{work: &work{msg: message.NewMessage("", nil), id: fmt.Sprint(i)}, since: m.since.Add(-time.Hour), verdict: make(chan verdict, mostFailed+2)}
		g.join(others[i])
	}
	func() {
		defer func() { _ = recover() }()
		g.lead(m) // without a database its first statement panics, as a handler's goroutine ends
	}()
	if g.leaders != 0 || len(g.pending) != 0 {
		t.Errorf("%d leaders, %d wait", g.leaders, len(g.pending))
	}
	if v := <-others[0].verdict; v.do != runAlone {
		t.Errorf("a member of the group was told %v", v)
	}
}

// The one that was told to lead may be newer than all that its group can take. Then it
// is told again.
func TestGroup_LeavesNoLeaderBehind(t *testing.T) {
	in := &Inbox{cfg: Config{Group: Group{Size: 100, Bytes: 1 << 20}}}
	g := &group{in: in, pace: newPace(100, inParallel), filled: make(chan struct{}, 1)}
	begin := time.Now()
	join := func(i int) *member {
		m := &member{
			work:    &work{msg: message.NewMessage("", nil), id: fmt.Sprint(i)},
			since:   begin.Add(time.Duration(i) * time.Millisecond),
			verdict: make(chan verdict, mostFailed+2),
		}
		g.join(m)
		return m
	}
	newest := join(99)
	if v := <-newest.verdict; v.do != lead {
		t.Fatal("nobody leads")
	}
	for i := range sizeAtFirst {
		join(i)
	}
	if batch := g.take(newest); len(batch) != sizeAtFirst || slices.Contains(batch, newest) {
		t.Fatalf("took %d", len(batch))
	}
	g.mu.Lock()
	g.leaders--
	g.appoint()
	g.mu.Unlock()
	select {
	case v := <-newest.verdict:
		if v.do != lead {
			t.Errorf("was told %v", v)
		}
	default:
		t.Error("nobody leads the one that was left behind")
	}
}
