package main

import (
	"errors"
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
	first := reign{asked: second(1), timeline: 1}
	for _, c := range []struct {
		name   string
		reigns []reign
		faults []check.Fault
		want   []check.Window
		err    error
	}{
		{
			"a standby that lagged",
			[]reign{first, {asked: second(60), inherited: second(26), timeline: 2}},
			[]check.Fault{killed("primary-killed", 40, 55)},
			[]check.Window{window(25, 44)},
			nil,
		},
		{
			"a primary that was asked during the fault",
			[]reign{first, {asked: second(50), timeline: 1}, {asked: second(60), inherited: second(26), timeline: 2}},
			[]check.Fault{killed("primary-killed", 40, 55)},
			[]check.Window{window(25, 44)},
			nil,
		},
		{
			"the same primary again",
			[]reign{{asked: second(1), inherited: second(1), timeline: 2}, {asked: second(60), inherited: second(1), timeline: 2}},
			[]check.Fault{killed("primary-killed", 40, 55)},
			nil, nil,
		},
		{
			"the same node promoted again",
			[]reign{{asked: second(1), inherited: second(1), timeline: 2}, {asked: second(60), timeline: 3}},
			[]check.Fault{killed("primary-killed", 40, 55)},
			nil, nil,
		},
		{
			"a primary that goes on",
			[]reign{first, {asked: second(60), inherited: second(39), timeline: 2}},
			[]check.Fault{killed(primaryFrozen, 40, 55)},
			[]check.Window{window(38, 44), window(54, 60)},
			nil,
		},
		{
			"a switchover",
			[]reign{first, {asked: second(60), inherited: second(39), timeline: 2}},
			[]check.Fault{killed("switchover", 40, 55)},
			nil, nil,
		},
		{
			"two in turn",
			[]reign{first, {asked: second(60), inherited: second(26), timeline: 2}, {asked: second(99), inherited: second(69), timeline: 3}},
			[]check.Fault{killed("primary-killed", 40, 55), killed("primary-killed", 70, 90)},
			[]check.Window{window(25, 44), window(68, 74)},
			nil,
		},
		{
			"two promotions at once",
			[]reign{first, {asked: second(60), inherited: second(50), timeline: 3}},
			[]check.Fault{killed("primary-killed", 40, 55)},
			nil, errPromotions,
		},
		{"nodes that are not well", []reign{first}, []check.Fault{killed("primary-killed", 40, 55)}, nil, errNoReign},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got, err := (&replicated{reigns: c.reigns}).lossy(c.faults); !slices.Equal(got, c.want) || !errors.Is(err, c.err) {
				t.Errorf("%v, %v instead of %v, %v", got, err, c.want, c.err)
			}
			if got, err := (&replicated{reigns: c.reigns, synchronous: true}).lossy(c.faults); got != nil || err != nil {
				t.Errorf("with a synchronous standby: %v, %v", got, err)
			}
		})
	}
}
