package relay_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// collector confirms messages at once and keeps their topics.
type collector struct {
	mu     sync.Mutex // guards topics
	topics []string
}

func (*collector) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (c *collector) Publish(_ context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range msgs {
		c.topics = append(c.topics, m.Topic)
		done(m, nil)
	}
}

// bounded is a sink that says how much it takes and whether it is ready.
type bounded struct {
	collector
	most  int
	ready bool
}

func (b *bounded) MaxInFlight() int { return b.most }
func (b *bounded) Ready() bool      { return b.ready }

func newRouter(t *testing.T, routes ...relay.Route) *relay.Router {
	t.Helper()
	r, err := relay.NewRouter(routes...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRouter_SendsEachTopicToItsFirstRoute(t *testing.T) {
	t.Parallel()
	patterns := []string{"orders.created", "orders.*.urgent", "orders.#", "*.audit", "a.*.c.#", "plain", "..", "last.#"}
	topics := map[string]string{
		"orders.created":      "orders.created",
		"orders.eu.urgent":    "orders.*.urgent",
		"orders..urgent":      "orders.*.urgent",
		"orders":              "orders.#",
		"orders.":             "orders.#",
		"orders.eu.very.late": "orders.#",
		"orders.audit":        "orders.#",
		"stock.audit":         "*.audit",
		".audit":              "*.audit",
		"a.b.c":               "a.*.c.#",
		"a.b.c.d.e":           "a.*.c.#",
		"plain":               "plain",
		"..":                  "..",
		"a.b":                 "",
		"a.b.d":               "",
		"ordersx":             "",
		"Orders.created":      "",
		"x.stock.audit":       "",
		"plain.":              "",
		"":                    "",
		"*":                   "",
		"#":                   "",
	}
	var routes []relay.Route
	sinks := map[string]*collector{}
	for _, pattern := range patterns {
		sinks[pattern] = &collector{}
		routes = append(routes, relay.Route{Topics: pattern, Sink: sinks[pattern]})
	}
	r := newRouter(t, routes...)
	for topic, want := range topics {
		var got error
		r.Publish(t.Context(), []*relay.Message{{Topic: topic}}, func(_ *relay.Message, err error) { got = err })
		switch {
		case want == "" && (!errors.Is(got, relay.ErrRefused) || !strings.Contains(got.Error(), strconv.Quote(topic))):
			t.Errorf("topic %q: outcome %v, want a refusal that names it", topic, got)
		case want != "" && (got != nil || !slices.Equal(sinks[want].topics, []string{topic})):
			t.Errorf("topic %q: outcome %v; the sink of %q got %q", topic, got, want, sinks[want].topics)
		}
		for _, s := range sinks {
			s.topics = nil
		}
	}
}

func TestRouter_KeepsTheOrderOfEachSinksMessages(t *testing.T) {
	t.Parallel()
	even, odd := &collector{}, &collector{}
	r := newRouter(t, relay.Route{Topics: "even.#", Sink: even}, relay.Route{Topics: "odd.*", Sink: odd}, relay.Route{Topics: "also.#", Sink: even})
	var msgs []*relay.Message
	var wantEven, wantOdd []string
	outcomes := map[*relay.Message]int{}
	for i := range 100 {
		topic := fmt.Sprintf("%s.%d", []string{"even", "odd", "also", "none"}[i*i%7%4], i)
		msgs = append(msgs, &relay.Message{Topic: topic})
		switch {
		case strings.HasPrefix(topic, "odd"):
			wantOdd = append(wantOdd, topic)
		case !strings.HasPrefix(topic, "none"):
			wantEven = append(wantEven, topic)
		}
	}
	given := slices.Clone(msgs)
	r.Publish(t.Context(), msgs, func(m *relay.Message, _ error) { outcomes[m]++ })
	if !slices.Equal(even.topics, wantEven) || !slices.Equal(odd.topics, wantOdd) {
		t.Errorf("even %v, odd %v", even.topics, odd.topics)
	}
	if !slices.Equal(given, msgs) {
		t.Error("the caller's messages were moved")
	}
	for _, m := range msgs {
		if outcomes[m] != 1 {
			t.Errorf("topic %s: %d outcomes", m.Topic, outcomes[m])
		}
	}
}

func TestRouter_IsReadyWhenOneOfItsSinksIs(t *testing.T) {
	t.Parallel()
	here, away, silent := &bounded{ready: true, most: 7}, &bounded{most: 3}, &collector{}
	for _, c := range []struct {
		sinks []relay.Sink
		ready bool
		most  int
	}{
		{[]relay.Sink{here, away}, true, 3},
		{[]relay.Sink{away, here}, true, 3},
		{[]relay.Sink{away}, false, 3},
		{[]relay.Sink{away, silent}, true, 3},
		{[]relay.Sink{here, silent}, true, 7},
	} {
		var routes []relay.Route
		for i, s := range c.sinks {
			routes = append(routes, relay.Route{Topics: fmt.Sprint("topic", i), Sink: s})
		}
		r := newRouter(t, routes...)
		if r.Ready() != c.ready || r.MaxInFlight() != c.most {
			t.Errorf("%d sinks: ready %t, at most %d in flight; want %t, %d", len(c.sinks), r.Ready(), r.MaxInFlight(), c.ready, c.most)
		}
	}
	if r := newRouter(t, relay.Route{Topics: "#", Sink: silent}); r.MaxInFlight() < 1<<16 {
		t.Errorf("a router without bounds takes %d", r.MaxInFlight())
	}
}

// runs counts how often it runs, and ends as it is told to.
type runs struct {
	collector
	count atomic.Int64
	end   func(ctx context.Context) error
}

func (r *runs) Run(ctx context.Context) error {
	r.count.Add(1)
	return r.end(ctx)
}

func TestRouter_RunsEachSinkOnceUntilTheEnd(t *testing.T) {
	t.Parallel()
	cause := errors.New("bad credentials")
	wait := func(ctx context.Context) error { <-ctx.Done(); return nil }
	for name, c := range map[string]struct {
		end  func(context.Context) error
		want string
	}{
		"told to stop": {wait, ""},
		"fails":        {func(context.Context) error { return cause }, "sink 1 of the router, *relay_test.runs: bad credentials"},
		"gives up":     {func(context.Context) error { return nil }, "sink 1 of the router, *relay_test.runs: its Run returned while it was needed"},
	} {
		good, other := &runs{end: wait}, &runs{end: c.end}
		r := newRouter(t, relay.Route{Topics: "a", Sink: good}, relay.Route{Topics: "b", Sink: other}, relay.Route{Topics: "c", Sink: good})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		eventually(t, "both run", func() bool { return good.count.Load() > 0 && other.count.Load() > 0 })
		if c.want == "" {
			cancel()
		}
		err := <-ended
		if got := fmt.Sprint(err); c.want == "" && err != nil || c.want != "" && got != c.want {
			t.Errorf("%s: %v", name, err)
		}
		if n := good.count.Load(); n != 1 {
			t.Errorf("%s: a sink of two routes ran %d times", name, n)
		}
		cancel()
	}
}

type uncomparable struct{ _ []int }

func (uncomparable) Run(context.Context) error { return nil }

func (uncomparable) Publish(context.Context, []*relay.Message, func(*relay.Message, error)) {}

func TestNewRouter_ReportsAllMistakesAtOnce(t *testing.T) {
	t.Parallel()
	s := &collector{}
	_, err := relay.NewRouter(
		relay.Route{Topics: "", Sink: s},
		relay.Route{Topics: "orders*", Sink: s},
		relay.Route{Topics: "#.orders", Sink: s},
		relay.Route{Topics: "a.#.b", Sink: nil},
		relay.Route{Topics: "orders.*", Sink: s},
		relay.Route{Topics: "orders.created", Sink: s}, // covered
		relay.Route{Topics: "orders", Sink: s},
		relay.Route{Topics: "orders.#", Sink: s},
		relay.Route{Topics: "orders.*.x", Sink: s}, // covered
		relay.Route{Topics: "stock.*.#", Sink: uncomparable{}},
		relay.Route{Topics: "stock.*", Sink: s}, // covered
		relay.Route{Topics: "stock.#", Sink: s},
		relay.Route{Topics: "#", Sink: s},
		relay.Route{Topics: "late", Sink: s}, // covered
	)
	var got []string
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		var bad *oncemill.ConfigError
		if !errors.As(e, &bad) {
			t.Fatalf("%v is no ConfigError", e)
		}
		got = append(got, bad.Field)
	}
	var want []string
	for _, field := range []string{"[0].Topics", "[1].Topics", "[2].Topics", "[3].Topics", "[3].Sink", "[5].Topics", "[8].Topics", "[9].Sink", "[10].Topics", "[13].Topics"} {
		want = append(want, "relay.NewRouter routes"+field)
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	if !strings.Contains(err.Error(), `routes[4], "orders.*"`) {
		t.Errorf("the error does not name the route in front: %v", err)
	}
	if _, err := relay.NewRouter(); err == nil {
		t.Error("a router without routes was made")
	}
}

// One relay serves several sinks, and what no route matches does not hold up
// other lanes.
func TestRouter_ServesSeveralSinksInOneRelay(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		box := p.box(t)
		orders, stock := &wire{}, &wire{}
		router := newRouter(
			t,
			relay.Route{Topics: "orders.#", Sink: &sink{name: "orders", wire: orders, handle: slow(1)}},
			relay.Route{Topics: "stock", Sink: relay.FromPublisher(publisherFunc(func(_ string, m *message.Message) error {
				stock.note("stock", m)
				return nil
			}))},
		)
		r := start(t, box, router, unhurried)
		lost := keyed(keysOfLane(3, 1)[0], 0, 1)
		var toOrders, toStock []*message.Message
		for i, m := range append(spread(20, 6), unkeyed(20)...) {
			if key := m.Metadata.Get(outbox.KeyMetadata); outbox.Lane(key, m.UUID) == 3 {
				continue
			}
			if i%3 == 0 {
				toStock = append(toStock, m)
			} else {
				toOrders = append(toOrders, m)
			}
		}
		commitTo(t, box, "nowhere", lost...)
		commitTo(t, box, "orders.created", toOrders...)
		commitTo(t, box, "stock", toStock...)
		orders.await(t, len(toOrders))
		stock.await(t, len(toStock))
		orders.check(t, toOrders, 0)
		stock.check(t, toStock, 0)
		eventually(t, "the message without a route is refused", func() bool { return r.outcomes(t, "refused") > 0 })
		r.stop()
	})
}
