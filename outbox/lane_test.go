package outbox_test

import (
	"hash/fnv"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/outbox"
)

// The lanes are part of the stored format: programs in other languages compute
// them too, and rows outlive the version that wrote them. A change here strands
// rows of a key in two lanes and breaks its order.
var goldenLanes = []struct {
	key, id string
	lane    int
}{
	// The key alone decides, if there is one.
	{"a", "", 12},
	{"a", "anything", 12},
	{"b", "anything", 5},
	{"A", "x", 12},
	{"0", "x", 15},
	{" ", "x", 31},
	{"order-1", "x", 13},
	{"customer:42", "x", 31},
	{"Zoë", "x", 28},
	{"日本語", "x", 7},
	{"🚀", "x", 26},
	{"k\u0308", "x", 14},
	{strings.Repeat("a", 255), "x", 6},
	// Without one it is the id, hashed in the same way.
	{"", "a", 12},
	{"", "9d1f2c7e-5c1e-4a5b-9b8e-0d7c0f5f9a11", 9},
	{"", "日本語", 7},
	{"", "", 5},
}

func TestLane_FormatIsFixed(t *testing.T) {
	t.Parallel()
	for _, g := range goldenLanes {
		if got := outbox.Lane(g.key, g.id); got != g.lane {
			t.Errorf("Lane(%q, %q) = %d, want %d", g.key, g.id, got, g.lane)
		}
	}
	if outbox.Lanes != 32 {
		t.Errorf("there are %d lanes, want 32", outbox.Lanes)
	}
}

func TestLane_IsFNV1a64Modulo32(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	seen := map[int]bool{}
	for range 2000 {
		key := make([]byte, 1+random.IntN(40))
		for i := range key {
			key[i] = byte(random.UintN(256))
		}
		h := fnv.New64a()
		h.Write(key)
		want := int(h.Sum64() % 32)
		if got := outbox.Lane(string(key), "id"); got != want {
			t.Fatalf("Lane(%q) = %d, want %d", key, got, want)
		}
		seen[want] = true
	}
	if len(seen) != 32 {
		t.Errorf("only %d lanes are used", len(seen))
	}
}

func TestPublish_StoresTheLane(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		for _, g := range goldenLanes {
			if g.id == "" {
				continue
			}
			msg := newMessage(g.id, g.key)
			p.publish(t, msg)
			rows := p.read(t)
			if len(rows) != 1 || rows[0].Lane != g.lane || rows[0].Key != g.key {
				t.Fatalf("key %q, id %q: got %+v, want lane %d", g.key, g.id, rows, g.lane)
			}
			p.remove(t, rows[0].Ref)
		}
	})
}

func TestTable_RefusesALaneOutsideOfTheRange(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		const insert = `insert into {{outbox}} (lane, topic, message_id, payload) values ($1, 'orders', 'a', $2)`
		for _, lane := range []int{-1, 32, 1000} {
			if _, err := p.db.ExecContext(t.Context(), p.expand(t, insert), lane, []byte{}); err == nil {
				t.Errorf("lane %d was stored", lane)
			}
		}
		for _, lane := range []int{0, 31} {
			p.exec(t, insert, lane, []byte{})
		}
		if n := len(p.read(t)); n != 2 {
			t.Errorf("%d rows can be read, want 2", n)
		}
	})
}
