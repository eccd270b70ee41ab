package status

import (
	"fmt"
	"time"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/steer"
)

// What is still normal. A worker that stops or dies is replaced within its lease, 15 seconds by
// default.
const (
	normalWait = time.Minute
	normalLate = 10 * time.Second
)

// paused says that what waits may be paused.
func (s *Status) paused() string {
	n := 0
	if s.Pauses != nil {
		for _, p := range s.Pauses.Paused {
			if p.Kind != steer.Consumer {
				n++
			}
		}
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("; operators have paused %d topics, sinks, lanes or keys", n)
}

// Problems says in sentences what is wrong, the most urgent first; none if nothing is: parts that
// could not be read, messages that wait for more than a minute, set aside or not, or are due for
// more than ten seconds, no relay, a relay without its broker, lanes without a worker for more than a minute,
// keys that are held, replays that nobody has carried out for a minute, dead letters, and
// requests whose process has ended. Names are quoted and shortened: strangers may have chosen
// them.
func (s *Status) Problems() (problems []string) {
	found := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	for _, part := range s.Silent {
		found("The database gives no answer about the %s: it is silent, or a table is locked.", part)
	}
	for _, part := range s.Forbidden {
		found("This role may not read the tables of the %s; docs/operations.md has the grants.", part)
	}
	if s.empty() {
		found("None of the tables exist; run oncemill migrate.")
	}
	if s.Relay != nil {
		s.relayProblems(found)
	}
	if o := s.Outbox; o != nil {
		if time.Duration(o.Oldest) > normalWait {
			found("A message has waited for %s%s.", o.Oldest, s.paused())
		}
		if time.Duration(o.Late) > normalLate {
			found("A scheduled message is late by %s.", o.Late)
		}
	}
	if r := s.Relay; r != nil && time.Duration(r.OldestSetAside) > normalWait {
		found("A message that was set aside has waited for %s: its topic is unavailable, or nobody takes it.", r.OldestSetAside)
	}
	if r := s.Relay; r != nil && r.HeldKeys.N > 0 {
		found("Dead letters hold %s ordering keys; replay or discard them.", r.HeldKeys)
	}
	if d := s.DeadLetters; d != nil {
		d.problems(found)
	}
	if k := s.Keys; k != nil {
		for _, started := range k.Started {
			if !started.Running {
				found("%s requests have begun and their processes have ended: %s.", started.Count, quoted(started.Endpoint))
			}
		}
	}
	return problems
}

func (s *Status) relayProblems(found func(format string, args ...any)) {
	r, alive := s.Relay, false
	for _, w := range r.Workers {
		if w.Gone > 0 {
			continue
		}
		alive = true
		if !w.Ready && !w.Stopping {
			found("Relay %s cannot work: it does not reach its broker, or its tables are not as it expects.", quoted(w.Name))
		}
	}
	var waiting int64
	if s.Outbox != nil {
		waiting = s.Outbox.Depth.N
	}
	switch {
	case !alive && waiting > 0:
		found("No relay is running, and %s messages wait.", s.Outbox.Depth)
	case !alive && r.Retrying.N > 0:
		found("No relay is running, and %s messages wait for another attempt.", r.Retrying)
	case alive && len(r.Unowned) > 0 && time.Duration(r.Free) > normalWait:
		found("%d lanes have no worker, the first for %s.", len(r.Unowned), r.Free)
	}
}

func (d *DeadLetters) problems(found func(format string, args ...any)) {
	for _, l := range d.Stuck {
		switch {
		case l.Source == dlq.FromConsumer:
			found("%s dead letters of consumer %s have waited to be replayed for %s: no inbox with Config.Replays runs, or its queue does not move.", l.Count, quoted(l.Consumer), l.Oldest)
		case l.State == dlq.StateReplaying:
			found("%s dead letters of the relay have waited to be replayed for %s: no relay works on their lanes.", l.Count, l.Oldest)
		default:
			found("%s dead letters of the relay have waited to be discarded for %s: no relay works on their lanes.", l.Count, l.Oldest)
		}
	}
	var undecided Count
	for _, l := range d.Open {
		if l.State == dlq.StateDead || l.State == dlq.StateHeld {
			undecided.N += l.Count.N
			undecided.AtLeast = undecided.AtLeast || l.Count.AtLeast
		}
	}
	if undecided.N > 0 {
		found("%s dead letters wait for a decision.", undecided)
	}
}

// quoted returns a name in quotes, shortened.
func quoted(name string) string { return text.Quote(name, 40) }

// empty reports whether no part has tables.
func (s *Status) empty() bool {
	return s.Outbox == nil && s.Relay == nil && s.DeadLetters == nil && s.Keys == nil && len(s.Forbidden)+len(s.Silent) == 0
}
