package outboxqueue

import (
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// Rounds and large messages have their turns, however many were put aside and however long
// a call takes.
func TestMoveState_TakesTurns(t *testing.T) {
	t.Parallel()
	p := newMoveState()
	begin := time.Now()
	now := begin
	for i := range int64(mostPostponed + 1) {
		p.postpone(outboxstore.Scheduled{Position: outboxstore.Position{At: "x", Seq: i + 1}}, 0, time.Second, false, false, now)
	}
	turns := map[attempt]int{}
	for now.Sub(begin) < 5*time.Minute {
		now = now.Add(200 * time.Millisecond)
		one, again := p.retry(now)
		_, _, round := p.inRound(now)
		what := p.takeTurn(again, round, true)
		if turns[what]++; what == attemptPostponed {
			p.postpone(one.Scheduled, 0, time.Second, false, false, now)
		}
	}
	for _, what := range []attempt{attemptPostponed, attemptRound, attemptLarge} {
		if turns[what] < 400 {
			t.Errorf("turns %v", turns)
		}
	}
}

// What has waited longest is tried first.
func TestMoveState_RetriesInOrder(t *testing.T) {
	t.Parallel()
	p := newMoveState()
	now := time.Now()
	for i := range int64(3) {
		p.postpone(outboxstore.Scheduled{Position: outboxstore.Position{At: "x", Seq: i}}, 0, time.Second, false, false, now.Add(-time.Duration(i)*time.Second))
	}
	for want := int64(2); want >= 0; want-- {
		one, ok := p.retry(now.Add(shortestPostponed))
		if !ok || one.Seq != want {
			t.Fatalf("%d, %v; want %d", one.Seq, ok, want)
		}
		p.postpone(one.Scheduled, 0, time.Second, false, false, now.Add(shortestPostponed))
	}
}
