package relaystore

import (
	"math"
	"slices"
	"testing"

	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/outbox"
)

// setSequence makes id+1 the next id.
func (p *fixture) setSequence(t *testing.T, id int64) {
	t.Helper()
	if p.sqlite() {
		p.exec(t, `update sqlite_sequence set seq = $1 where '"' || name || '"' = '{{outbox}}'`, id)
		return
	}
	p.exec(t, `select setval('{{outbox_id}}', $1)`, id)
}

func TestSequence_IsRefusedAndMendedWhileItIsBehindWhatIsParkedOrDead(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		expectErr(t, CheckSequences(t.Context(), p, outboxqueue.Of(p.box)), nil) // nothing was ever published
		if _, err := RepairSequences(t.Context(), p, outboxqueue.Of(p.box)); err != nil {
			t.Fatal(err)
		}
		key := laneKey(1)
		rows := p.publish(t, slices.Concat(named(key, 2), loose(1))...)
		p.exec(t, `delete from {{outbox_history}}`)
		p.mustFail(t, []Failure{failing(rows[0], FateRetry)})
		p.mustFail(t, []Failure{failing(rows[1], FateHoldKey)})
		p.mustFail(t, []Failure{failing(rows[2], FateDeadLetter)})
		expectErr(t, CheckSequences(t.Context(), p, outboxqueue.Of(p.box)), nil)
		for i, what := range []string{"parked", "held", "dead"} {
			p.setSequence(t, rows[i].ID-1)
			if err := outboxqueue.Of(p.box).Check(t.Context()); err != nil {
				t.Fatalf("%s: the outbox itself knows of it: %v", what, err)
			}
			expectErr(t, CheckSequences(t.Context(), p, outboxqueue.Of(p.box)), outbox.ErrSequenceBehind)
			last, err := RepairSequences(t.Context(), p, outboxqueue.Of(p.box))
			if err != nil || last != rows[2].ID {
				t.Errorf("%s: repaired to %d, %v; want %d", what, last, err, rows[2].ID)
			}
			expectErr(t, CheckSequences(t.Context(), p, outboxqueue.Of(p.box)), nil)
		}
		// What cannot come back does not count.
		p.exec(t, `update {{dead_letters}} set state = 'discarded', closed_at = died_at, held = false`)
		p.exec(t, `delete from {{parked}} where held`)
		p.setSequence(t, rows[0].ID)
		expectErr(t, CheckSequences(t.Context(), p, outboxqueue.Of(p.box)), nil)
	})
}

func TestSequence_OfLettersIsCheckedAndMended(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		if p.sqlite() {
			return // looks at the rows itself
		}
		rows := p.publish(t, loose(3)...)
		p.mustFail(t, []Failure{failing(rows[0], FateDeadLetter), failing(rows[1], FateDeadLetter)})
		p.exec(t, `select setval('{{dead_letters_id}}', 1)`)
		expectErr(t, CheckSequences(t.Context(), p, outboxqueue.Of(p.box)), outbox.ErrSequenceBehind)
		if p.Fail(t.Context(), p.f, []Failure{failing(rows[2], FateDeadLetter)}, nil) == nil {
			t.Error("a letter could be written: the test shows nothing")
		}
		if _, err := RepairSequences(t.Context(), p, outboxqueue.Of(p.box)); err != nil {
			t.Fatal(err)
		}
		expectErr(t, CheckSequences(t.Context(), p, outboxqueue.Of(p.box)), nil)
		p.mustFail(t, []Failure{failing(rows[2], FateDeadLetter)})
	})
}

// Ids that no sequence has given out stop nobody, wherever they are.
func TestSequence_PassesForgedIDsOver(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, slices.Concat(named(laneKey(1), 1), loose(2))...)
		p.mustFail(t, []Failure{failing(rows[0], FateRetry)})
		p.mustFail(t, []Failure{failing(rows[1], FateDeadLetter)})
		p.exec(t, `update {{parked}} set id = $1`, int64(math.MaxInt64))
		p.exec(t, `update {{dead_letters}} set row_id = $1`, int64(math.MaxInt64))
		if !p.sqlite() {
			p.exec(t, `update {{dead_letters}} set id = $1`, int64(math.MaxInt64))
		}
		expectErr(t, CheckSequences(t.Context(), p, outboxqueue.Of(p.box)), nil)
		last, err := RepairSequences(t.Context(), p, outboxqueue.Of(p.box))
		if err != nil || last != rows[2].ID {
			t.Errorf("repaired to %d, %v; want %d", last, err, rows[2].ID)
		}
		expectErr(t, CheckSequences(t.Context(), p, outboxqueue.Of(p.box)), nil)
		p.mustFail(t, []Failure{failing(rows[2], FateDeadLetter)}) // its letter has an id
	})
}
