package check_test

import (
	"slices"
	"testing"

	"github.com/oncemill/oncemill/cmd/oncemill/internal/verify/check"
)

// sound is the history of a run that kept all promises: two messages of one key, one of which
// was delivered twice, a request that rolled back, and a message that cannot be handled.
func sound() *check.History {
	answer := func(attempt string) check.Answer { return check.Answer{Status: 201, Body: attempt} }
	return &check.History{
		Topics: []check.Topic{{Name: "orders", Consumer: "first"}, {Name: "receipts", Consumer: "second"}},
		Requests: []*check.Request{
			{Key: "r1", MessageID: "m1", Answers: []check.Answer{answer("a1"), answer("a1")}},
			{Key: "r2", MessageID: "m2", Answers: []check.Answer{answer("a2")}},
			{Key: "r3", MessageID: "m3", RollsBack: true},
			{Key: "r4", MessageID: "m4", Poison: true, Answers: []check.Answer{answer("a4")}},
		},
		Executions: []check.Execution{{Request: "r1", Attempt: "a1"}, {Request: "r2", Attempt: "a2"}, {Request: "r4", Attempt: "a4"}},
		Sent: []check.Sent{
			{Entry: 1, MessageID: "m1", Topic: "orders", Key: "k", Attempt: "a1", Sum: "s1"},
			{Entry: 2, MessageID: "m2", Topic: "orders", Key: "k", Attempt: "a2", Sum: "s2"},
			{Entry: 3, MessageID: "m4", Topic: "orders", Key: "other", Attempt: "a4", Sum: "s4"},
			{Entry: 4, MessageID: "n1", Topic: "receipts", Key: "k", Attempt: "h1", Sum: "t1"},
			{Entry: 5, MessageID: "n2", Topic: "receipts", Key: "k", Attempt: "h2", Sum: "t2"},
		},
		Wire: []check.Copy{
			{MessageID: "m1", Topic: "orders", Key: "k", Attempt: "a1", Sum: "s1"},
			{MessageID: "m2", Topic: "orders", Key: "k", Attempt: "a2", Sum: "s2"},
			{MessageID: "m1", Topic: "orders", Key: "k", Attempt: "a1", Sum: "s1", ByHand: true},
			{MessageID: "m4", Topic: "orders", Key: "other", Attempt: "a4", Sum: "s4"},
			{MessageID: "n1", Topic: "receipts", Key: "k", Attempt: "h1", Sum: "t1"},
			{MessageID: "n2", Topic: "receipts", Key: "k", Attempt: "h2", Sum: "t2"},
		},
		Effects: []check.Effect{
			{Entry: 1, Consumer: "first", MessageID: "m1", Attempt: "h1", Sum: "s1"},
			{Entry: 2, Consumer: "first", MessageID: "m2", Attempt: "h2", Sum: "s2"},
			{Entry: 3, Consumer: "second", MessageID: "n2", Attempt: "i2", Sum: "t2"}, // its order is not promised
			{Entry: 4, Consumer: "second", MessageID: "n1", Attempt: "i1", Sum: "t1"},
		},
		Letters: []check.Letter{{Source: "consumer", Consumer: "first", MessageID: "m4", Reason: "permanent"}},
	}
}

func broken(h *check.History) (names []string) {
	promises, _ := check.Judge(h)
	for _, p := range promises {
		if len(p.Broken) > 0 {
			names = append(names, p.Name)
		}
	}
	return names
}

func TestJudge_AcceptsASoundHistory(t *testing.T) {
	t.Parallel()
	promises, figures := check.Judge(sound())
	for _, p := range promises {
		if len(p.Broken) > 0 {
			t.Errorf("%s: %q", p.Name, p.Broken)
		}
		if p.Checked == 0 {
			t.Errorf("%s: nothing was checked", p.Name)
		}
	}
	want := check.Figures{Requests: 4, Answers: 4, RolledBack: 1, Messages: 5, Copies: 6, WireDuplicates: 1, ByHand: 1, Effects: 4, DeadLetters: 1}
	if figures != want {
		t.Errorf("figures: %+v, want %+v", figures, want)
	}
}

// Each history is sound but for one fault, which the promises that it breaks have to name. A
// fault may break more than one.
func TestJudge_NamesTheBrokenPromise(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spoil func(h *check.History)
		want  []string
	}{
		"a message never reaches the broker": {func(h *check.History) { h.Wire = h.Wire[:5] }, []string{"no loss"}},
		"a message has no effect":            {func(h *check.History) { h.Effects = h.Effects[:3] }, []string{"no loss"}},
		"a poisoned message has no letter":   {func(h *check.History) { h.Letters = nil }, []string{"no loss"}},
		"an answered request has no message": {func(h *check.History) {
			h.Requests = append(h.Requests, &check.Request{Key: "r5", MessageID: "m5", Answers: []check.Answer{{Status: 201, Body: "a5"}}})
			h.Executions = append(h.Executions, check.Execution{Request: "r5", Attempt: "a5"})
		}, []string{"no loss"}},
		"a rolled back message is on the wire": {func(h *check.History) {
			h.Wire = append(h.Wire, check.Copy{MessageID: "m3", Topic: "orders"})
		}, []string{"no ghosts"}},
		"a rolled back message has an effect": {func(h *check.History) {
			h.Effects = append(h.Effects, check.Effect{Entry: 5, Consumer: "second", MessageID: "m3"})
		}, []string{"no ghosts"}},
		"a rolled back message is a dead letter": {func(h *check.History) {
			h.Letters = append(h.Letters, check.Letter{Source: "consumer", MessageID: "m3"})
		}, []string{"no ghosts", "dead letters"}},
		"a rolled back message is committed": {func(h *check.History) { h.Requests[1].RollsBack, h.Requests[1].Answers = true, nil }, []string{"no ghosts"}},
		"two effects": {func(h *check.History) {
			h.Effects = append(h.Effects, check.Effect{Entry: 5, Consumer: "second", MessageID: "n1", Attempt: "i3", Sum: "t1"})
		}, []string{"one effect"}},
		"an effect of another consumer": {func(h *check.History) { h.Effects[3].Consumer = "third" }, []string{"one effect"}},
		"committed twice": {func(h *check.History) {
			h.Sent = append(h.Sent, check.Sent{Entry: 6, MessageID: "n2", Topic: "receipts", Key: "k", Attempt: "h9", Sum: "t2"})
		}, []string{"one effect", "produced messages"}},
		"overtaken on the wire": {func(h *check.History) { h.Wire[0], h.Wire[1] = h.Wire[1], h.Wire[0] }, []string{"order"}},
		"overtaken in effects": {func(h *check.History) {
			h.Effects[0].Entry, h.Effects[1].Entry = 2, 1
		}, []string{"order"}},
		"dead and handled": {func(h *check.History) {
			h.Letters = append(h.Letters, check.Letter{Source: "consumer", Consumer: "second", MessageID: "n1"})
		}, []string{"dead letters"}},
		"two dead letters": {func(h *check.History) { h.Letters = append(h.Letters, h.Letters[0]) }, []string{"dead letters"}},
		"given up without need": {func(h *check.History) {
			h.Effects = h.Effects[:3]
			h.Letters = append(h.Letters, check.Letter{Source: "consumer", Consumer: "second", MessageID: "n1"})
		}, []string{"dead letters"}},
		"a poisoned message is handled": {func(h *check.History) {
			h.Letters = nil
			h.Effects = append(h.Effects, check.Effect{Entry: 5, Consumer: "first", MessageID: "m4", Attempt: "h4", Sum: "s4"})
			h.Sent = append(h.Sent, check.Sent{Entry: 6, MessageID: "n4", Topic: "receipts", Key: "other", Attempt: "h4"})
			h.Wire = append(h.Wire, check.Copy{MessageID: "n4", Topic: "receipts", Key: "other", Attempt: "h4"})
			h.Effects = append(h.Effects, check.Effect{Entry: 6, Consumer: "second", MessageID: "n4"})
		}, []string{"dead letters"}},
		"produced by an attempt that failed": {func(h *check.History) { h.Wire[4].Attempt = "h0" }, []string{"produced messages"}},
		"produced twice": {func(h *check.History) {
			h.Sent = append(h.Sent, check.Sent{Entry: 6, MessageID: "n3", Topic: "receipts", Key: "k", Attempt: "h2"})
			h.Wire = append(h.Wire, check.Copy{MessageID: "n3", Topic: "receipts", Key: "k", Attempt: "h2"})
			h.Effects = append(h.Effects, check.Effect{Entry: 5, Consumer: "second", MessageID: "n3"})
		}, []string{"produced messages"}},
		"different answers":          {func(h *check.History) { h.Requests[0].Answers[1].Body = "a0" }, []string{"idempotent answers"}},
		"another status":             {func(h *check.History) { h.Requests[0].Answers[1].Status = 422 }, []string{"idempotent answers"}},
		"the answer of another run":  {func(h *check.History) { h.Requests[1].Answers[0].Body = "a0" }, []string{"idempotent answers"}},
		"no answer":                  {func(h *check.History) { h.Requests[1].Open = 1 }, []string{"idempotent answers"}},
		"an answer to a rolled back": {func(h *check.History) { h.Requests[2].Answers = []check.Answer{{Status: 201}} }, []string{"no loss", "idempotent answers"}},
		"ran twice": {func(h *check.History) {
			h.Executions = append(h.Executions, check.Execution{Request: "r2", Attempt: "b2"})
		}, []string{"idempotent answers"}},
		"answered without an effect":  {func(h *check.History) { h.Executions = h.Executions[:2] }, []string{"idempotent answers"}},
		"an effect that nobody wants": {func(h *check.History) { h.Executions = append(h.Executions, check.Execution{Request: "r9"}) }, []string{"idempotent answers"}},
		"damaged on the wire":         {func(h *check.History) { h.Wire[2].Sum = "x" }, []string{"content"}},
		"another key on the wire":     {func(h *check.History) { h.Wire[5].Key = "x" }, []string{"content"}},
		"another topic on the wire":   {func(h *check.History) { h.Wire[3].Topic = "receipts" }, []string{"content"}},
		"damaged in the handler":      {func(h *check.History) { h.Effects[2].Sum = "x" }, []string{"content"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := sound()
			c.spoil(h)
			if got := broken(h); !slices.Equal(got, c.want) {
				t.Errorf("broken: %q, want %q", got, c.want)
			}
		})
	}
}
