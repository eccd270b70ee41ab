package main

import (
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
)

// What a standby had not received when it took over may be lost, and nothing else.
func TestLossy_BeginsWithWhatTheNextPrimaryHadReceived(t *testing.T) {
	second := func(n int) time.Time { return time.Unix(0, 0).Add(time.Duration(n) * time.Second) }
	killed := func(kind string, from, to int) check.Fault {
		return check.Fault{Kind: kind, Window: check.Window{From: second(from), To: second(to)}, Injected: second(from + 3)}
	}
	window := func(from, to int) check.Window { return check.Window{From: second(from), To: second(to)} }
	for _, c := range []struct {
		name      string
		primaries []primary
		faults    []check.Fault
		want      []check.Window
	}{
		{
			"a standby that lagged", []primary{{asked: second(1)}, {asked: second(60), inherited: second(26)}},
			[]check.Fault{killed("primary-killed", 40, 55)}, []check.Window{window(25, 44)},
		},
		{
			"the same primary again", []primary{{asked: second(1), inherited: second(1)}, {asked: second(60), inherited: second(1)}},
			[]check.Fault{killed("primary-killed", 40, 55)}, nil,
		},
		{
			"a primary that goes on", []primary{{asked: second(1)}, {asked: second(60), inherited: second(39)}},
			[]check.Fault{killed(primaryFrozen, 40, 55)}, []check.Window{window(38, 44), window(54, 60)},
		},
		{
			"a switchover", []primary{{asked: second(1)}, {asked: second(60), inherited: second(39)}},
			[]check.Fault{killed("switchover", 40, 55)}, nil,
		},
		{
			"two in turn", []primary{{asked: second(1)}, {asked: second(60), inherited: second(26)}, {asked: second(99), inherited: second(69)}},
			[]check.Fault{killed("primary-killed", 40, 55), killed("primary-killed", 70, 90)}, []check.Window{window(25, 44), window(68, 74)},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := (&replicated{primaries: c.primaries}).lossy(c.faults); !slices.Equal(got, c.want) {
				t.Errorf("%v instead of %v", got, c.want)
			}
			if got := (&replicated{primaries: c.primaries, synchronous: true}).lossy(c.faults); got != nil {
				t.Errorf("with a synchronous standby: %v", got)
			}
		})
	}
}
