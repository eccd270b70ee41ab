package status

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// What is still normal. A worker that stops or dies is replaced within its lease, 15 seconds by
// default.
const (
	normalWait = time.Minute
	normalLate = 10 * time.Second
)

// Problems says in sentences what is wrong, the most urgent first; none if nothing is: missing
// tables, messages that wait for more than a minute or are due for more than ten seconds, lanes
// without a worker, keys that are held, dead letters, and requests whose process has ended.
func (s *Status) Problems() (problems []string) {
	found := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	if s.empty() {
		found("None of the tables exist; run oncemill migrate.")
	}
	if r := s.Relay; r != nil {
		alive := slices.ContainsFunc(r.Workers, func(w Worker) bool { return w.Gone == 0 })
		switch {
		case !alive && s.Outbox != nil && s.Outbox.Depth.N > 0:
			found("No relay is running, and %s messages wait.", s.Outbox.Depth)
		case alive && len(r.Unowned) > 0:
			found("No worker has lane %s.", strings.Trim(strings.ReplaceAll(fmt.Sprint(r.Unowned), " ", ", "), "[]"))
		}
	}
	if o := s.Outbox; o != nil {
		if time.Duration(o.Oldest) > normalWait {
			found("A message has waited for %s.", o.Oldest)
		}
		if time.Duration(o.Late) > normalLate {
			found("A scheduled message is late by %s.", o.Late)
		}
	}
	if r := s.Relay; r != nil && r.HeldKeys.N > 0 {
		found("Dead letters hold %s ordering keys; replay or discard them.", r.HeldKeys)
	}
	if d := s.DeadLetters; d != nil && d.Total.N > 0 {
		found("%s dead letters wait for a decision.", d.Total)
	}
	if k := s.Keys; k != nil {
		for _, started := range k.Started {
			if !started.Running {
				found("%s requests of %s have begun and their processes have ended.", started.Count, started.Endpoint)
			}
		}
	}
	return problems
}

// empty reports whether no part has tables.
func (s *Status) empty() bool {
	return s.Outbox == nil && s.Relay == nil && s.DeadLetters == nil && s.Keys == nil && len(s.Forbidden) == 0
}
