package relay

import (
	"testing"
	"time"
)

// A call that has an answer at once, or none, at a time of its own.
func TestHealth_TellsASilenceFromALostConnection(t *testing.T) {
	t.Parallel()
	type call struct {
		begin, lasts float64 // seconds
		answered     bool
	}
	for name, c := range map[string]struct {
		calls []call
		at    float64
		unfit bool
	}{
		"nothing was asked":                       {nil, 100, false},
		"a call waits":                            {[]call{{0, 10, false}}, 7, false},
		"a call hangs":                            {[]call{{0, 10, false}}, 8, true},
		"answers":                                 {[]call{{0, 1, true}, {1, 1, true}, {9, 1, true}}, 20, false},
		"one connection led nowhere":              {[]call{{0, 6, false}, {6, 0.1, true}}, 8, false},
		"the same, and a call runs":               {[]call{{0, 6, false}, {6, 0.1, true}, {8, 1, true}}, 8.1, false},
		"some calls hang among others":            {[]call{{0, 6, false}, {6, 0.1, true}, {6.1, 2, false}, {8.1, 0.1, true}}, 9, true},
		"the second one hangs still":              {[]call{{0, 6, false}, {6, 0.1, true}, {6.2, 10, false}}, 8, true},
		"calls without an answer are long past":   {[]call{{0, 6, false}, {6, 0.1, true}, {6.1, 2, false}, {8.1, 0.1, true}, {16, 0.1, true}}, 17, false},
		"one hangs after others were answered":    {[]call{{0, 1, true}, {20, 10, false}}, 27, false},
		"one hangs for long after others had one": {[]call{{0, 1, true}, {20, 10, false}}, 28, true},
	} {
		start := time.Unix(1000, 0)
		at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
		h := health{full: 5 * time.Second, patient: 7500 * time.Millisecond}
		for _, one := range c.calls {
			h.begin(opTask, at(one.begin))
			if one.begin+one.lasts <= c.at {
				h.end(opTask, at(one.begin+one.lasts), one.answered)
			}
		}
		if _, why := h.unfit(at(c.at)); (why != nil) != c.unfit {
			t.Errorf("%s: unfit: %v, want %t", name, why, c.unfit)
		}
	}
}

// After a call without an answer the next ones are short, until all have had one for
// a while.
func TestHealth_AsksBrieflyAfterASilence(t *testing.T) {
	t.Parallel()
	h := health{full: 5 * time.Second, patient: 7500 * time.Millisecond}
	now := time.Unix(1000, 0)
	for i, c := range []struct {
		answered bool
		limit    time.Duration
	}{{false, 5 * time.Second}, {false, time.Second}, {false, 2 * time.Second}, {true, 4 * time.Second}, {true, 4 * time.Second}, {true, 5 * time.Second}} {
		if got := h.begin(opRead, now); got != c.limit {
			t.Errorf("call %d may take %v, want %v", i, got, c.limit)
		}
		now = now.Add(4 * time.Second)
		h.end(opRead, now, c.answered)
	}
}

// Probes have had their answers while a call runs that has none.
func TestHealth_ForgetsASilenceWhileACallRuns(t *testing.T) {
	t.Parallel()
	h := health{full: 5 * time.Second, patient: 7500 * time.Millisecond}
	now := time.Unix(1000, 0)
	h.begin(opRead, now)
	now = now.Add(20 * time.Second)
	h.recovered(now)
	if _, why := h.unfit(now); why != nil {
		t.Error(why)
	}
	now = now.Add(time.Second)
	h.end(opRead, now, false)
	if _, why := h.unfit(now); why != nil {
		t.Error(why)
	}
	h.begin(opRead, now)
	if _, why := h.unfit(now.Add(8 * time.Second)); why == nil {
		t.Error("fit, after a silence of 9 s since then")
	}
}
