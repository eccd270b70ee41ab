// Package check judges what a run of oncemill verify has left: the answers to the requests,
// the tables, and the messages that a queue of its own received. It shares no code with the
// library.
package check

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// History is everything that a run left.
type History struct {
	Requests   []*Request
	Executions []Execution // committed runs of a request's handler
	Sent       []Sent      // messages of committed transactions
	Wire       []Copy      // in the order of arrival
	Effects    []Effect
	Letters    []Letter
	Topics     []Topic
}

// Topic is a topic, and who handles its messages.
type Topic struct{ Name, Consumer string }

// Request is a request with an idempotency key.
type Request struct {
	Key       string // also of its row in Executions
	MessageID string // that its handler publishes
	RollsBack bool   // its handler always rolls back
	Poison    bool   // its message can never be handled
	Answers   []Answer
	Open      int // copies that got no answer
}

// Answer is the answer to one copy of a request.
type Answer struct {
	Status int
	Body   string // contains the attempt
}

// Execution is a committed run of a request's handler.
type Execution struct{ Request, Attempt string }

// Sent is a message of a committed transaction. Entry has the order of the commits of a key.
type Sent struct {
	Entry                               int64
	MessageID, Topic, Key, Attempt, Sum string
}

// Copy is a message that the broker delivered.
type Copy struct {
	MessageID, Topic, Key, Attempt, Sum string
	ByHand                              bool // published again by the run itself
}

// Effect is what a handler has committed.
type Effect struct {
	Entry                             int64
	Consumer, MessageID, Attempt, Sum string
}

// Letter is a dead letter.
type Letter struct{ Source, Consumer, MessageID, Reason string }

// Promise is the result for one promise.
type Promise struct {
	Name    string   `json:"name"`
	Text    string   `json:"text"`
	Checked int      `json:"checked"` // how many messages, effects or answers
	Broken  []string `json:"broken"`
}

func (p *Promise) broken(format string, args ...any) {
	p.Broken = append(p.Broken, fmt.Sprintf(format, args...))
}

// Figures are what a run has done.
type Figures struct {
	Requests       int `json:"requests"`
	Answers        int `json:"answers"`
	RolledBack     int `json:"rolled_back"`
	Messages       int `json:"messages"`        // committed
	Copies         int `json:"copies"`          // that the broker delivered
	WireDuplicates int `json:"wire_duplicates"` // beyond the first copy of a message
	ByHand         int `json:"by_hand"`         // of these, published by the run itself
	Effects        int `json:"effects"`
	DeadLetters    int `json:"dead_letters"`
}

// Judge returns the promises with what was found against each, and the figures.
func Judge(h *History) ([]Promise, Figures) {
	j := newJudge(h)
	promises := []Promise{j.loss(), j.ghosts(), j.once(), j.order(), j.letters(), j.produced(), j.answers(), j.content()}
	for i := range promises {
		if promises[i].Broken == nil {
			promises[i].Broken = []string{} // in JSON not null
		}
	}
	return promises, j.figures()
}

type judge struct {
	*History
	sent     map[string]Sent
	copies   map[string]int
	effects  map[string][]Effect // by message
	dead     map[string][]Letter // by message
	requests map[string]*Request // by message
	consumer map[string]string   // by topic
}

func newJudge(h *History) *judge {
	j := &judge{
		History: h, sent: map[string]Sent{}, copies: map[string]int{}, effects: map[string][]Effect{},
		dead: map[string][]Letter{}, requests: map[string]*Request{}, consumer: map[string]string{},
	}
	for _, s := range h.Sent {
		j.sent[s.MessageID] = s
	}
	for _, c := range h.Wire {
		j.copies[c.MessageID]++
	}
	for _, e := range h.Effects {
		j.effects[e.MessageID] = append(j.effects[e.MessageID], e)
	}
	for _, l := range h.Letters {
		j.dead[l.MessageID] = append(j.dead[l.MessageID], l)
	}
	for _, r := range h.Requests {
		j.requests[r.MessageID] = r
	}
	for _, t := range h.Topics {
		j.consumer[t.Name] = t.Consumer
	}
	return j
}

func (j *judge) poison(id string) bool { return j.requests[id] != nil && j.requests[id].Poison }

// loss: what was committed reaches the broker and its consumer.
func (j *judge) loss() Promise {
	p := Promise{Name: "no loss", Text: "every committed message reaches the broker, and has an effect or is a dead letter", Checked: len(j.Sent)}
	for _, r := range j.Requests {
		if _, ok := j.sent[r.MessageID]; !ok && len(r.Answers) > 0 {
			p.broken("request %s was answered, and message %s is not in the database", r.Key, r.MessageID)
		}
	}
	for _, s := range j.Sent {
		switch {
		case j.copies[s.MessageID] == 0:
			p.broken("message %s of topic %s was committed and never reached the broker", s.MessageID, s.Topic)
		case len(j.effects[s.MessageID]) == 0 && len(j.dead[s.MessageID]) == 0:
			p.broken("message %s of topic %s reached the broker, and has neither an effect nor a dead letter", s.MessageID, s.Topic)
		}
	}
	return p
}

// ghosts: what was rolled back leaves nothing.
func (j *judge) ghosts() Promise {
	p := Promise{Name: "no ghosts", Text: "no message and no effect comes from a transaction that was rolled back", Checked: len(j.copies) + len(j.effects)}
	for _, r := range j.Requests {
		if _, ok := j.sent[r.MessageID]; ok && r.RollsBack {
			p.broken("request %s was rolled back, and message %s is in the database", r.Key, r.MessageID)
		}
	}
	found := map[string]string{}
	for _, l := range j.Letters {
		found[l.MessageID] = "a dead letter"
	}
	for _, e := range j.Effects {
		found[e.MessageID] = "an effect"
	}
	for _, c := range j.Wire {
		found[c.MessageID] = "on the wire"
	}
	for id, what := range found {
		if _, ok := j.sent[id]; !ok {
			p.broken("message %q is %s, and was never committed", id, what)
		}
	}
	slices.Sort(p.Broken)
	return p
}

// once: a message has one effect, of its own consumer.
func (j *judge) once() Promise {
	p := Promise{Name: "one effect", Text: "each message has one effect of its consumer, however often it is delivered", Checked: len(j.effects)}
	seen := map[string]bool{}
	for _, s := range j.Sent {
		if seen[s.MessageID] {
			p.broken("message %s was committed twice", s.MessageID)
		}
		seen[s.MessageID] = true
		effects := j.effects[s.MessageID]
		if len(effects) > 1 {
			p.broken("message %s has %d effects after %d deliveries or more", s.MessageID, len(effects), j.copies[s.MessageID])
		}
		if len(effects) > 0 && effects[0].Consumer != j.consumer[s.Topic] {
			p.broken("message %s of topic %s has an effect of %s", s.MessageID, s.Topic, effects[0].Consumer)
		}
	}
	return p
}

// order: first copies and first effects of a key have the order of the commits.
func (j *judge) order() Promise {
	p := Promise{Name: "order", Text: "messages of a key reach the broker in the order of their commits; so do the effects of a consumer that has one active process"}
	last := map[string]Sent{}
	follow := func(id, list, what string) {
		s, ok := j.sent[id]
		if !ok || s.Key == "" {
			return // a ghost, or a message without a key
		}
		p.Checked++
		group := list + " " + s.Topic + " " + s.Key
		if before := last[group]; s.Entry < before.Entry {
			p.broken("%s of message %s of key %s came after that of message %s, which was committed later", what, id, s.Key, before.MessageID)
			return
		}
		last[group] = s
	}
	seen := map[string]bool{}
	for _, c := range j.Wire {
		if !seen[c.MessageID] && !j.diedAtRelay(c.MessageID) {
			follow(c.MessageID, "wire", "the first copy")
		}
		seen[c.MessageID] = true
	}
	if len(j.Topics) == 0 {
		return p
	}
	clear(seen)
	effects := slices.Clone(j.Effects)
	slices.SortStableFunc(effects, func(a, b Effect) int { return cmp.Compare(a.Entry, b.Entry) })
	for _, e := range effects {
		if e.Consumer == j.Topics[0].Consumer && !seen[e.MessageID] {
			follow(e.MessageID, "effects", "the effect")
		}
		seen[e.MessageID] = true
	}
	return p
}

func (j *judge) diedAtRelay(id string) bool {
	return slices.ContainsFunc(j.dead[id], func(l Letter) bool { return l.Source == "relay" })
}

// letters: only what cannot be handled is given up, and then it has no effect.
func (j *judge) letters() Promise {
	p := Promise{Name: "dead letters", Text: "a message that cannot be handled becomes one dead letter and has no effect; no other message is given up"}
	for id, letters := range j.dead {
		p.Checked += len(letters)
		first := letters[0]
		switch {
		case len(j.effects[id]) > 0:
			p.broken("message %s is a dead letter and has an effect", id)
		case len(letters) > 1:
			p.broken("message %s has %d dead letters", id, len(letters))
		case !j.poison(id):
			p.broken("message %s was given up by the %s, with the reason %s", id, strings.TrimSpace(first.Source+" "+first.Consumer), first.Reason)
		}
	}
	for id, effects := range j.effects {
		if j.poison(id) && len(effects) > 0 && len(j.dead[id]) == 0 {
			p.broken("message %s cannot be handled, and has an effect", id)
		}
	}
	slices.Sort(p.Broken)
	return p
}

// produced: what a handler sends comes from the run that committed.
func (j *judge) produced() Promise {
	p := Promise{Name: "produced messages", Text: "the message that a handler produces comes from the attempt that committed, and there is one"}
	if len(j.Topics) < 2 {
		return p
	}
	by := map[string]int{}
	for _, s := range j.Sent {
		if s.Topic == j.Topics[1].Name {
			by[s.Attempt]++
		}
	}
	committed := map[string]bool{}
	for _, e := range j.Effects {
		if e.Consumer != j.Topics[0].Consumer {
			continue
		}
		p.Checked++
		committed[e.Attempt] = true
		if n := by[e.Attempt]; n != 1 {
			p.broken("the attempt that handled message %s has sent %d messages", e.MessageID, n)
		}
	}
	for _, c := range j.Wire {
		if s, ok := j.sent[c.MessageID]; ok && s.Topic == j.Topics[1].Name && (c.Attempt != s.Attempt || !committed[c.Attempt]) {
			p.broken("message %s comes from an attempt that did not commit", c.MessageID)
		}
	}
	return p
}

// answers: all copies of a request get the answer of the one run that committed.
func (j *judge) answers() Promise {
	p := Promise{Name: "idempotent answers", Text: "all copies of a request get the same answer, and the request runs once"}
	runs := map[string][]string{}
	for _, e := range j.Executions {
		runs[e.Request] = append(runs[e.Request], e.Attempt)
	}
	for _, r := range j.Requests {
		p.Checked += len(r.Answers)
		attempts := runs[r.Key]
		delete(runs, r.Key)
		switch {
		case r.RollsBack && len(r.Answers) > 0:
			p.broken("request %s was rolled back and answered with %d", r.Key, r.Answers[0].Status)
		case len(attempts) > 1:
			p.broken("request %s took effect %d times", r.Key, len(attempts))
		case len(r.Answers) > 0 && len(attempts) == 0:
			p.broken("request %s was answered and has no effect", r.Key)
		case slices.ContainsFunc(r.Answers, func(a Answer) bool { return a != r.Answers[0] }):
			p.broken("copies of request %s got different answers", r.Key)
		case len(r.Answers) > 0 && !strings.Contains(r.Answers[0].Body, attempts[0]):
			p.broken("the answer to request %s is not that of the attempt that committed", r.Key)
		case r.Open > 0:
			p.broken("%d copies of request %s got no answer", r.Open, r.Key)
		}
	}
	for key := range runs {
		p.broken("request %q took effect, and nobody sent it", key)
	}
	return p
}

// content: payload, topic and key arrive as they were committed.
func (j *judge) content() Promise {
	p := Promise{Name: "content", Text: "payload, topic and key arrive as they were committed", Checked: len(j.Wire) + len(j.Effects)}
	for _, c := range j.Wire {
		if s, ok := j.sent[c.MessageID]; ok && (c.Sum != s.Sum || c.Topic != s.Topic || c.Key != s.Key) {
			p.broken("message %s reached the broker changed", c.MessageID)
		}
	}
	for _, e := range j.Effects {
		if s, ok := j.sent[e.MessageID]; ok && e.Sum != s.Sum {
			p.broken("message %s reached its handler changed", e.MessageID)
		}
	}
	return p
}

func (j *judge) figures() Figures {
	f := Figures{
		Requests: len(j.Requests), Messages: len(j.Sent), Copies: len(j.Wire), WireDuplicates: len(j.Wire) - len(j.copies),
		Effects: len(j.Effects), DeadLetters: len(j.Letters),
	}
	for _, r := range j.Requests {
		f.Answers += len(r.Answers)
		if r.RollsBack {
			f.RolledBack++
		}
	}
	for _, c := range j.Wire {
		if c.ByHand {
			f.ByHand++
		}
	}
	return f
}
