package rabbitmq

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
)

// broker is what a channel knows of its deliveries.
type broker struct {
	handed  uint64
	taken   map[uint64]bool // acknowledged or rejected
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
		first = 1
	}
	for t := first; t <= tag; t++ {
		b.taken[t] = true
	}
	return nil
}

// Whatever the order, what is acked is sent, once, and nothing else.
func TestAcks_TellTheBrokerWhatWasAcked(t *testing.T) {
	for seed := range uint64(2000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var a acks
		b := broker{taken: map[uint64]bool{}}
		open, done := []uint64{}, map[uint64]bool{}
		check := func() {
			t.Helper()
			for tag := range b.taken {
				if !done[tag] {
					t.Fatalf("seed %d: %d was acknowledged while it is being handled", seed, tag)
				}
			}
			if unsent := int(b.handed) - len(b.taken); a.open != unsent || b.problem != nil {
				t.Fatalf("seed %d: counts %d open, the broker %d; %v", seed, a.open, unsent, b.problem)
			}
		}
		for range 300 {
			switch rng.IntN(8) {
			case 0, 1, 2:
				b.handed++
				a.arrived(b.handed)
				open = append(open, b.handed)
			case 3, 4, 5:
				if len(open) == 0 {
					continue
				}
				i := rng.IntN(min(len(open), 20))
				tag := open[i]
				open = slices.Delete(open, i, i+1)
				done[tag] = true
				if rng.IntN(10) == 0 {
					a.rejected(tag)
					b.taken[tag] = true
				} else {
					a.ack(tag)
				}
			case 6:
				_ = a.flush(whenRipe, b.send)
				if a.ripe() {
					t.Fatalf("seed %d: what is ripe was kept back", seed)
				}
			case 7:
				waited := slices.Clone(a.fresh[:a.waited])
				_ = a.flush(overdue, b.send)
				for _, tag := range waited {
					if !b.taken[tag] {
						t.Fatalf("seed %d: %d has waited twice", seed, tag)
					}
				}
			}
			check()
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
		_ = a.flush(closing, b.send)
		check()
		for tag := range done {
			if !b.taken[tag] {
				t.Fatalf("seed %d: %d was acked, and the broker was not told", seed, tag)
			}
		}
	}
}

// One straggler does not make every message behind it cost a frame, unless they are
// all that the prefetch allows.
func TestAcks_WaitForTheFirstUnsettled(t *testing.T) {
	const prefetch = 400
	var a acks
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
	_ = a.flush(whenRipe, b.send)
	_ = a.flush(overdue, b.send)
	if b.frames != 0 {
		t.Fatalf("%d frames before the straggler", b.frames)
	}
	a.ack(1)
	_ = a.flush(whenRipe, b.send)
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
	_ = a.flush(whenRipe, b.send)
	if b.frames != 1+200 {
		t.Fatalf("%d frames, wanted one for each of 200 behind a straggler", b.frames-1)
	}
}

// With few in flight nothing waits: the next delivery may depend on it.
func TestAcks_OfFewWaitForNothing(t *testing.T) {
	var a acks
	b := broker{handed: 3, taken: map[uint64]bool{}}
	for tag := range b.handed {
		a.arrived(tag + 1)
	}
	a.ack(2)
	if !a.ripe() {
		t.Fatal("one of three would wait")
	}
	_ = a.flush(whenRipe, b.send)
	if !b.taken[2] || len(b.taken) != 1 {
		t.Fatalf("the broker was told of %v", b.taken)
	}
}

// Where most of the window stays unsettled, the rest of it does not wait for that.
func TestAcks_OfAHeldWindowDoNotWait(t *testing.T) {
	const prefetch, held = 200, 150
	var a acks
	b := broker{taken: map[uint64]bool{}}
	deliver := func() {
		b.handed++
		a.arrived(b.handed)
	}
	for range prefetch {
		deliver()
	}
	for range 2*ticksToAge + 1 {
		_ = a.flush(overdue, b.send)
	}
	if a.old != prefetch {
		t.Fatalf("%d of %d are old", a.old, prefetch)
	}
	for tag := uint64(held + 1); tag <= 10*prefetch; tag++ {
		a.ack(tag)
		if !a.ripe() {
			t.Fatalf("the acknowledgement of %d would wait", tag)
		}
		_ = a.flush(whenRipe, b.send)
		deliver()
	}
	if b.problem != nil || a.old != held {
		t.Fatalf("%d are old, wanted %d; %v", a.old, held, b.problem)
	}
}
