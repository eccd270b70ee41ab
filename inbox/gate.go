package inbox

import (
	"context"
	"sync"
	"time"
)

// gate keeps messages waiting during an outage. While it is closed, one message at a time
// goes through to find out whether the outage is over: a probe. A probe's handler may take long,
// or not return, so after the longest time between probes another message is let through beside it.
//
// One message that finds something unavailable proves little: only it, or its tenant, may
// be affected. So the gate closes when several different keys report it, and for a moment
// no message is handled. An outage of the database is detected by a ping, so one message
// is enough.
type gate struct {
	mu       sync.Mutex
	closed   bool
	until    time.Time // the next probe is not before
	failures int
	probes   int                 // let through so far; the number of the latest
	probing  bool                // the latest has not reported
	probed   time.Time           // when it was let through
	changed  chan struct{}       // closed, and replaced, on every change
	agree    map[string]struct{} // some keys that found something missing since a message was last handled
	since    time.Time           // the first of them
	works    bool                // a message was handled since the last report of missing
	outage   bool                // closed because the database is unavailable
	jitter   func(time.Duration) time.Duration
}

const (
	firstProbe = 100 * time.Millisecond

	// lastProbe is the longest average time between probes. For the database it is shorter: a
	// probe of it is a BEGIN, and executes no handler.
	lastProbe         = 5 * time.Second
	lastDatabaseProbe = time.Second

	// agreement is how many different keys must find something unavailable, over
	// agreementTime.
	agreement     = 3
	agreementTime = 500 * time.Millisecond
)

// report is what a message has found out about the handler's dependencies.
type report int

const (
	reportNothing   report = iota
	reportWorking          // everything is available
	reportAnswering        // the handler failed for another reason
	reportMissing          // the handler reported something unavailable
	reportDown             // the database is unavailable
)

func newGate(jitter func(time.Duration) time.Duration) *gate {
	return &gate{changed: make(chan struct{}), agree: make(map[string]struct{}), jitter: jitter}
}

// enter waits until a message may be handled. probe is 0, or the number of a probe, whose
// result decides; pass it to leave.
func (g *gate) enter(ctx context.Context) (probe int, err error) {
	for {
		g.mu.Lock()
		if !g.closed {
			g.mu.Unlock()
			return 0, nil
		}
		wait := time.Until(g.until)
		if g.probing {
			wait = time.Until(g.probed.Add(g.longest())) // a change wakes it
		}
		if wait <= 0 {
			g.probes++
			g.probing, g.probed = true, time.Now()
			probe := g.probes
			g.mu.Unlock()
			return probe, nil
		}
		changed := g.changed
		g.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return 0, ctx.Err()
		}
		timer.Stop()
	}
}

// leave reports the result of a message that was let through. turned means that an outage
// begins or ends. alone means that only this message found something unavailable: others have
// been handled since the last such report. A probe behind which another one was let through
// can open the gate. It closes it no more easily than other messages: what it has found may be
// long ago.
func (g *gate) leave(probe int, seen report, key string) (turned, alone bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	latest := g.probing && probe == g.probes
	if latest {
		g.probing = false
	}
	shut, decides := seen == reportDown, latest
	switch seen {
	case reportWorking:
		g.works = true
		clear(g.agree)
		// A message that was let through before the outage, and takes longer than those that
		// found something unavailable, proves as much as a probe: what it needs is available.
		decides = probe != 0 || g.closed && !g.outage
	case reportAnswering:
		decides = probe != 0
	case reportMissing:
		alone = g.works
		g.works = false
		if len(g.agree) == 0 {
			g.since = time.Now()
		}
		if len(g.agree) < agreement {
			g.agree[key] = struct{}{}
		}
		shut = latest || len(g.agree) >= agreement && time.Since(g.since) >= agreementTime
	case reportNothing:
		if latest {
			g.wake() // the next one probes
		}
		return false, false
	}
	if !decides && (g.closed || !shut) {
		return false, alone
	}
	turned = g.closed != shut
	g.closed, g.outage = shut, seen == reportDown
	if shut {
		g.failures++
		g.until = time.Now().Add(g.jitter(double(firstProbe, g.failures-1, g.longest())))
		clear(g.agree) // it holds at most the keys that close the gate
	} else {
		g.failures, g.probing = 0, false
	}
	g.wake()
	return turned, alone
}

// shut reports whether messages wait.
func (g *gate) shut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed
}

// longest is the longest average time between probes. Called with mu held.
func (g *gate) longest() time.Duration {
	if g.outage {
		return lastDatabaseProbe
	}
	return lastProbe
}

// wake wakes all waiting messages. Called with mu held.
func (g *gate) wake() {
	close(g.changed)
	g.changed = make(chan struct{})
}
