package relaystore

import (
	"database/sql"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// leaseFixture is a store of a test's own.
type leaseFixture struct {
	Store
	db    *sql.DB
	box   *outbox.Outbox
	other Store // on a pool that does not wait long for another writer
}

// eachLeaseStore runs the conformance suite's test on both databases, and on
// PostgreSQL under the isolation levels that a database may have as its default.
func eachLeaseStore(t *testing.T, test func(t *testing.T, s leaseFixture)) {
	t.Parallel()
	open := func(t *testing.T, db, other *sql.DB, cfg oncemill.Config) leaseFixture {
		if err := oncemill.Migrate(t.Context(), db, cfg, migrations...); err != nil {
			t.Fatal(err)
		}
		newBox := func(db *sql.DB) *outbox.Outbox {
			box, err := outbox.New(db, outbox.Config{Database: cfg})
			if err != nil {
				t.Fatal(err)
			}
			return box
		}
		box := newBox(db)
		return leaseFixture{openStore(box), db, box, openStore(newBox(other))}
	}
	for _, level := range testserver.OneOf(t, "read committed", "repeatable read", "serializable") {
		t.Run("PostgreSQL "+level, func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			db := pg.Open(t, "default_transaction_isolation="+level)
			test(t, open(t, db, db, pg.Config))
		})
	}
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		path := migratedSQLite(t)
		other := testserver.OpenSQLite(t, path)
		other.SetMaxOpenConns(1)
		if _, err := other.ExecContext(t.Context(), `pragma busy_timeout = 100`); err != nil {
			t.Fatal(err)
		}
		test(t, open(t, testserver.OpenSQLite(t, path), other, oncemill.Config{}))
	})
}

const (
	longTerm  = time.Minute
	shortTerm = 20 * time.Millisecond
)

func allLanes() []int {
	lanes := make([]int, outbox.Lanes)
	for i := range lanes {
		lanes[i] = i
	}
	return lanes
}

func (s leaseFixture) mustTake(t *testing.T, owner string, lanes []int, most int, term time.Duration) map[int]int64 {
	t.Helper()
	taken, err := s.Take(t.Context(), owner, lanes, most, term)
	if err != nil {
		t.Fatal(err)
	}
	epochs := map[int]int64{}
	for lane, got := range taken {
		epochs[lane] = got.Epoch
	}
	return epochs
}

func (s leaseFixture) mustBeat(t *testing.T, me Identity, lanes []int, term time.Duration) map[int]Renewal {
	t.Helper()
	held, err := s.Beat(t.Context(), me, lanes, term)
	if err != nil {
		t.Fatal(err)
	}
	return held
}

func (s leaseFixture) mustCensus(t *testing.T) (map[int]Lease, map[string]Worker) {
	t.Helper()
	leases, peers, err := s.Census(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	byLane, byOwner := map[int]Lease{}, map[string]Worker{}
	for _, l := range leases {
		byLane[l.Lane] = l
	}
	for _, p := range peers {
		p.Until = 0
		byOwner[p.Owner] = p
	}
	if len(byLane) != outbox.Lanes+1 || len(leases) != len(byLane) || len(peers) != len(byOwner) {
		t.Fatalf("%d leases of %d lanes, %d peers of %d owners", len(leases), len(byLane), len(peers), len(byOwner))
	}
	return byLane, byOwner
}

// awaitExpired waits until the database finds the lanes free.
func (s leaseFixture) awaitExpired(t *testing.T, lanes ...int) {
	t.Helper()
	eventually(t, "the leases expire", func() bool {
		leases, _ := s.mustCensus(t)
		return !slices.ContainsFunc(lanes, func(lane int) bool { return leases[lane].Left >= 0 })
	})
}

// inGuard runs fn in a transaction that the lease guards, with the limits that such
// transactions have.
func (s leaseFixture) inGuard(t *testing.T, lane int, owner string, epoch int64, fn func(held bool)) {
	t.Helper()
	guarded := func(tx *sql.Tx) error {
		held, err := s.Guard(t.Context(), tx, lane, owner, epoch)
		if err != nil {
			t.Fatal(err)
		}
		fn(held)
		return errors.New("roll back")
	}
	if s.box.Config().Database.Dialect == oncemill.PostgreSQL {
		_ = shorttx.Run(t.Context(), s.db, shorttx.For(longTerm), guarded)
		return
	}
	tx, err := s.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	_ = guarded(tx)
}

func (s leaseFixture) guarded(t *testing.T, lane int, owner string, epoch int64) (held bool) {
	t.Helper()
	s.inGuard(t, lane, owner, epoch, func(h bool) { held = h })
	return held
}

// A commit that changes nothing waits for nothing, so that the worker's row is not
// there must not pass for durable.
func TestLeases_AreNotFlushedWithoutARow(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		if s.box.Config().Database.Dialect == oncemill.SQLite {
			return // every commit is durable
		}
		if err := s.Flush(t.Context(), "a"); err == nil {
			t.Error("nothing was written, nothing can be durable")
		}
		if _, err := s.Beat(t.Context(), Identity{Owner: "a", Name: "a", Ready: true}, nil, time.Second); err != nil {
			t.Fatal(err)
		}
		if err := s.Flush(t.Context(), "a"); err != nil {
			t.Error(err)
		}
	})
}
