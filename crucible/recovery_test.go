package main

import (
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
)

// A server that takes two writes between others that fail is away until it takes them for long.
func TestJoined_OutagesLastUntilWritesAreTakenForLong(t *testing.T) {
	away := func(from, to float64) check.Fault {
		at := func(seconds float64) time.Time {
			return time.Unix(0, 0).Add(time.Duration(seconds * float64(time.Second)))
		}
		return check.Fault{Window: check.Window{From: at(from), To: at(to)}}
	}
	got := joined([]check.Fault{away(1, 5), away(6.9, 9), away(12, 13), away(2, 4)})
	if want := []check.Fault{away(1, 9), away(12, 13)}; !slices.Equal(got, want) {
		t.Errorf("%v instead of %v", got, want)
	}
}
