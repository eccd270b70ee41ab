package relay

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/crashpoint"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// The crash points are before and after calls that there are.
func TestOperation_TheCrashPointsNameIt(t *testing.T) {
	t.Parallel()
	var names []string
	for o := range operations {
		names = append(names, o.String())
	}
	for _, call := range crashpoint.Calls {
		if !slices.Contains(names, call) {
			t.Errorf("no call is named %q, but %q", call, names)
		}
	}
}

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
		h := health{full: 5 * time.Second, maxSilence: 7500 * time.Millisecond}
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
	h := health{full: 5 * time.Second, maxSilence: 7500 * time.Millisecond}
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

// Probes have had their answers, but a call of the worker's own hangs, or did a moment
// ago. A call of the upkeep says nothing of the rest.
func TestHealth_ForgetsASilenceOnceItsOwnCallsAreAnswered(t *testing.T) {
	t.Parallel()
	h := health{full: 5 * time.Second, maxSilence: 7500 * time.Millisecond}
	now := time.Unix(1000, 0)
	expect := func(what string, recovers bool) {
		t.Helper()
		if got := h.recover(now); got != recovers {
			t.Errorf("%s: recovers: %t", what, got)
		}
		if _, why := h.unfit(now); (why == nil) != recovers {
			t.Errorf("%s: unfit: %v", what, why)
		}
	}
	h.begin(opUpkeep, now)
	h.begin(opRead, now)
	now = now.Add(20 * time.Second)
	expect("a call hangs", false)
	h.end(opRead, now, false)
	expect("it had no answer just now", false)
	now = now.Add(4 * time.Second)
	expect("it had none a moment ago", false)
	now = now.Add(time.Second)
	expect("it had none a while ago", true)
	h.begin(opRead, now)
	now = now.Add(h.short())
	if !h.recover(now) {
		t.Error("a call that has just begun is none that hangs")
	}
	now = now.Add(8 * time.Second)
	expect("it hangs now", false)
}

// While the whole database is away, heartbeats have no answers either. When they have, the worker is
// as fit as the others, which have been through the same.
func TestHealth_ForgetsASilenceThatHeartbeatsShared(t *testing.T) {
	t.Parallel()
	type call struct {
		of           operation
		begin, lasts float64 // seconds
		answered     bool
	}
	outage := func(from, to float64) (calls []call) {
		for at := from; at < to; at++ {
			calls = append(calls, call{opHeartbeat, at, 0.9, false}, call{opRead, at, 0.95, false})
		}
		return append(calls, call{opHeartbeat, to, 0.1, true})
	}
	for name, c := range map[string]struct {
		calls []call
		at    float64
		unfit bool
	}{
		"the outage goes on":               {outage(0, 9)[:18], 9, false},
		"it goes on when the lease ends":   {outage(0, 17)[:34], 17, true},
		"it is over":                       {outage(0, 9), 9.2, false},
		"reads are silent still":           {append(outage(0, 9), call{opRead, 9.2, 5, false}, call{opRead, 14.2, 4, false}), 18, true},
		"reads were silent long before":    {append([]call{{opRead, -6, 5, false}}, outage(0, 9)...), 9.2, true},
		"a read hangs since the outage":    {append(outage(0, 9)[:17], call{opHeartbeat, 9, 0.1, true}, call{opRead, 8, 8, false}), 16, false},
		"the same, for too long":           {append(outage(0, 9)[:17], call{opHeartbeat, 9, 0.1, true}, call{opRead, 8, 9.5, false}), 17.6, true},
		"the leases ended":                 {outage(0, 16), 16.2, true},
		"another outage behind it":         {append(outage(0, 4), outage(4.5, 13)...), 13.7, true},
		"another outage, reads in between": {append(append(outage(0, 4), call{opRead, 4.2, 0.1, true}, call{opHeartbeat, 12.5, 0.1, true}), outage(13, 22)...), 22.2, false},
		"another outage at once":           {append(append(outage(0, 2), call{opRead, 2.2, 0.1, true}), outage(4, 13)...), 13.2, false},
		"another one, and a read hung over": {append(append(outage(0, 6)[:11], call{opHeartbeat, 6, 0.1, true}, call{opRead, 5, 2.5, false},
			call{opRead, 7.6, 0.1, true}), outage(10, 19)...), 19.2, false},
	} {
		start := time.Unix(1000, 0)
		at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
		h := newHealth(15 * time.Second)
		type event struct {
			at float64
			do func()
		}
		var events []event
		for _, one := range c.calls {
			events = append(events, event{one.begin, func() { h.begin(one.of, at(one.begin)) }})
			if one.begin+one.lasts <= c.at {
				events = append(events, event{one.begin + one.lasts, func() { h.end(one.of, at(one.begin+one.lasts), one.answered) }})
			}
		}
		slices.SortStableFunc(events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
		for _, e := range events {
			e.do()
		}
		if _, why := h.unfit(at(c.at)); (why != nil) != c.unfit {
			t.Errorf("%s: unfit: %v, want %t", name, why, c.unfit)
		}
	}
}

// Nor do heartbeats that fail now and then hide that nothing else is answered.
func TestHealth_ForgetsASharedSilenceOnce(t *testing.T) {
	t.Parallel()
	h, start := newHealth(3*time.Second), time.Unix(1000, 0)
	heartbeats := map[int]bool{0: false, 5: true, 24: true, 25: false, 30: true} // answered or not, by tenths of a second
	for tenth := range 32 {
		now := start.Add(time.Duration(tenth) * 100 * time.Millisecond)
		if answered, due := heartbeats[tenth]; due {
			h.begin(opHeartbeat, now)
			h.end(opHeartbeat, now.Add(50*time.Millisecond), answered)
		}
		h.begin(opRead, now)
		h.end(opRead, now.Add(99*time.Millisecond), false)
		if _, why := h.unfit(now.Add(100 * time.Millisecond)); (why != nil) != (tenth >= 25) {
			t.Fatalf("after %d tenths of a second: unfit: %v", tenth, why)
		}
	}
}

// Probes make no heartbeats, so their answers end no silence of those: the leases may have ended.
func TestHealth_ProbesEndNoSilenceOfHeartbeats(t *testing.T) {
	t.Parallel()
	h, start := newHealth(15*time.Second), time.Unix(1000, 0)
	calls := func(at time.Time) {
		for _, o := range []operation{opHeartbeat, opRead} {
			h.begin(o, at)
			h.end(o, at.Add(time.Second), false)
		}
	}
	for second := range 17 {
		calls(start.Add(time.Duration(second) * time.Second))
	}
	now := start.Add(25 * time.Second)
	if _, why := h.unfit(now); why == nil {
		t.Fatal("fit although the lease has ended")
	}
	if !h.recover(now) {
		t.Fatal("no recovery")
	}
	for range 9 {
		calls(now)
		now = now.Add(time.Second)
	}
	if _, why := h.unfit(now); why == nil {
		t.Error("a silence counts as shared although the lease ended long ago")
	}
}

// A silence may end without a probe that was answered: the worker's own calls have had
// answers for a while. That is told too.
func TestHealth_TellsThatASilenceHasEndedByItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := &bytes.Buffer{}
		w := &worker{
			cfg: Config{Lease: 15 * time.Second}, health: newHealth(15 * time.Second), bounds: bounded.New(maxAbandoned),
			log:   slog.New(slog.NewTextHandler(log, nil)),
			check: func(context.Context) error { return errors.New("no probe has an answer") },
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- w.doctor(ctx) }()
		calls := func(d time.Duration, answered bool) {
			for begin := time.Now(); time.Since(begin) < d; {
				w.health.begin(opRead, time.Now())
				time.Sleep(100 * time.Millisecond)
				w.health.end(opRead, time.Now(), answered)
			}
		}
		expect := func(unfit, fit int) {
			t.Helper()
			synctest.Wait()
			if got := strings.Count(log.String(), "worker is unfit"); got != unfit {
				t.Errorf("it was told %d times that the worker is unfit, want %d", got, unfit)
			}
			if got := strings.Count(log.String(), "worker is fit again"); got != fit {
				t.Errorf("it was told %d times that the worker is fit again, want %d", got, fit)
			}
		}
		calls(20*time.Second, false)
		expect(1, 0)
		calls(20*time.Second, true)
		expect(1, 1)
		calls(20*time.Second, false)
		expect(2, 1)
		cancel()
		<-ended
	})
}

// A probe costs the same however much is owed. A worker whose way to the database is too
// slow for the first message of a lane must not have to read it to be fit again.
func TestHealth_AProbeReadsNoMessage(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	db, seen := testserver.Explained(t, pg.DSN, "log_nested_statements=on") // of the function that reads
	if err := oncemill.Migrate(t.Context(), db, pg.Config, outbox.Migrations, audit.Migrations, dlq.Migrations, Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		`insert into {{outbox}} (lane, id, topic, message_id, payload)
		select i % 32, i::bigint * (1 << 18) / 1000, 't', 'm' || i, ''
		from generate_series(1, 1000) i`, // in all partitions
		`select setval('{{outbox_id}}', 1 << 18)`,
		`insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, next_at)
		select i % 32, i, 't' || i % 2, 'm' || i, case when i % 3 > 0 then 'k' || i else '' end, '', '', now(), now() + i % 2 * interval '1 hour'
		from generate_series(1, 3000) i`,
		`insert into {{dead_letters}} (state, held, source, lane, row_id, topic, message_id, key, payload, created_at, reason, error, fingerprint)
		select case when i % 10 = 0 then 'replaying' else 'dead' end, false, 'relay', i % 32, i, 't', 'm' || i, 'k', '', now(), 'refused', '', 'f'
		from generate_series(1, 1000) i`,
		`analyze {{outbox}}`, `analyze {{parked}}`, `analyze {{dead_letters}}`,
	} {
		if _, err := db.ExecContext(t.Context(), database.Of(box.Config().Database).Expand(text)); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	store := storeOf(box)
	w := &worker{
		owner: "me", cfg: Config{Lease: 15 * time.Second}, health: newHealth(15 * time.Second), bounds: bounded.New(maxAbandoned),
		log: slog.New(slog.DiscardHandler), queue: outboxqueue.Of(box), store: store, leases: store,
		check: func(context.Context) error { return nil },
	}
	seen.Take()
	if err := w.probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	looked := 0
	for _, plan := range seen.Take() {
		reads := strings.Contains(plan.Statement, `."outbox" `) || strings.Contains(plan.Statement, `."parked" `)
		if !reads || strings.Contains(plan.Statement, "delete from") || strings.Contains(plan.Statement, "relay_leases") {
			continue
		}
		looked++
		if plan.Rows > 0 {
			t.Errorf("a probe looked at %v rows:\n%s", plan.Rows, plan.Text)
		}
	}
	if looked < 3 {
		t.Errorf("%d statements that read messages", looked)
	}
}
