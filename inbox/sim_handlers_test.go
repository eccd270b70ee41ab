package inbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/pgmodel"
)

// run is the handler. It has its effect first, so that what it does then must undo it.
func (s *simulation) run(p *simProcess, c *simCopy, msg *message.Message) error {
	s.mu.Lock()
	s.runs++
	run, deed := s.runs, c.m.always[c.consumer]
	if left := c.m.deeds[c.consumer]; len(left) > 0 {
		deed, c.m.deeds[c.consumer] = left[0], left[1:]
	}
	s.mu.Unlock()
	ctx := msg.Context()
	tx, ok := TxFromContext(ctx)
	if !ok {
		return errors.New("no transaction")
	}
	if _, err := tx.ExecContext(ctx, simAddEffect, s.consumers[c.consumer].cfg.Consumer, msg.UUID, run); err != nil {
		return err
	}
	for i := range 2 { // two messages that touch two rows in different orders may deadlock
		if _, err := tx.ExecContext(ctx, simTouch, fmt.Sprint((c.number+i)%2)); err != nil && deed != deedOverlooks {
			return err
		}
		if c.number%3 == 0 {
			break
		}
	}
	switch deed {
	case deedFails:
		return errors.New("failed")
	case deedFailsForGood:
		return Permanent(errors.New("failed for good"))
	case deedUnavailable:
		return Unavailable(errors.New("unavailable"))
	case deedPanics:
		panic("on purpose")
	case deedExits:
		runtime.Goexit()
	case deedIsSlow:
		<-ctx.Done()
		return ctx.Err()
	case deedOverlooks:
		_, _ = tx.ExecContext(ctx, simFails)
	case deedKills:
		s.mu.Lock()
		s.dying = append(s.dying, p)
		s.mu.Unlock()
		<-p.ctx.Done()
		return p.ctx.Err()
	case deedSucceeds, deeds:
	}
	return nil
}

// letters returns the dead letters, the oldest first.
func (s *simulation) letters() []simLetter {
	var all []simLetter
	for _, row := range s.data.server.Committed("letters") {
		if l, ok := row.(simLetter); ok {
			all = append(all, l)
		}
	}
	slices.SortFunc(all, func(a, b simLetter) int { return int(a.id - b.id) })
	return all
}

// operate replays a dead letter, or sends the message of a replay again. An operator looks
// first whether a message that was too old has had its effect.
func (s *simulation) operate() {
	var mine []simLetter
	for _, l := range s.letters() {
		handled := Reason(l.reason) == ReasonTooOld && s.effectsOf(l.consumer, l.messageID) > 0
		if l.state == string(dlq.StateReplaying) || l.state == string(dlq.StateDead) && !handled {
			mine = append(mine, l)
		}
	}
	if len(mine) == 0 {
		return
	}
	l := mine[s.rng.IntN(len(mine))]
	if l.state == string(dlq.StateDead) {
		l.state, l.token = string(dlq.StateReplaying), fmt.Sprint("token ", l.id)
		s.data.server.Set(pgmodel.Key{Table: "letters", Row: fmt.Sprint(l.id)}, l)
		s.stats["replays"]++
	}
	consumer := slices.IndexFunc(s.consumers, func(in *Inbox) bool { return in.cfg.Consumer == l.consumer })
	c := s.queue(consumer, s.messages[l.messageID])
	letter := &dlq.Letter{ID: l.id, Consumer: l.consumer, MessageID: l.messageID, Payload: l.payload}
	c.replay = replayOf(context.Background(), letter, l.token) // each delivery has its own context
}

func (s *simulation) effectsOf(consumer, id string) (n int) {
	for _, e := range s.data.effects {
		if e.consumer == consumer && e.id == id {
			n++
		}
	}
	return n
}

// quiet reports that everything has ended.
func (s *simulation) quiet() bool {
	waiting, _ := s.data.server.Waiting()
	return waiting == 0 && s.data.server.Open() == 0 && len(s.copies) == 0
}

// problems returns which promises the schedule has broken.
func (s *simulation) problems() (problems []string) {
	bad := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	if !s.quiet() {
		waiting, locked := s.data.server.Waiting()
		bad("does not come to rest: %d copies, %d calls, %d of them for a lock, %d transactions", len(s.copies), waiting, locked, s.data.server.Open())
	}
	for _, text := range s.data.server.Unknown() {
		bad("a statement that the model does not know: %s", text)
	}
	for _, in := range s.consumers {
		consumer := in.cfg.Consumer
		for _, id := range slices.Sorted(maps.Keys(s.messages)) {
			effects, dead, tooOld := s.effectsOf(consumer, id), 0, 0
			for _, l := range s.letters() {
				if l.consumer != consumer || l.messageID != id {
					continue
				}
				switch {
				case Reason(l.reason) == ReasonTooOld:
					tooOld++
				case l.state == string(dlq.StateDead), l.state == string(dlq.StateReplaying):
					dead++
				}
			}
			switch {
			case effects > 1:
				bad("%s: %d effects of %s", consumer, effects, id)
			case effects == 1 && dead > 0:
				bad("%s: %s is dead and has its effect", consumer, id)
			case dead > 1:
				bad("%s: %d dead letters of %s", consumer, dead, id)
			case effects+dead+tooOld == 0 && !s.passed(consumer, id):
				bad("%s: %s is lost", consumer, id)
			}
		}
	}
	return append(problems, s.disorder()...)
}

// passed reports whether a message came after a later one of its key had its effect.
func (s *simulation) passed(consumer, id string) bool {
	m := s.messages[id]
	return s.cfg.Sequence != nil && m.key != "" && slices.ContainsFunc(s.data.effects, func(e simEffect) bool {
		o := s.messages[e.id]
		return e.consumer == consumer && o.key == m.key && o.seq > m.seq
	})
}

// disorder returns which effects are out of the sequence of their key. Replays have no place
// in it.
func (s *simulation) disorder() (problems []string) {
	if s.cfg.Sequence == nil {
		return nil
	}
	replayed := map[string]bool{}
	for _, l := range s.letters() {
		replayed[l.consumer+l.messageID] = true
	}
	last := map[string]int64{}
	for _, e := range s.data.effects {
		m := s.messages[e.id]
		if of := e.consumer + "/" + m.key; m.key != "" && !replayed[e.consumer+e.id] {
			if m.seq < last[of] {
				problems = append(problems, fmt.Sprintf("%s: %s of key %s after number %d", e.consumer, e.id, m.key, last[of]))
			}
			last[of] = m.seq
		}
	}
	return problems
}

// simulate runs the schedule of a seed to its end.
func (w *simWorld) simulate(seed uint64) *simulation {
	s := w.newSimulation(seed)
	for range 40 + s.rng.IntN(120) {
		s.step()
	}
	s.faults = false
	s.data.server.Restart()
	for i := 0; i < 20_000 && !s.quiet(); i++ {
		s.step()
	}
	for _, p := range s.processes {
		p.stop()
	}
	// One that does not come to rest leaves nothing behind either.
	for waiting := 1; waiting > 0 || s.handled() > 0; waiting, _ = s.data.server.Waiting() {
		s.data.server.Next(s.rng, false)
		time.Sleep(time.Second)
		synctest.Wait()
	}
	return s
}

// handled returns how many deliveries have not ended.
func (s *simulation) handled() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running
}
