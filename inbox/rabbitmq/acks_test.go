package rabbitmq

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// broker is what a channel knows of its deliveries.
type broker struct {
	handed  uint64
	taken   map[uint64]bool // acknowledged or rejected
	below   uint64          // all of these are taken
	news    []uint64        // taken since the last look
	frames  int
	problem error
}

func (b *broker) send(tag uint64, multiple bool) error {
	b.frames++
	if tag > b.handed || b.taken[tag] && !multiple {
		b.problem = errors.New("a tag that is not open, which costs the channel")
	}
	first := tag
	if multiple {
		first = b.below + 1
		b.below = max(b.below, tag)
	}
	for t := first; t <= tag; t++ {
		b.take(t)
	}
	return nil
}

func (b *broker) take(tag uint64) {
	if !b.taken[tag] {
		b.taken[tag] = true
		b.news = append(b.news, tag)
	}
}

// Whatever the order, what is acked is sent, once, in time, and nothing else, and what
// waits leaves handlers enough to do.
func TestAcks_TellTheBrokerWhatWasAcked(t *testing.T) {
	for seed := range testserver.Rounds[uint64](60, 150) {
		rng := rand.New(rand.NewPCG(seed, 1))
		prefetch := 1 + rng.IntN(1000)
		among := 1 + rng.IntN(prefetch) // how far from the order of delivery the acks are
		a := acks{prefetch: prefetch}
		b := broker{taken: map[uint64]bool{}}
		open, done := []uint64{}, map[uint64]bool{}
		check := func() {
			t.Helper()
			for _, tag := range b.news {
				if !done[tag] {
					t.Fatalf("seed %d: %d was acknowledged while it is being handled", seed, tag)
				}
			}
			b.news = nil
			if unsent := int(b.handed) - len(b.taken); a.open != unsent || b.problem != nil {
				t.Fatalf("seed %d: counts %d open, the broker %d; %v", seed, a.open, unsent, b.problem)
			}
			old := 0
			for _, tag := range open {
				if tag < a.oldBelow {
					old++
				}
			}
			if a.old != old {
				t.Fatalf("seed %d: counts %d old ones of %d", seed, a.old, old)
			}
		}
		for range 300 {
			switch rng.IntN(8) {
			case 0, 1, 2:
				for range rng.IntN(40) {
					if int(b.handed)-len(b.taken) == prefetch {
						break
					}
					b.handed++
					a.arrived(b.handed)
					open = append(open, b.handed)
				}
			case 3, 4, 5:
				for range rng.IntN(40) {
					if len(open) == 0 {
						break
					}
					i := rng.IntN(min(len(open), among))
					tag := open[i]
					open = slices.Delete(open, i, i+1)
					done[tag] = true
					if rng.IntN(10) == 0 {
						a.rejected(tag)
						b.take(tag)
					} else {
						a.ack(tag)
					}
				}
			case 6:
				_ = a.flush(flushRipe, b.send)
				if n, left := len(a.unsent), prefetch-a.old-len(a.unsent); n > 0 && left <= n && left < plenty {
					t.Fatalf("seed %d: %d of %d were kept back, %d are old", seed, n, prefetch, a.old)
				}
			case 7:
				_ = a.flush(flushOverdue, b.send)
				for _, u := range a.unsent {
					if a.rounds-u.round > maxRounds {
						t.Fatalf("seed %d: %d has waited for %d flushes", seed, u.tag, a.rounds-u.round)
					}
				}
			}
			check()
		}
		_ = a.flush(flushAll, b.send)
		check()
		for tag := range done {
			if !b.taken[tag] {
				t.Fatalf("seed %d: %d was acked, and the broker was not told", seed, tag)
			}
		}
	}
}

// Groups take the oldest first, and a few deliveries are behind another of their key,
// which makes them a few groups late: the run that they hold up is worth waiting for.
func TestAcks_BehindHolesThatCloseSoonGoInRuns(t *testing.T) {
	const prefetch, size, leaders, groups = 1000, 100, 3, 500
	rng := rand.New(rand.NewPCG(1, 1))
	a := acks{prefetch: prefetch}
	b := broker{taken: map[uint64]bool{}}
	var waiting []uint64           // for a group
	var inHand [][]uint64          // a group each
	freeAt := make(map[uint64]int) // of what is behind its key: when it is not
	for now := range groups {
		for int(b.handed)-len(b.taken) < prefetch {
			b.handed++
			a.arrived(b.handed)
			waiting = append(waiting, b.handed)
			if rng.IntN(20) == 0 {
				freeAt[b.handed] = math.MaxInt
			}
		}
		for len(inHand) < leaders {
			var group []uint64
			waiting = slices.DeleteFunc(waiting, func(tag uint64) bool {
				if len(group) == size {
					return false
				}
				if free, behind := freeAt[tag]; behind && free > now {
					freeAt[tag] = min(free, now+1+rng.IntN(5))
					return false
				}
				group = append(group, tag)
				return true
			})
			inHand = append(inHand, group)
		}
		i := now % 2
		for _, tag := range inHand[i] {
			a.ack(tag)
		}
		inHand = slices.Delete(inHand, i, i+1)
		if a.ripe() {
			_ = a.flush(flushRipe, b.send)
		}
		if now%2 == 1 {
			_ = a.flush(flushOverdue, b.send)
		}
	}
	if b.problem != nil {
		t.Fatal(b.problem)
	}
	if most := groups * size / 10; b.frames > most {
		t.Fatalf("%d frames for %d deliveries, wanted at most %d", b.frames, groups*size, most)
	}
}

// Behind one hole only those go for which the broker may send what keeps handlers busy,
// and not more of them while it has not answered.
func TestAcks_BehindAHoleLeavePlenty(t *testing.T) {
	const prefetch, done = 1000, 800
	a := acks{prefetch: prefetch}
	b := broker{taken: map[uint64]bool{}}
	for range prefetch {
		b.handed++
		a.arrived(b.handed)
	}
	for tag := uint64(2); tag < 2+done; tag++ {
		a.ack(tag)
	}
	for range 3 {
		_ = a.flush(flushRipe, b.send)
		if wanted := done - (prefetch - plenty); b.frames != wanted {
			t.Fatalf("%d frames, wanted %d", b.frames, wanted)
		}
	}
	a.ack(1)
	_ = a.flush(flushRipe, b.send)
	if len(b.taken) != done+1 {
		t.Fatalf("the broker was told of %d of %d", len(b.taken), done+1)
	}
}

// Handlers that take times of their own settle in any order, and no run forms: what is
// kept back would only make them fewer.
func TestAcks_InAnyOrderDoNotWaitForRuns(t *testing.T) {
	const prefetch = 1000
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		a := acks{prefetch: prefetch}
		b := broker{taken: map[uint64]bool{}}
		for range prefetch {
			b.handed++
			a.arrived(b.handed)
		}
		for _, i := range rng.Perm(prefetch)[:prefetch/2+50] { // a few are a run
			a.ack(uint64(i) + 1)
		}
		_ = a.flush(flushRipe, b.send)
		if len(a.unsent) > 0 {
			t.Fatalf("seed %d: %d would wait", seed, len(a.unsent))
		}
	}
}

// One straggler does not make every message behind it cost a frame, unless they are
// all that the prefetch allows.
func TestAcks_WaitForTheFirstUnsettled(t *testing.T) {
	const prefetch = 400
	a := acks{prefetch: prefetch}
	b := broker{taken: map[uint64]bool{}}
	deliver := func(n int) {
		for range n {
			b.handed++
			a.arrived(b.handed)
		}
	}
	deliver(prefetch)
	for tag := uint64(2); tag <= 100; tag++ { // 1 takes its time
		a.ack(tag)
	}
	_ = a.flush(flushRipe, b.send)
	_ = a.flush(flushOverdue, b.send)
	if b.frames != 0 {
		t.Fatalf("%d frames before the straggler", b.frames)
	}
	a.ack(1)
	_ = a.flush(flushRipe, b.send)
	if b.frames != 1 || len(b.taken) != 100 {
		t.Fatalf("%d frames for %d deliveries, wanted one for 100", b.frames, len(b.taken))
	}
	deliver(100)
	for tag := uint64(102); tag <= 301; tag++ {
		a.ack(tag)
	}
	if !a.ripe() {
		t.Fatal("half of the window is handled, and would wait")
	}
	_ = a.flush(flushRipe, b.send)
	if b.frames != 1+200 {
		t.Fatalf("%d frames, wanted one for each of 200 behind a straggler", b.frames-1)
	}
}

// With few in flight nothing waits: the next delivery may depend on it.
func TestAcks_OfFewWaitForNothing(t *testing.T) {
	a := acks{prefetch: 1000}
	b := broker{handed: 3, taken: map[uint64]bool{}}
	for tag := range b.handed {
		a.arrived(tag + 1)
	}
	a.ack(2)
	a.ack(3)
	if !a.ripe() {
		t.Fatal("two of three would wait")
	}
	_ = a.flush(flushRipe, b.send)
	if b.taken[1] || len(b.taken) != 2 {
		t.Fatalf("the broker was told of %v", b.taken)
	}
}

// Where most of the window stays unsettled, the rest of it does not wait for that.
func TestAcks_OfAHeldWindowDoNotWait(t *testing.T) {
	const prefetch, held = 200, 150
	a := acks{prefetch: prefetch}
	b := broker{taken: map[uint64]bool{}}
	deliver := func() {
		b.handed++
		a.arrived(b.handed)
	}
	for range prefetch {
		deliver()
	}
	for range 2*ticksToAge + 1 {
		_ = a.flush(flushOverdue, b.send)
	}
	if a.old != prefetch {
		t.Fatalf("%d of %d are old", a.old, prefetch)
	}
	for tag := uint64(held + 1); tag <= 10*prefetch; tag++ {
		a.ack(tag)
		if !a.ripe() {
			t.Fatalf("the acknowledgement of %d would wait", tag)
		}
		_ = a.flush(flushRipe, b.send)
		deliver()
	}
	if b.problem != nil || a.old != held {
		t.Fatalf("%d are old, wanted %d; %v", a.old, held, b.problem)
	}
}
