package relay_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// step is a statement at which a worker dies, and the policy that leads there.
type step struct {
	crashPoint
	retry relay.Retry
}

// steps are all that a worker writes, and reads, of parked rows and dead letters,
// with every moment at which it can die there.
func (p testDB) steps() []step {
	attempts := func(n int, e relay.Exhausted) relay.Retry {
		return relay.Retry{Initial: 5 * time.Millisecond, Max: 20 * time.Millisecond, MaxAttempts: n, Exhausted: e}
	}
	skip, skipAtOnce := attempts(3, relay.ExhaustedSkip), attempts(1, relay.ExhaustedSkip)
	hold, holdAtOnce := attempts(3, relay.ExhaustedHoldKey), attempts(1, relay.ExhaustedHoldKey)
	type named struct {
		name    string
		retry   relay.Retry
		moments []moment
		parts   []string
	}
	alone, inTx := []moment{before, executed}, []moment{before, executed, committed}
	all := []named{
		{"park", skip, inTx, []string{"partition by d.key", "'held', true"}},
		{"park held", holdAtOnce, inTx, []string{"partition by d.key", "'held', true"}},
		{"another attempt", skip, inTx, []string{"set attempts = c.attempt,", "next_at = case when p.next_at"}},
		{"outbox to letter", skipAtOnce, inTx, []string{"'dead', false", "delete from {{outbox}}"}},
		{"parked to letter", skip, inTx, []string{"'dead', false", "delete from {{parked}}"}},
		{"hold", hold, inTx, []string{"held = true, crashed"}},
		{"look for due", skip, alone, []string{"with recursive t (lane, topic, next_at"}},
		{"look for heads", skip, alone, []string{"with known as materialized"}},
		{"settle", skip, inTx, []string{"with gone as", "{{parked}}"}},
		{"close letters", hold, inTx, []string{"confirmed by the broker after"}},
		{"promote", skip, inTx, []string{"promoted as", "unnest((select $1::smallint[]), (select $2::text[])) as k"}},
		{"look for commands", skip, alone, []string{"d.state in ('replaying', 'discarding')"}},
		{"replay", skip, inTx, []string{"state = 'replayed'", "demoted as"}},
		{"replay held", hold, inTx, []string{"state = 'replayed'", "demoted as"}},
		{"discard held", hold, inTx, []string{"state = 'discarded'", "delete from {{parked}}"}},
		{"look at keys of letters", hold, alone, []string{"select distinct d.lane, d.key"}},
		{"delete confirmed", skip, inTx, []string{"insert into {{outbox_history}}", "delete from", "(select $2::bigint[])"}},
	}
	if !p.postgres() {
		all = []named{
			{"park", skip, inTx, []string{"insert into {{parked}}", "from {{outbox}}"}},
			{"park held", holdAtOnce, inTx, []string{"insert into {{parked}}", "from {{outbox}}"}},
			{"delete from outbox", skip, inTx, []string{"delete from {{outbox}}", "and message_id = ?3 and created_at = ?4"}},
			{"outbox to letter", skipAtOnce, inTx, []string{"insert into {{dead_letters}}", "from {{outbox}}"}},
			{"another attempt", skip, inTx, []string{"update {{parked}}", "attempts = ?5, next_at = case"}},
			{"parked to letter", skip, inTx, []string{"insert into {{dead_letters}}", "'dead', 0", "from {{parked}}"}},
			{"hold", hold, inTx, []string{"held = 1"}},
			{"letter of the held", hold, inTx, []string{"insert into {{dead_letters}}", "errors, 'held', 1"}},
			{"look for due", skip, alone, []string{"with recursive t (lane, topic, nth)"}},
			{"look for heads", skip, alone, []string{"select lane, id, key, next_at -"}},
			{"settle", skip, inTx, []string{"delete from {{parked}}", "created_at = ?4\nreturning key"}},
			{"into the history", skip, inTx, []string{"insert into {{outbox_history}}", "from {{parked}}"}},
			{"close letters", hold, inTx, []string{"confirmed by the broker after"}},
			{"give time", skip, inTx, []string{"update {{parked}}", "next_at is null and not held"}},
			{"take time", skip, inTx, []string{"set next_at = null", "rowid <>"}},
			{"look for commands", skip, alone, []string{"state in ('replaying', 'discarding')"}},
			{"replay", skip, inTx, []string{"insert into {{parked}}", "from {{dead_letters}}"}},
			{"replay held", hold, inTx, []string{"insert into {{parked}}", "from {{dead_letters}}"}},
			{"discard held", hold, inTx, []string{"delete from {{parked}}", "and held\nreturning key"}},
			{"close letter", hold, inTx, []string{"update {{dead_letters}}", "set state = ?2"}},
			{"delete confirmed", skip, inTx, []string{"delete from {{outbox}}", "where id = ?1 and lane = ?2"}},
		}
	}
	var steps []step
	for _, n := range all {
		for i, part := range n.parts {
			n.parts[i] = database.Of(p.cfg).Expand(part)
		}
		for _, when := range n.moments {
			steps = append(steps, step{crashPoint{n.name, n.parts, when}, n.retry})
		}
	}
	return steps
}

// A worker dies at each step of parking, un-parking, dead-lettering, and of what
// operators want done. Whoever takes over goes on: nothing is lost, nothing is both
// dead and delivered, keys keep their order, and nobody pays for it who had no
// part in it.
func TestRelay_SurvivesAKillAtEachStepOfParking(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	const streams = 2 // at a time; each has a database of its own
	for stream := range streams {
		eachDatabase(t, func(t *testing.T, p testDB) {
			c := newCasualty(t, p)
			for i, s := range p.steps() {
				if i%streams == stream && !t.Failed() {
					c.round(t, s)
				}
			}
		})
	}
}

// casualty is a database whose workers die.
type casualty struct {
	testDB
	box     *outbox.Outbox
	letters *dlq.Store
	broker  *broker
	rounds  int

	mu       sync.Mutex
	refusals map[string]int // how often the broker is to refuse a message; negative: until it is mended
}

func newCasualty(t *testing.T, p testDB) *casualty {
	letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg})
	if err != nil {
		t.Fatal(err)
	}
	c := &casualty{testDB: p, box: p.boxOn(t, p.db, 24*time.Hour), letters: letters, refusals: map[string]int{}}
	c.broker = startBroker(t, c.decide)
	return c
}

func (c *casualty) decide(f frame) (outcome, time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	left := c.refusals[f.MessageID]
	if left == 0 {
		return confirmed, 0
	}
	c.refusals[f.MessageID] = left - 1
	return refused, 0
}

func (c *casualty) mend(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refusals[id] = 0
}

const (
	toDiscard = "nobody wants it" // the end of such a message's key
	toReplay  = "it will be mended"
)

// workload returns messages of several keys and of none, some of which fail: twice,
// until they are mended, or for good.
func (c *casualty) workload(round string) []*message.Message {
	var all []*message.Message
	key := func(name string, n int) {
		all = append(all, keyed(round+name, 0, n)...)
	}
	key(" fails twice", 5)
	key(" "+toReplay, 5)
	key(" "+toDiscard, 5)
	key(" has no trouble", 5)
	for _, end := range []string{"fails twice", toReplay, toDiscard} {
		m := message.NewMessage(round+" alone "+end+"/1", []byte("payload"))
		all = append(all, m)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range all {
		if !strings.HasSuffix(m.UUID, "/1") {
			continue
		}
		switch {
		case strings.Contains(m.UUID, "fails twice"):
			c.refusals[m.UUID] = 2
		case strings.Contains(m.UUID, toReplay), strings.Contains(m.UUID, toDiscard):
			c.refusals[m.UUID] = -1
		}
	}
	return all
}

// operate does what operators do with what has died: the cause is mended, and it is
// replayed, unless nobody wants it.
func (c *casualty) operate(t *testing.T) {
	t.Helper()
	list, err := c.letters.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateDead, dlq.StateHeld}})
	if err != nil {
		t.Fatal(err)
	}
	sent := map[string]bool{}
	for _, d := range c.broker.all() {
		sent[d.MessageID] = true
	}
	for _, l := range list {
		if sent[l.MessageID] {
			t.Errorf("%s is dead and delivered", l.MessageID)
		}
		act := dlq.Act{By: "ada", Reason: "a test"}
		if strings.Contains(l.MessageID, toDiscard) {
			// It is undone at once, and done again, while the worker may be at it.
			if err = c.letters.Discard(t.Context(), l.ID, act); err == nil && c.letters.Restore(t.Context(), l.ID, act) == nil {
				err = c.letters.Discard(t.Context(), l.ID, act)
			}
		} else {
			c.mend(l.MessageID)
			_, err = c.letters.Replay(t.Context(), []int64{l.ID}, act)
		}
		var closed *dlq.StateError
		if err != nil && !errors.As(err, &closed) {
			t.Fatal(err)
		}
	}
}

// unsettled counts in one statement what is owed and what is dead and open: between
// two a message can pass from where it is not counted any more to where it was not yet.
func (c *casualty) unsettled(t *testing.T) int {
	t.Helper()
	return c.count(t, `select (select count(*) from {{outbox}}) + (select count(*) from {{parked}}) +
		(select count(*) from {{dead_letters}} where closed_at is null)`)
}

// round lets a worker die at one step, another one take over, and looks at what
// has become of it all.
func (c *casualty) round(t *testing.T, s step) {
	t.Helper()
	c.rounds++
	name := fmt.Sprint("round", c.rounds)
	all := c.workload(name)
	commit(t, c.box, all...)
	before := len(c.broker.all())
	spec := workerSpec{
		Name: name + " dies", History: 24 * time.Hour, Lease: 15 * time.Second,
		Window: 16, Batch: 8, Retry: s.retry, Crash: s.crashPoint,
	}
	victim := startProcess(t, c.testDB, c.broker, spec)
	done := func() bool { c.operate(t); return c.unsettled(t) == 0 }
	eventually(t, s.String(), func() bool { return victim.died() || done() })
	if !victim.died() {
		t.Fatalf("%s: the worker does all it has to do without coming there", s)
	}
	if state := victim.cmd.ProcessState; state.String() != "signal: killed" {
		t.Fatalf("%s: %v", s, state)
	}
	c.letLeasesExpire(t, victim.name)

	r, err := relay.New(c.box, newRemoteSink(name+" takes over", c.broker.address(), ""), relay.Config{
		Name: "successor", Window: 16, Batch: 8, Retry: s.retry, Logger: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	eventually(t, "what "+s.String()+" left behind is done", done)
	stop()
	if err := <-ended; err != nil {
		t.Errorf("%s: Run: %v", s, err)
	}
	c.judge(t, s, all, c.broker.all()[before:])
}

func (c *casualty) judge(t *testing.T, s step, all []*message.Message, wire []delivery) {
	t.Helper()
	bad := func(format string, args ...any) { t.Errorf(s.String()+": "+format, args...) }
	by := map[string][]string{} // message to the processes that sent it
	got := map[string][]string{}
	for _, d := range wire {
		if by[d.MessageID] = append(by[d.MessageID], d.By); len(by[d.MessageID]) == 1 {
			got[d.Key] = append(got[d.Key], d.MessageID)
		}
	}
	want := map[string][]string{}
	delivered, repeats := 0, 0
	for _, m := range all {
		senders, id, key := by[m.UUID], m.UUID, m.Metadata.Get(outbox.KeyMetadata)
		delete(by, id)
		unwanted := strings.Contains(id, toDiscard) && strings.HasSuffix(id, "/1")
		letter := c.letterOf(t, s, id)
		switch {
		case unwanted && len(senders) > 0:
			bad("%s is discarded and delivered", id)
		case unwanted && letter != dlq.StateDiscarded:
			bad("%s was not discarded but is %s", id, letter)
		case !unwanted && len(senders) == 0:
			bad("%s is lost", id)
		case len(senders) > 2, len(senders) == 2 && senders[0] == senders[1]:
			bad("%s was sent by %v", id, senders)
		}
		if letter != "" && !strings.HasSuffix(id, "/1") {
			bad("%s has done nothing and is %s", id, letter)
		}
		if unwanted {
			continue
		}
		delivered++
		repeats += len(senders) - 1
		if letter == "" || s.retry.Exhausted == relay.ExhaustedHoldKey {
			want[key] = append(want[key], id)
		} else {
			// Its place was given up.
			got[key] = slices.DeleteFunc(got[key], func(other string) bool { return other == id })
		}
	}
	for key, ids := range want {
		if key != "" && !slices.Equal(ids, got[key]) {
			bad("key %q: %v", key, got[key])
		}
	}
	if len(by) > 0 {
		bad("nobody committed %v", by)
	}
	if repeats > 16 {
		bad("%d messages were sent twice, more than a window", repeats)
	}
	kept := c.count(t, `select count(*) from {{outbox_history}} where message_id like $1`, fmt.Sprintf("round%d %%", c.rounds))
	if kept != delivered {
		bad("the history has %d messages, %d were delivered", kept, delivered)
	}
}

// letterOf returns the state of a message's letter, empty if it has none. A message
// dies once, by what it has done, after all its attempts.
func (c *casualty) letterOf(t *testing.T, s step, id string) dlq.State {
	t.Helper()
	list, err := c.letters.List(t.Context(), dlq.Filter{MessageID: id})
	if err != nil {
		t.Fatal(err)
	}
	if len(list) == 0 {
		return ""
	}
	if l := list[0]; len(list) > 1 || l.Tries != s.retry.MaxAttempts || l.Reason != "refused" {
		t.Errorf("%s: %s has %d letters, one by %d attempts: %s", s, id, len(list), l.Tries, l.Reason)
	}
	return list[0].State
}
