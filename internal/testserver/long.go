package testserver

import (
	"hash/fnv"
	"os"
	"testing"
)

// Long reports whether tests may take long: make test-long sets ONCEMILL_LONG=1. Otherwise a
// test runs fewer rounds or cells, so that make test takes minutes.
func Long() bool { return os.Getenv("ONCEMILL_LONG") != "" }

// NeedsLong skips a test that takes too much for make test. .ci/skips-short names it, and what else
// shows a part of it.
func NeedsLong(t testing.TB) {
	t.Helper()
	if !Long() {
		t.Skip("in make test-long (ONCEMILL_LONG=1)")
	}
}

// Rounds returns the number of rounds for make test, or for a long run.
func Rounds[N any](short, long N) N {
	if Long() {
		return long
	}
	return short
}

// OneOf returns the cells of a matrix that a test runs in: all in a long run, otherwise one.
// The cell depends on the test's name, so that the tests cover all cells.
// ONCEMILL_TEST_FIRST_CELL selects the first cell.
func OneOf(t testing.TB, cells ...string) []string {
	t.Helper()
	if Long() {
		return cells
	}
	n := 0
	if os.Getenv("ONCEMILL_TEST_FIRST_CELL") == "" {
		hash := fnv.New32a()
		_, _ = hash.Write([]byte(t.Name()))
		n = int(hash.Sum32() % uint32(len(cells))) //nolint:gosec // a handful
	}
	return cells[n : n+1]
}
