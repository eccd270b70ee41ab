package relay

import (
	"context"
	"database/sql"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/outbox"
)

// identity is how a running worker identifies itself.
type identity struct {
	owner    string // random, new at each start
	name     string
	ready    bool
	stopping bool
}

// leaseStore is what differs between the databases. All times are the
// database's.
type leaseStore interface {
	// beat keeps the worker registered as alive and extends its leases on lanes. It
	// returns all lanes of the worker: the extended ones, those not in lanes, and those
	// that it could not extend because somebody has locked them.
	beat(ctx context.Context, me identity, lanes []int, term time.Duration) (held map[int]renewal, err error)

	// census returns all leases and the workers that are alive.
	census(ctx context.Context) ([]lease, []peer, error)

	// take leases up to most of those lanes that are still free, each with a new epoch.
	// It counts a crash for a lane whose lease another owner let expire with messages
	// that may have been in flight. It does not if two or more other owners have let
	// leases expire: that was an outage of the database.
	take(ctx context.Context, owner string, lanes []int, most int, term time.Duration) (map[int]taken, error)

	// expire ends leases and workers that nobody has renewed since they were seen like
	// this: they date from before the database's clock was set back.
	expire(ctx context.Context, leases []lease, peers []peer) error

	// expireFormer ends the leases and the registration of other workers with the same
	// name.
	expireFormer(ctx context.Context, me identity) error

	// release frees lanes that are still the owner's.
	release(ctx context.Context, owner string, lanes []int) error

	// leave removes the worker from those registered as alive.
	leave(ctx context.Context, owner string) error

	// flush returns when everything that was committed before is durable.
	flush(ctx context.Context, owner string) error

	// guard locks a lease in tx and reports whether it is the owner's, with that epoch.
	guard(ctx context.Context, tx *sql.Tx, lane int, owner string, epoch int64) (bool, error)
}

func newLeaseStore(box *outbox.Outbox) leaseStore {
	names := database.Of(box.Config().Database)
	if names.Dialect == oncemill.SQLite {
		return newSQLiteLeases(box.DB(), names)
	}
	return newPostgresLeases(box.DB(), names)
}

// renewal is a lease as seen by a heartbeat.
type renewal struct {
	epoch   int64
	renewed bool
}

func scanHeld(rows *sql.Rows, err error) (map[int]renewal, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	held := map[int]renewal{}
	for rows.Next() {
		var lane int
		var r renewal
		if err := rows.Scan(&lane, &r.epoch, &r.renewed); err != nil {
			return nil, err
		}
		held[lane] = r
	}
	if err := rows.Err(); err != nil { // the commit may fail after its rows were sent
		return nil, err
	}
	return held, nil
}

// scanLanes reads (lane, epoch) pairs.
func scanLanes(rows *sql.Rows, err error) (map[int]int64, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	lanes := map[int]int64{}
	for rows.Next() {
		var lane int
		var epoch int64
		if err := rows.Scan(&lane, &epoch); err != nil {
			return nil, err
		}
		lanes[lane] = epoch
	}
	if err := rows.Err(); err != nil { // the commit may fail after its rows were sent
		return nil, err
	}
	return lanes, nil
}

// scanTaken reads what take returns.
func scanTaken(rows *sql.Rows, err error) (map[int]taken, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	all := map[int]taken{}
	for rows.Next() {
		var lane int
		var t taken
		if err := rows.Scan(&lane, &t.epoch, &t.crashes, &t.suspect); err != nil {
			return nil, err
		}
		all[lane] = t
	}
	if err := rows.Err(); err != nil { // the commit may fail after its rows were sent
		return nil, err
	}
	return all, nil
}

// scanCensus reads leases and workers from one result: a worker is returned as lane -2.
func scanCensus(rows *sql.Rows, err error) ([]lease, []peer, error) {
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	var leases []lease
	var peers []peer
	for rows.Next() {
		var l lease
		var p peer
		var micros int64
		if err := rows.Scan(&l.lane, &l.owner, &l.epoch, &micros, &l.until, &p.ready, &p.stopping); err != nil {
			return nil, nil, err
		}
		if l.lane == workerRow {
			p.owner, p.until = l.owner, l.until
			peers = append(peers, p)
			continue
		}
		l.left = time.Duration(micros) * time.Microsecond
		leases = append(leases, l)
	}
	return leases, peers, rows.Err()
}

const workerRow = -2

// taken is a lease that was taken.
type taken struct {
	epoch   int64
	crashes int   // takeovers in a row without a window confirmed
	suspect int64 // id that was alone in flight when the former owner died; 0: none
}
