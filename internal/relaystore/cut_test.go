package relaystore

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/lib/pq"
	sqlitedriver "modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// scene is what the writes of the test find: rows of every kind.
type scene struct {
	*fixture
	rows    []outboxstore.Row
	due     []Row
	letters []int64
}

const (
	sceneMessages  = 16
	manyStatements = 1000
)

// newScene makes the tables anew.
func newScene(t *testing.T, p *fixture) *scene {
	t.Helper()
	for _, table := range []string{"outbox", "parked", "dead_letters", "outbox_history"} {
		p.exec(t, `delete from {{`+table+`}}`)
	}
	p.setSequence(t, 1)
	a, b, c, d := laneKey(1), laneKey(2), laneKey(3), laneKey(4)
	s := &scene{fixture: p}
	s.rows = p.publish(t, slices.Concat(named(a, 3), named(b, 3), named(c, 3), named(d, 3), loose(4))...)
	// b and c have rows in parked, c's first is held, d's first is dead.
	p.mustFail(t, []Failure{failing(s.rows[3], FateRetry), failing(s.rows[6], FateHoldKey), failing(s.rows[9], FateDeadLetter), failing(s.rows[12], FateRetry), failing(s.rows[13], FateHoldKey)},
		slices.Concat(s.rows[4:5], s.rows[7:8])...)
	s.due, _ = p.mustDue(t, 10, 10)
	letters, err := dlq.New(p.db, dlq.Config{Database: p.box.Config().Database})
	if err != nil {
		t.Fatal(err)
	}
	open, err := letters.List(t.Context(), dlq.Filter{OldestFirst: true})
	if err != nil || len(open) != 3 {
		t.Fatalf("letters %v, %v", open, err)
	}
	act := dlq.Act{By: "ada", Reason: "test"}
	for _, l := range open {
		if l.RowID == s.rows[13].ID {
			err = errors.Join(err, letters.Discard(t.Context(), l.ID, act))
		} else {
			_, wrong := letters.Replay(t.Context(), []int64{l.ID}, act)
			err = errors.Join(err, wrong)
		}
		s.letters = append(s.letters, l.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	expectErr(t, p.SetAlone(t.Context(), p.f, s.rows[0].ID), nil)
	return s
}

// writes are all that a store can do.
var writes = map[string]func(s *scene, t *testing.T) error{
	"fail": func(s *scene, t *testing.T) error {
		a, b := s.rows[0:3], s.rows[3:6]
		return s.Fail(t.Context(), s.f, []Failure{
			failing(a[0], FateRetry), failing(s.rows[14], FateDeadLetter), failing(s.rows[15], FateHoldKey),
			failingAgain(Row{Row: b[0], Attempts: 1}, FateDeadLetter), failingAgain(Row{Row: s.rows[12], Attempts: 1}, FateRetry),
		}, refsOf(slices.Concat(a[1:], b[2:])))
	},
	"hold": func(s *scene, t *testing.T) error {
		return s.Fail(t.Context(), s.f, []Failure{failingAgain(Row{Row: s.rows[3], Attempts: 1}, FateHoldKey)}, nil)
	},
	"settle": func(s *scene, t *testing.T) error {
		_, err := s.Remove(t.Context(), []outboxstore.Ref{s.rows[3].Ref, s.rows[6].Ref, s.rows[12].Ref})
		return err
	},
	"carry out": func(s *scene, t *testing.T) error {
		_, _, err := s.CarryOut(t.Context(), s.f, s.letters)
		return err
	},
	"alone": func(s *scene, t *testing.T) error { return s.SetAlone(t.Context(), s.f, 0) },
	"calm": func(s *scene, t *testing.T) error {
		return s.ClearCrashes(t.Context(), s.f.Owner, map[int]int64{testLane: s.f.Epoch})
	},
}

// A worker can die, and its connection be lost, before each statement and after
// each commit. What is left is right each time, and doing the write again ends as
// if nothing had happened.
func TestRetries_ACutAtEachStatementLeavesTheTablesRight(t *testing.T) {
	t.Parallel()
	test := func(t *testing.T, p *fixture, c *cutter) {
		newScene(t, p) // from here on the ids are the same each time
		for name, write := range writes {
			s := newScene(t, p)
			c.cut(manyStatements, false)
			expectErr(t, write(s, t), nil)
			total := manyStatements - int(c.at.Load())
			c.cut(0, false)
			want := p.dump(t)
			expectErr(t, write(s, t), nil) // twice
			if got := p.dump(t); got != want {
				t.Errorf("%s, twice:\n%s want\n%s", name, got, want)
			}
			for _, after := range []bool{false, true} {
				for n := 1; n <= total; n++ {
					if p.sqlite() && n > 2 && n < total-1 && n != total/2 {
						continue // one transaction
					}
					s := newScene(t, p)
					before, cuts := p.dump(t), c.cuts.Load()
					c.cut(n, after)
					err := write(s, t)
					c.cut(0, false)
					if c.cuts.Load() == cuts {
						t.Errorf("%s: no cut at statement %d of %d", name, n, total)
					}
					what := fmt.Sprintf("%s, cut at statement %d (after it: %v)", name, n, after)
					if err == nil {
						t.Errorf("%s: no error", what)
					}
					if got := p.dump(t); name != "fail" && name != "carry out" && got != before && got != want {
						t.Errorf("%s left\n%s, which is neither\n%s nor\n%s", what, got, before, want)
					}
					p.expectSound(t, sceneMessages, 0)
					expectErr(t, write(s, t), nil)
					if got := p.dump(t); got != want {
						t.Errorf("%s and done again:\n%s want\n%s", what, got, want)
					}
				}
			}
		}
	}
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		pg := testserver.Postgres(t)
		db, c := openCut(t, &pq.Driver{}, pg.DSN+"&binary_parameters=yes")
		test(t, newFixture(t, db, pg.Config, time.Hour), c)
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		db, c := openCut(t, &sqlitedriver.Driver{}, oncemill.SQLiteDSN(filepath.Join(t.TempDir(), "test.db")))
		test(t, newFixture(t, db, oncemill.Config{Dialect: oncemill.SQLite}, time.Hour), c)
	})
}
