package relaystore

import (
	"slices"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// A former owner, and one that never was, change nothing by any write, whichever
// statement it needs.
func TestRetries_AStaleWriteChangesNothing(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, slices.Concat(named(laneKey(1), 3), named(laneKey(2), 2), loose(1))...)
		p.mustFail(t, []Failure{failing(rows[0], FateRetry), failing(rows[3], FateHoldKey)}, rows[1])
		p.mustFail(t, []Failure{failing(rows[5], FateDeadLetter)})
		row := p.expectDue(t, rows[0].MessageID, rows[1].MessageID)[0]
		held, dead := p.letterOf(t, rows[3]).ID, p.letterOf(t, rows[5]).ID
		p.replay(t, p.letterOf(t, rows[5]))
		p.exec(t, `update {{dead_letters}} set state = 'discarding' where id = $1`, held)
		expectErr(t, p.SetAlone(t.Context(), p.f, rows[2].ID), nil)
		postponed := failing(rows[0], FateRetry)
		postponed.Retrying, postponed.Uncharged, postponed.Attempt, postponed.RetryIn = true, true, row.Attempts, time.Hour
		before := p.dump(t)
		for name, write := range map[string]func(f Fence) error{
			"nothing":              func(f Fence) error { return p.Fail(t.Context(), f, nil, nil) },
			"retry":                func(f Fence) error { return p.Fail(t.Context(), f, []Failure{failing(rows[2], FateRetry)}, nil) },
			"hold key at once":     func(f Fence) error { return p.Fail(t.Context(), f, []Failure{failing(rows[2], FateHoldKey)}, nil) },
			"dead letter":          func(f Fence) error { return p.Fail(t.Context(), f, []Failure{failing(rows[2], FateDeadLetter)}, nil) },
			"follower":             func(f Fence) error { return p.Fail(t.Context(), f, nil, []outboxstore.Ref{rows[2].Ref}) },
			"retry again":          func(f Fence) error { return p.Fail(t.Context(), f, []Failure{failingAgain(row, FateRetry)}, nil) },
			"postpone":             func(f Fence) error { return p.Fail(t.Context(), f, []Failure{postponed}, nil) },
			"hold key":             func(f Fence) error { return p.Fail(t.Context(), f, []Failure{failingAgain(row, FateHoldKey)}, nil) },
			"dead letter retrying": func(f Fence) error { return p.Fail(t.Context(), f, []Failure{failingAgain(row, FateDeadLetter)}, nil) },
			"follow": func(f Fence) error {
				_, err := p.Follow(t.Context(), f, []string{rows[2].Key}, nil, 10)
				return err
			},
			"replay": func(f Fence) error {
				_, _, err := p.CarryOut(t.Context(), f, []int64{dead})
				return err
			},
			"discard": func(f Fence) error {
				if pg, ok := p.Store.(*postgres); ok { // CarryOut comes to it behind another fence
					return pg.fenced(t.Context(), pg.q.Discard, f, pq.Array([]int64{held}))
				}
				_, _, err := p.CarryOut(t.Context(), f, []int64{held})
				return err
			},
			"alone": func(f Fence) error { return p.SetAlone(t.Context(), f, 42) },
		} {
			for _, f := range []Fence{{testLane, p.f.Owner, p.f.Epoch - 1}, {testLane, p.f.Owner, p.f.Epoch + 1}, {testLane, "another", p.f.Epoch}, {testLane + 1, p.f.Owner, p.f.Epoch}} {
				expectErr(t, write(f), ErrFenced)
				if got := p.dump(t); got != before {
					t.Fatalf("%s by %+v changed\n%s to\n%s", name, f, before, got)
				}
			}
		}
		for name, write := range map[string]func() error{
			"crashes of an old epoch":   func() error { return p.ClearCrashes(t.Context(), p.f.Owner, map[int]int64{testLane: p.f.Epoch - 1}) },
			"crashes of another's lane": func() error { return p.ClearCrashes(t.Context(), "another", map[int]int64{testLane: p.f.Epoch}) },
			"release of another's lane": func() error { return p.Release(t.Context(), "another", map[int]int64{testLane: p.f.Epoch}, nil) },
			"release in an old epoch": func() error {
				return p.Release(t.Context(), p.f.Owner, map[int]int64{testLane: p.f.Epoch - 1}, []int{testLane})
			},
			"leave of another": func() error { return p.Leave(t.Context(), "another", nil) },
			"expiry of a lease since kept": func() error {
				return p.Expire(t.Context(), []Lease{{Lane: testLane, Owner: p.f.Owner, Epoch: p.f.Epoch, Until: 1}}, nil)
			},
		} {
			expectErr(t, write(), nil)
			if got := p.dump(t); got != before {
				t.Fatalf("%s changed\n%s to\n%s", name, before, got)
			}
		}
	})
}
