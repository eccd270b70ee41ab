package rabbitmq

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/relay"
)

// confirmed is a confirm that comes, with what comes before it, when somebody first
// looks whether it is there.
type confirmed struct {
	before func()
	done   chan struct{}
}

func (c *confirmed) Done() <-chan struct{} {
	if c.done == nil {
		if c.before != nil {
			c.before()
		}
		c.done = make(chan struct{})
		close(c.done)
	}
	return c.done
}

func (*confirmed) Acked() bool { return true }

// never is a confirm that does not come.
type never struct{}

func (never) Done() <-chan struct{} { return nil }
func (never) Acked() bool           { return false }

// fakeChannel is a channel of a lane without a broker.
func fakeChannel(l *lane, to *link) *channel {
	return &channel{
		link: to, isolated: &l.isolated, late: &l.late,
		returns: make(chan amqp.Return, 10), closes: make(chan *amqp.Error, 1),
		renewal: time.Now().Add(time.Hour),
	}
}

func fakeLane() (*lane, *link) {
	r := newRunning(&settings{Config: Config{Window: 10, ConfirmTimeout: defaultConfirmTimeout}})
	to := &link{running: r, calls: newMailbox[call](make(chan struct{}, 1)), marks: map[string]*mark{}}
	r.state.Store(&state{link: to})
	return newLane(r, 0), to
}

// put puts a message in flight and returns it.
func (c *channel) put(t *testing.T, id int64, confirm confirmation, done func(*relay.Message, error)) *relay.Message {
	m := &relay.Message{ID: id, Topic: "orders"}
	b := newBatch(t.Context(), []*relay.Message{m}, done)
	c.flight.push(&entry{channel: c, confirm: confirm, message: m, batch: b, route: &route{confirmed: &mark{}}})
	c.unresolved++
	c.waiting++
	return m
}

// A return and the confirm behind it may come at any time, also between two looks. The
// message is refused, however its confirm is found.
func TestChannel_FindsTheReturnOfEachConfirmItBelieves(t *testing.T) {
	for name, look := range map[string]func(*channel){
		"oldest": func(c *channel) { c.settle(false) },
		"all":    func(c *channel) { c.settle(true) },
		"lost":   func(c *channel) { c.giveUp() },
	} {
		t.Run(name, func(t *testing.T) {
			l, to := fakeLane()
			c := fakeChannel(l, to)
			var outcomes []error
			arrive := &confirmed{before: func() {
				c.returns <- amqp.Return{ReplyCode: amqp.NoRoute, Headers: amqp.Table{idHeader: "0/7"}}
			}}
			c.put(t, 7, arrive, func(_ *relay.Message, err error) { outcomes = append(outcomes, err) })
			look(c)
			if len(outcomes) != 1 || !errors.Is(outcomes[0], relay.ErrUnroutable) {
				t.Errorf("outcomes %v, want one, unroutable", outcomes)
			}
		})
	}
}

// Channels that were replaced are listened to, but not all and not for ever.
func TestLane_BoundsWhatItListensTo(t *testing.T) {
	l, to := fakeLane()
	var outcomes []error
	done := func(_ *relay.Message, err error) { outcomes = append(outcomes, err) }
	retire := func(confirm confirmation) *channel {
		c := fakeChannel(l, to)
		c.put(t, int64(len(outcomes)+1), confirm, done)
		l.channel = c
		l.retire(time.Now(), interruptedStalled)
		return c
	}
	first, second, third := retire(never{}), retire(never{}), retire(never{})
	if len(l.retired) != maxRetired || l.retired[0] != second || l.retired[1] != third {
		t.Errorf("%d channels are listened to", len(l.retired))
	}
	if n := len(l.late.copies); n != 2 {
		t.Errorf("%d confirms are awaited, want those of 2 channels", n)
	}
	second.retired = time.Now().Add(-retirement)
	l.tendRetired()
	if len(l.retired) != 1 || len(l.late.copies) != 1 {
		t.Errorf("%d channels, %d confirms are awaited after the time of one", len(l.retired), len(l.late.copies))
	}
	third.flight.all()[0].confirm = &confirmed{}
	l.tendRetired()
	if len(l.retired) != 0 || len(l.late.copies) != 0 {
		t.Errorf("%d channels, %d confirms are awaited when all have come", len(l.retired), len(l.late.copies))
	}
	if len(outcomes) != 4 || outcomes[3] != nil {
		t.Errorf("outcomes %v, want 3 that were interrupted and a late confirm", outcomes)
	}
	var discarded []*channel
	for _, call := range to.calls.take(nil) {
		discarded = append(discarded, call.discard)
	}
	if len(discarded) != 3 || discarded[0] != first || discarded[1] != second || discarded[2] != third {
		t.Errorf("%d channels were closed", len(discarded))
	}
}

// Of several copies of a message only one is reported as confirmed.
func TestLane_ReportsOneLateConfirmOfAMessage(t *testing.T) {
	l, to := fakeLane()
	late := 0
	done := func(_ *relay.Message, err error) {
		if err == nil {
			late++
		}
	}
	var m *relay.Message
	for range maxRetired {
		c := fakeChannel(l, to)
		put := c.put(t, 7, &confirmed{}, done)
		if m == nil {
			m = put
		}
		again := *m // as the relay hands it over
		c.flight.all()[0].message = &again
		l.channel = c
		l.retire(time.Now(), interruptedStalled)
	}
	l.tendRetired()
	if late != 1 || len(l.retired) != 0 {
		t.Errorf("%d late confirms, %d channels left", late, len(l.retired))
	}
}

// A server that lost its latest commits gives ids out again: a row with the id of a copy in
// flight, and not all else of it, is sent.
func TestLane_TakesNoOtherRowForTheCopyInFlight(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*relay.Message)
		sent   int
	}{
		"the same row":       {func(*relay.Message) {}, 0},
		"another message id": {func(m *relay.Message) { m.MessageID = "another" }, 1},
		"another topic":      {func(m *relay.Message) { m.Topic = "others" }, 1},
		"another time":       {func(m *relay.Message) { m.CreatedAt = m.CreatedAt.Add(time.Microsecond) }, 1},
	} {
		l, to := fakeLane()
		l.channel = fakeChannel(l, to)
		done := func(*relay.Message, error) {}
		row := *l.channel.put(t, 7, never{}, done)
		l.channel.giveBack(l.channel.flight.all()[0], unavailableUnanswered)
		c.change(&row)
		l.inbox.put(newBatch(t.Context(), []*relay.Message{&row}, done))
		l.receive()
		if n := l.pending.len(); n != c.sent {
			t.Errorf("%s: %d are to be sent, want %d", name, n, c.sent)
		}
	}
}

// Each replacement doubles the time until the next one, so that a queue that is merely
// slow does not get everything again and again.
func TestGrace_DoublesWithEachReplacement(t *testing.T) {
	var p grace
	now := time.Now()
	for _, want := range []int{1, 2, 4, sameTopic, sameTopic} {
		if f := p.at(now); f != want {
			t.Errorf("factor %d, want %d", f, want)
		}
		p.lost(now)
		now = now.Add(time.Minute)
	}
	if f := p.at(now.Add(graceMemory)); f != 1 {
		t.Errorf("factor %d after a quiet time", f)
	}
}

// answer is a confirm, or a nack.
type answer struct{ acked bool }

func (answer) Done() <-chan struct{} {
	closed := make(chan struct{})
	close(closed)
	return closed
}
func (a answer) Acked() bool { return a.acked }

// One channel has no answer, since the leader of its queue died. What the others of the
// connection get, be it a refusal, shows that the broker is there.
func TestJudge_AnyAnswerToLaterMessagesCounts(t *testing.T) {
	for _, kind := range []string{"confirmed", "nacked", "returned"} {
		l, to := fakeLane()
		to.net = &batchConn{}
		c, other := fakeChannel(l, to), fakeChannel(l, to)
		begin := time.Now()
		c.put(t, 1, never{}, func(*relay.Message, error) {})
		e := c.flight.all()[0]
		e.begin, e.end, e.since = 0, 100, begin
		place, got := int64(100), conditionFine
		to.net.written.Store(place)
		for now := begin; got == conditionFine && now.Sub(begin) < time.Minute; now = now.Add(time.Second) {
			other.put(t, place, answer{kind != "nacked"}, func(*relay.Message, error) {})
			o := other.oldest()
			o.begin, o.end, o.since = place, place+100, now
			place += 100
			to.net.written.Store(place)
			if kind == "returned" {
				other.returns <- amqp.Return{ReplyCode: amqp.NoRoute, Headers: amqp.Table{idHeader: rowID(o.message)}}
			}
			if !other.settle(true) {
				t.Fatal("the other channel is not trusted")
			}
			to.answeredAt.Store(now.UnixNano())
			got = c.assess(now, &grace{factor: 1, since: now}, 30*time.Second)
		}
		if got != conditionStalled {
			t.Errorf("others are %s: condition %d", kind, got)
		}
	}
}

// A channel that replaced a stalled one, and has confirmed nothing of the topic, is replaced
// early, once: the next one has the full time, which is now twice as long.
func TestAssess_ReplacesTheReplacementEarlyOnce(t *testing.T) {
	const limit = 30 * time.Second
	_, to := fakeLane()
	to.net = &batchConn{}
	to.net.written.Store(1000)
	begin := time.Now()
	g := &grace{factor: 1, since: begin}
	// after returns the condition of a new channel with one message in flight, after a time.
	after := func(d time.Duration, heard bool) condition {
		l, _ := fakeLane()
		c := fakeChannel(l, to)
		c.put(t, 1, never{}, func(*relay.Message, error) {})
		e := c.flight.all()[0]
		e.begin, e.end, e.since = 0, 100, begin
		if heard {
			e.route.confirmedOn = c
		}
		if got := c.assess(begin, g, limit); got != conditionFine {
			t.Fatalf("condition %d at once", got)
		}
		e.route.confirmed.reach(200) // a later message of the topic, on another channel
		if got := c.assess(begin.Add(d-1500*time.Millisecond), g, limit); got != conditionFine {
			t.Errorf("condition %d as soon as a later message was confirmed", got)
		}
		return c.assess(begin.Add(d), g, limit)
	}
	if got := after(2*time.Second, false); got != conditionFine {
		t.Errorf("condition %d of the first channel", got)
	}
	if got := after(6*time.Second, false); got != conditionStalled {
		t.Errorf("condition %d of the first channel, later", got)
	}
	// After an election the confirms of all channels come at about the same time.
	if got := after(20*time.Second, false); got != conditionStalled {
		t.Errorf("condition %d of the first channel, 1.5 s after a later confirm", got)
	}
	g.lost(begin)
	if got := after(2*time.Second, true); got != conditionFine {
		t.Errorf("condition %d of a replacement that was heard", got)
	}
	if got := after(2*time.Second, false); got != conditionUnheard {
		t.Errorf("condition %d of the replacement", got)
	}
	g.spare = false
	if got := after(6*time.Second, false); got != conditionFine {
		t.Errorf("condition %d of its replacement", got)
	}
	if got := after(11*time.Second, false); got != conditionStalled {
		t.Errorf("condition %d of its replacement, later", got)
	}
}

// A channel on which nothing of a topic was ever confirmed nacks it, while what others sent to
// it is confirmed: the lane gets another channel, and the topic is not to blame. Any other nack
// counts as one. But if all channels nack for long, the lane gets another one too.
func TestChannel_ThatOnlyNacksIsReplaced(t *testing.T) {
	for name, c := range map[string]struct {
		change      func(c *channel)
		interrupted int // outcomes; 0: it is not replaced
	}{
		"others are confirmed":          {func(*channel) {}, 3},
		"others were, before it opened": {func(c *channel) { c.opened = 200 }, 0},
		"another topic was confirmed on it": {func(c *channel) {
			e := c.flight.all()[0]
			e.confirm, e.route = answer{acked: true}, &route{confirmed: &mark{}}
		}, 2},
		"the topic was confirmed on it": {func(c *channel) {
			for _, e := range c.flight.all() {
				e.route.confirmedOn = c
			}
		}, 0},
		"the topic is confirmed on none": {func(c *channel) { c.opened = 200; c.renewal = time.Now().Add(-time.Second) }, 1},
		"it was renewed a moment ago":    {func(c *channel) { c.opened = 200; c.renewal = time.Now().Add(time.Minute) }, 0},
		"another was just replaced":      {func(c *channel) { c.trusted = time.Now().Add(time.Hour) }, 0},
		"another was replaced long ago":  {func(c *channel) { c.trusted = time.Now().Add(-time.Hour) }, 3},
		"a queue that is only half full": {func(c *channel) {
			entries := c.flight.all()
			entries[0].confirm = answer{acked: true}
			entries[1].route = entries[0].route
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			l, to := fakeLane()
			l.running.settings.Logger = slog.New(slog.DiscardHandler)
			to.net = &batchConn{}
			ch := fakeChannel(l, to)
			ch.opened = 50
			l.channel = ch
			var outcomes []error
			done := func(_ *relay.Message, err error) { outcomes = append(outcomes, err) }
			ch.put(t, 1, answer{}, done)
			ch.put(t, 2, answer{}, done)
			ch.put(t, 3, never{}, done)
			for _, e := range ch.flight.all() {
				e.route.confirmed.reach(100) // on another channel
			}
			c.change(ch)
			l.step(t.Context())
			if l.channel == nil {
				t.Fatal("replaced while a message in flight has no answer")
			}
			if !ch.leaving.IsZero() {
				ch.leaving = ch.leaving.Add(-l.running.settings.ConfirmTimeout) // it never comes
			}
			l.step(t.Context())
			interrupted := 0
			for _, err := range outcomes {
				if errors.Is(err, relay.ErrInterrupted) {
					interrupted++
				}
			}
			replaced := l.channel == nil
			if replaced != (c.interrupted > 0) || interrupted != c.interrupted {
				t.Errorf("replaced: %t; outcomes %v", replaced, outcomes)
			}
			if until := l.grace.until(); replaced && until.Before(time.Now()) {
				t.Error("the next channel is not trusted for a moment")
			}
		})
	}
}

// What other topics have in flight on a channel that only nacks one is not sent again: it is answered
// first, and nothing more is sent on that channel.
func TestChannel_IsReplacedWhenTheOthersAreAnswered(t *testing.T) {
	l, to := fakeLane()
	l.running.settings.Logger = slog.New(slog.DiscardHandler)
	to.net = &batchConn{limit: 1}
	ch := fakeChannel(l, to)
	ch.opened, ch.renewal = 200, time.Now().Add(-time.Second)
	l.channel = ch
	outcomes := map[int64]error{}
	done := func(m *relay.Message, err error) { outcomes[m.ID] = err }
	ch.put(t, 1, answer{}, done)
	ch.put(t, 2, never{}, done)
	other := ch.flight.all()[1]
	l.step(t.Context())
	next := &relay.Message{ID: 3, Topic: "others"}
	l.inbox.put(newBatch(t.Context(), []*relay.Message{next}, done))
	for range 2 {
		l.step(t.Context())
		if l.channel != ch || ch.unresolved != 1 || l.pending.len() != 1 {
			t.Fatalf("replaced: %t; %d in flight, %d pending", l.channel != ch, ch.unresolved, l.pending.len())
		}
	}
	to.blocked.Store(true) // by an alarm: nothing can be answered, and no other channel be opened
	ch.leaving = ch.leaving.Add(-time.Minute)
	l.step(t.Context())
	if l.channel != ch || outcomes[2] != nil {
		t.Fatalf("replaced while the broker is blocked; outcomes %v", outcomes)
	}
	to.blocked.Store(false)
	to.unblockedAt.Store(time.Now().UnixNano())
	l.step(t.Context())
	if l.channel != ch {
		t.Fatal("replaced as soon as the broker goes on")
	}
	other.confirm = answer{acked: true}
	l.step(t.Context())
	if l.channel != nil || outcomes[2] != nil || len(l.retired) != 1 || !errors.Is(outcomes[3], relay.ErrInterrupted) {
		t.Errorf("replaced: %t; outcomes %v", l.channel == nil, outcomes)
	}
}

// A lane that waited for a channel of a connection that was lost compares nothing with what was
// confirmed there: its own first message would seem to be overtaken.
func TestLane_ForgetsTheMarksOfAConnectionThatGaveItNoChannel(t *testing.T) {
	l, lost := fakeLane()
	l.running.settings.Logger = slog.New(slog.DiscardHandler)
	l.running.settings.topology = wamqp.NewDurablePubSubConfig("", nil)
	lost.mark("orders").reach(5_000_000_000)
	l.inbox.put(newBatch(t.Context(), []*relay.Message{{ID: 1, Topic: "orders"}}, func(*relay.Message, error) {}))
	l.step(t.Context())
	next := &link{running: l.running, calls: newMailbox[call](make(chan struct{}, 1)), marks: map[string]*mark{}}
	l.running.enter(state{link: next})
	l.step(t.Context())
	if asked := next.calls.take(nil); len(asked) != 1 || !asked[0].open || asked[0].declare == nil || asked[0].declare.exchange != "orders" {
		t.Fatalf("%+v is asked for, not a channel and the exchange meanwhile", asked)
	}
	if r := l.route(next, "orders"); r.confirmed != next.mark("orders") {
		t.Errorf("%d bytes count as confirmed, %d are", r.confirmed.Load(), next.mark("orders").Load())
	}
}
