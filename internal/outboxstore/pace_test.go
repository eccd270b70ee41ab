package outboxstore

import (
	"testing"
	"time"
)

// Rounds and large messages have their turns, however many were put aside and however long
// a call takes.
func TestPace_TakesTurns(t *testing.T) {
	t.Parallel()
	p := &pace{most: mostAside, mostWaiting: mostWaiting, behind: beginning, round: beginning}
	begin := time.Now()
	now := begin
	for i := range int64(mostAside + 1) {
		p.failed(row{place: place{"x", i + 1}}, 0, time.Second, false, false, now)
	}
	turns := map[attempt]int{}
	for now.Sub(begin) < 5*time.Minute {
		now = now.Add(200 * time.Millisecond)
		one, again := p.retry(now)
		_, _, round := p.inRound(now)
		what := p.takeTurn(again, round, true)
		if turns[what]++; what == ofAside {
			p.failed(one.row, 0, time.Second, false, false, now)
		}
	}
	for _, what := range []attempt{ofAside, ofRound, ofLarge} {
		if turns[what] < 400 {
			t.Errorf("turns %v", turns)
		}
	}
}

// What has waited longest is tried first.
func TestPace_RetriesInOrder(t *testing.T) {
	t.Parallel()
	p := &pace{most: mostAside, mostWaiting: mostWaiting, behind: beginning, round: beginning}
	now := time.Now()
	for i := range int64(3) {
		p.failed(row{place: place{"x", i}}, 0, time.Second, false, false, now.Add(-time.Duration(i)*time.Second))
	}
	for want := int64(2); want >= 0; want-- {
		one, ok := p.retry(now.Add(leastAside))
		if !ok || one.seq != want {
			t.Fatalf("%d, %v; want %d", one.seq, ok, want)
		}
		p.failed(one.row, 0, time.Second, false, false, now.Add(leastAside))
	}
}
