package relaystore

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// gambler does random things to a lot and to its model.
type gambler struct {
	*fixture
	want model
	*rand.Rand
	letters *dlq.Store
	steps   map[string]int
	names   []string // that are not published yet
}

func (g *gambler) pick(rows []*modelRow, most int) []*modelRow {
	rows = slices.Clone(rows)
	g.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	return rows[:min(len(rows), 1+g.IntN(most))]
}

func (g *gambler) publishSome(t *testing.T) {
	n := min(len(g.names), 1+g.IntN(4))
	for _, row := range g.publish(t, g.names[:n]...) {
		if g.IntN(2) == 0 {
			row.Topic = "refunds"
			g.exec(t, `update {{outbox}} set topic = $1 where id = $2`, row.Topic, row.ID)
		}
		g.want.rows = append(g.want.rows, &modelRow{Row: row, spot: inOutbox})
	}
	g.names = g.names[n:]
}

// failures are of rows of every kind, some of them no longer where they were.
func (g *gambler) failures() (failures []Failure, followers []outboxstore.Ref) {
	parked := map[string]bool{}
	for _, r := range g.want.of(inParked, "") {
		parked[r.Key] = true
	}
	for _, r := range g.pick(g.want.rows, 4) {
		f := Failure{Ref: r.Ref, Retrying: r.spot == inParked, Attempt: r.attempts + 1, Class: "refused", Text: "no\x00\xff" + r.MessageID, Fingerprint: "f"}
		if r.spot == inOutbox {
			f.Attempt = 1
		}
		switch g.IntN(12) {
		case 0:
			f.Attempt++ // written twice, or never
		case 1:
			f.Class = "crashed"
		case 2:
			f.Retrying = !f.Retrying
		case 3, 4:
			f.RetryIn = time.Hour
		}
		f.Fate = []Fate{FateRetry, FateRetry, FateRetry, FateDeadLetter, FateHoldKey}[g.IntN(5)]
		failures = append(failures, f)
		if r.spot == inOutbox && f.Fate != FateDeadLetter && !f.Retrying {
			parked[r.Key] = true
		}
	}
	delete(parked, "")
	for _, r := range g.pick(g.want.rows, 20) {
		failing := slices.ContainsFunc(failures, func(f Failure) bool { return f.ID == r.ID })
		if !failing && parked[r.Key] && (r.spot == inOutbox || g.IntN(5) == 0) {
			followers = append(followers, r.Ref)
		}
	}
	return failures, followers
}

func (g *gambler) someLetters(t *testing.T) []*modelLetter {
	t.Helper()
	g.learnIDs(t)
	all := slices.Clone(g.want.letters)
	g.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:min(len(all), 1+g.IntN(3))]
}

// learnIDs finds the ids of letters: those of one message in their order.
func (g *gambler) learnIDs(t *testing.T) {
	t.Helper()
	all, err := g.letters.List(t.Context(), dlq.Filter{OldestFirst: true, Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(all, func(a, b *dlq.Letter) int { return int(a.ID - b.ID) })
	used := map[int64]bool{}
	for _, l := range g.want.letters {
		for _, real := range all {
			if !used[real.ID] && real.MessageID == l.row.MessageID {
				l.id, used[real.ID] = real.ID, true
				break
			}
		}
	}
}

func (g *gambler) act(t *testing.T) {
	for _, l := range g.someLetters(t) {
		open := l.state == dlq.StateDead || l.state == dlq.StateHeld
		act := dlq.Act{By: "gambler", Reason: "luck"}
		var err error
		if g.IntN(3) > 0 {
			_, err = g.letters.Replay(t.Context(), []int64{l.id}, act)
			if open {
				l.state = dlq.StateReplaying
			}
		} else {
			err = g.letters.Discard(t.Context(), l.id, act)
			switch {
			case open && l.state == dlq.StateDead:
				l.state, l.row.spot = dlq.StateDiscarded, isDropped
			case open:
				l.state = dlq.StateDiscarding
			}
		}
		var refused *dlq.StateError
		if open && err != nil || !open && !errors.As(err, &refused) {
			t.Fatalf("an act on a letter that is %s: %v", l.state, err)
		}
	}
}

func sorted(keys []Key) []Key {
	return slices.SortedFunc(slices.Values(keys), func(a, b Key) int { return strings.Compare(a.Key, b.Key) })
}

func expectKeys(t testing.TB, what string, got, want []Key) {
	t.Helper()
	if !slices.Equal(sorted(got), sorted(want)) {
		t.Fatalf("%s keys %v, want %v", what, got, want)
	}
}

// step does one thing, or does it twice, or with a lease that is another's.
func (g *gambler) step(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	fence, stale := g.f, g.IntN(10) == 0
	if stale {
		fence.Epoch--
	}
	want := error(nil)
	if stale {
		want = ErrFenced
	}
	times := 1 + g.IntN(2)
	var name string
	switch n := g.IntN(12); {
	case n < 2:
		name = "publish"
		g.publishSome(t)
	case n < 6:
		name = "fail"
		failures, followers := g.failures()
		for range times {
			expectErr(t, g.Fail(ctx, fence, failures, followers), want)
		}
		if !stale {
			g.want.fail(failures, followers)
		}
	case n < 8:
		name = "settle"
		rows := g.want.of(inParked, "")
		if g.IntN(4) == 0 {
			rows = slices.DeleteFunc(slices.Clone(g.want.rows), func(r *modelRow) bool { return r.spot == inOutbox })
		}
		var refs []outboxstore.Ref
		for _, r := range g.pick(rows, 5) {
			refs = append(refs, r.Ref)
		}
		removal, err := g.Remove(ctx, refs)
		expectErr(t, err, nil)
		expectKeys(t, "ended", removal.Ended, g.want.settle(refs))
		if times > 1 {
			removal, err := g.Remove(ctx, refs)
			expectErr(t, err, nil)
			expectKeys(t, "ended again", removal.Ended, nil)
		}
	case n < 9:
		name = "act"
		g.act(t)
	case n < 11:
		name = "carry out"
		some := g.someLetters(t)
		commands, err := g.Commands(ctx, []int{1, testLane}, 3)
		expectErr(t, err, nil)
		for _, c := range commands {
			for _, l := range g.want.letters {
				if l.id == c.DeadLetter && !slices.Contains(some, l) {
					some = append(some, l)
				}
			}
		}
		ids := make([]int64, len(some))
		for i, l := range some {
			ids[i] = l.id
		}
		for range times {
			parked, unparked, err := g.CarryOut(ctx, fence, ids)
			expectErr(t, err, want)
			if !stale {
				wantParked, wantUnparked := g.want.carryOut(some)
				expectKeys(t, "parked", parked, wantParked)
				expectKeys(t, "unparked", unparked, wantUnparked)
			}
		}
	default:
		name = "alone"
		var id int64
		if len(g.want.rows) > 0 && g.IntN(3) > 0 {
			id = g.want.rows[g.IntN(len(g.want.rows))].ID
		}
		for range times {
			expectErr(t, g.SetAlone(ctx, fence, id), want)
		}
		if !stale {
			g.want.alone = id
		}
	}
	if stale {
		name += ", stale"
	}
	g.steps[name]++
}

// look compares what is read with the model.
func (g *gambler) look(t *testing.T) {
	t.Helper()
	if got, want := g.dump(t), g.want.String(); got != want {
		t.Fatalf("the tables are\n%s\nthey should be\n%s", got, want)
	}
	var keys []Key
	var wait, later int
	mayWait := false // for one that is known
	known := map[int64]bool{}
	req := DueRequest{Lanes: []int{testLane}, Heads: 1 + g.IntN(4), Rows: 1 + g.IntN(4)}
	for _, topic := range []string{"orders", "refunds", "others"} {
		if g.IntN(4) == 0 {
			req.ExceptTopics = append(req.ExceptTopics, topic)
		}
	}
	for _, r := range g.want.of(inParked, "") {
		if k := (Key{testLane, r.Key}); r.Key != "" && !slices.Contains(keys, k) {
			keys = append(keys, k)
		}
		if g.IntN(5) == 0 {
			known[r.ID] = true
			mayWait = mayWait || r.time == 2
			continue
		}
		if slices.Contains(req.ExceptTopics, r.Topic) {
			continue
		}
		switch r.time {
		case 1:
			wait++
		case 2:
			later++
		}
	}
	expectKeys(t, "parked", g.keys(t), keys)
	req.Known = g.known(t, slices.Collect(maps.Keys(known))...)
	due, next, err := g.due(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	switch heads := req.Heads; {
	case wait > heads && next != 0, wait <= heads && later > 0 && next <= 0, wait <= heads && later == 0 && next >= 0 && !mayWait:
		t.Fatalf("%d due, %d later, asked for %+v: next in %v", wait, later, req, next)
	}
	groups := 0
	for len(due) > 0 {
		head := g.want.find(due[0].Ref)
		want := []*modelRow{head}
		if head.time != 1 || known[head.ID] || slices.Contains(req.ExceptTopics, head.Topic) {
			t.Fatalf("%s is due and should not be; asked for %+v, got %v of\n%s", head.MessageID, req, dueNames(due), g.want.String())
		}
		if head.Key != "" {
			for _, r := range g.want.of(inParked, head.Key)[1:] {
				if len(want) == req.Rows || r.held {
					break
				}
				if !known[r.ID] {
					want = append(want, r)
				}
			}
		}
		for i, r := range want {
			if i >= len(due) || due[i].ID != r.ID || due[i].Attempts != r.attempts || due[i].Crashed != r.crashed || string(due[i].Payload) != string(r.Payload) {
				t.Fatalf("due of key %q: %+v at %d, want %+v", head.Key, due[min(i, len(due)-1)], i, r)
			}
		}
		due = due[len(want):]
		groups++
	}
	if groups != min(wait, req.Heads) {
		t.Fatalf("%d heads of %d that are due, asked for %+v", groups, wait, req)
	}
}

func gamble(t *testing.T, p *fixture, rounds, steps int) {
	seed := rand.Uint64() //nolint:gosec // no secret
	t.Logf("seed %d", seed)
	letters, err := dlq.New(p.db, dlq.Config{Database: p.box.Config().Database})
	if err != nil {
		t.Fatal(err)
	}
	total := map[string]int{}
	for round := range rounds {
		for _, table := range []string{"outbox", "parked", "dead_letters", "outbox_history"} {
			p.exec(t, `delete from {{`+table+`}}`)
		}
		p.exec(t, `update {{relay_leases}} set suspect = null`)
		g := &gambler{fixture: p, Rand: rand.New(rand.NewPCG(seed, uint64(round))), letters: letters, steps: total} //nolint:gosec // no secret
		for i := range 15 {
			for k := 1; k <= 3; k++ {
				g.names = append(g.names, fmt.Sprintf("%s/%d", laneKey(k), i))
			}
		}
		g.names = append(g.names, loose(10)...)
		g.Shuffle(len(g.names), func(i, j int) { g.names[i], g.names[j] = g.names[j], g.names[i] })
		g.publishSome(t)
		for n := 0; n < steps || round == rounds-1 && !didAll(total); n++ {
			if n > 100*steps {
				t.Fatalf("steps: %v", total)
			}
			g.step(t)
			g.look(t)
		}
	}
	t.Logf("steps: %v", total)
}

// didAll reports that each kind of step was done, so that the run says something.
func didAll(steps map[string]int) bool {
	for _, name := range []string{"publish", "fail", "settle", "act", "carry out", "alone", "fail, stale"} {
		if steps[name] == 0 {
			return false
		}
	}
	return true
}

// Random operations, some twice, some with a lease that is another's: every
// message is in one place, where a simple model says it is.
func TestRetries_AgreesWithAModel(t *testing.T) {
	t.Parallel()
	for _, level := range testserver.OneOf(t, "read committed", "serializable") {
		t.Run("PostgreSQL "+level, func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			gamble(t, newFixture(t, pg.Open(t, "default_transaction_isolation="+level), pg.Config, time.Hour), testserver.Rounds(2, 40), 60)
		})
	}
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		db := testserver.OpenSQLite(t, migratedSQLite(t))
		db.SetMaxOpenConns(1)
		p := newFixture(t, db, oncemill.Config{}, time.Hour)
		p.exec(t, `pragma synchronous = off`)
		gamble(t, p, testserver.Rounds(2, 80), 80)
	})
}
