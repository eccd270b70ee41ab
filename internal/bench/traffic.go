package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
)

const (
	payloadSize = 512
	keyCount    = 10_000
	topic       = "bench.orders"
	uuidPrefix  = "00000000-0000-4000-8000-"
)

// traffic is the stream of messages that every side relays: the i-th message is
// the same for all of them and across runs, and is computed when it is asked
// for, so that no side is helped or hindered by a large heap.
type traffic struct {
	noise []byte // payloads are windows of it
	keys  uint64 // how many there are
}

// newTraffic has so many keys.
func newTraffic(keys int) *traffic {
	random := rand.NewChaCha8([32]byte{1})
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(random.Uint64())
	}
	return &traffic{noise: noise, keys: uint64(keys)}
}

// id of message i, in the form of a UUID.
func (t *traffic) id(i int) string {
	digits := strconv.Itoa(i)
	const room = 12
	return uuidPrefix + "000000000000"[:room-len(digits)] + digits
}

// index is the inverse of id.
func (t *traffic) index(id string) (int, error) {
	digits, ok := strings.CutPrefix(id, uuidPrefix)
	if !ok {
		return 0, fmt.Errorf("message id %q is none of ours", id)
	}
	return strconv.Atoi(digits)
}

// keyNumber spreads messages over the keys at random, so that messages of
// one key come close together as well as far apart.
func (t *traffic) keyNumber(i int) int {
	return int(mix(uint64(i)) % t.keys)
}

func (t *traffic) key(i int) string {
	return fmt.Sprintf("customer-%05d", t.keyNumber(i))
}

// payload of message i. The caller must not change it.
func (t *traffic) payload(i int) []byte {
	at := mix(uint64(i)^0x9e3779b97f4a7c15) % uint64(len(t.noise)-payloadSize)
	return t.noise[at : at+payloadSize]
}

// mix is the finalizer of splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// ledger checks what arrived against what was sent: each message once, its
// payload intact, and per key in the order of sending. It is not safe for
// concurrent use.
type ledger struct {
	traffic   *traffic
	seen      []bool
	last      []int // per key, index of the latest arrival + 1
	arrived   int
	problems  []error
	unordered int
}

func newLedger(t *traffic, n int) *ledger {
	return &ledger{traffic: t, seen: make([]bool, n), last: make([]int, keyCount)}
}

func (l *ledger) arrive(id string, payload []byte) {
	i, err := l.traffic.index(id)
	switch {
	case err != nil:
		l.problem(err)
		return
	case i < 0 || i >= len(l.seen):
		l.problem(fmt.Errorf("message %d was not sent", i))
		return
	case l.seen[i]:
		l.problem(fmt.Errorf("message %d arrived twice", i))
		return
	case !bytes.Equal(payload, l.traffic.payload(i)):
		l.problem(fmt.Errorf("message %d arrived with another payload", i))
	}
	l.seen[i] = true
	l.arrived++
	key := l.traffic.keyNumber(i)
	if i < l.last[key] {
		l.unordered++
	}
	l.last[key] = i + 1
}

func (l *ledger) problem(err error) {
	const enough = 5
	if len(l.problems) < enough {
		l.problems = append(l.problems, err)
	}
}

// check returns nil if everything arrived once and intact and, when ordered is
// set, in order per key.
func (l *ledger) check(ordered bool) error {
	if missing := len(l.seen) - l.arrived; missing > 0 {
		l.problem(fmt.Errorf("%d of %d messages are missing", missing, len(l.seen)))
	}
	if ordered && l.unordered > 0 {
		l.problem(fmt.Errorf("%d messages overtook an earlier one of their key", l.unordered))
	}
	return errors.Join(l.problems...)
}
