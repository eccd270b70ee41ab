package doctorstore

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

type postgres struct {
	tables
	where database.Database
	q     postgresText
}

type postgresText struct {
	OverdueKey, OldestID, OldestHistory, OldestClosed       string
	Server, ForgetfulRoles, Snapshots, IdleSlots            string
	CachedSequences, WithoutAutovacuum, Subscribed, Indexes string
	Hidden                                                  string
	Mark, Marked                                            string
}

func newPostgres(db *sql.DB, where database.Database) *postgres {
	s := &postgres{where: where}
	statements.Load(&s.q, files, "postgresql", where.Names)
	s.db = db
	s.text.OverdueKey, s.text.OldestID, s.text.OldestHistory, s.text.OldestClosed = s.q.OverdueKey, s.q.OldestID, s.q.OldestHistory, s.q.OldestClosed
	return s
}

func (s *postgres) Server(ctx context.Context) (v Server, err error) {
	var now int64
	err = s.db.QueryRowContext(ctx, s.q.Server).Scan(&now, &v.SynchronousCommit, &v.Isolation, &v.Autovacuum, &v.TrackCounts,
		&v.Fsync, &v.FullPageWrites, &v.Standby, &v.Standbys, &v.Synchronous)
	v.Now = time.UnixMicro(now)
	return v, err
}

func (s *postgres) ForgetfulRoles(ctx context.Context) ([]Setting, error) {
	return list(ctx, s.db, func(rows *sql.Rows, v *Setting) error { return rows.Scan(&v.Role, &v.Value, &v.Reset) }, s.q.ForgetfulRoles, Most)
}

func (s *postgres) Snapshots(ctx context.Context, olderThan time.Duration) ([]Snapshot, error) {
	return list(ctx, s.db, func(rows *sql.Rows, v *Snapshot) error {
		var age int64
		err := rows.Scan(&v.Kind, &v.Name, &v.PID, &age)
		v.Age = time.Duration(age) * time.Microsecond
		return err
	}, s.q.Snapshots, olderThan.Microseconds(), Most)
}

func (s *postgres) IdleSlots(ctx context.Context) ([]string, error) {
	return list(ctx, s.db, name, s.q.IdleSlots, Most)
}

func (s *postgres) CachedSequences(ctx context.Context) ([]Sequence, error) {
	return list(ctx, s.db, func(rows *sql.Rows, v *Sequence) error { return rows.Scan(&v.Name, &v.Cache) }, s.q.CachedSequences)
}

func (s *postgres) WithoutAutovacuum(ctx context.Context) ([]string, error) {
	return list(ctx, s.db, name, s.q.WithoutAutovacuum)
}

func (s *postgres) Subscribed(ctx context.Context) ([]string, error) {
	return list(ctx, s.db, name, s.q.Subscribed)
}

func (s *postgres) Hidden(ctx context.Context) ([]string, error) {
	return list(ctx, s.db, name, s.q.Hidden)
}

func (s *postgres) MissingIndexes(ctx context.Context, sets []oncemill.Migrations) ([]Index, error) {
	all, err := indexesOf(s.where, sets)
	if err != nil {
		return nil, err
	}
	there, err := list(ctx, s.db, name, s.q.Indexes, pq.Array(namesOf(all)))
	return without(all, there), err
}

const (
	pooledTries = 4
	pooledWait  = 500 * time.Millisecond // for a connection of the pool
)

// Pooled marks a session of the server, and looks whether another client gets that session, or
// this client another one. Transactions that stay open take the sessions of a pooler meanwhile.
func (s *postgres) Pooled(ctx context.Context) (pooled bool, err error) {
	mark := rand.Text()
	self, err := s.conn(ctx)
	if err != nil || self == nil {
		return false, err
	}
	defer self.Close() //nolint:errcheck // it was only read from
	if _, err := self.ExecContext(ctx, s.q.Mark, mark); err != nil {
		return false, err
	}
	for range pooledTries {
		other, err := s.conn(ctx)
		if err != nil || other == nil {
			break // the pool has no more
		}
		defer other.Close() //nolint:errcheck // it was only read from
		tx, err := other.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
		if err != nil {
			return false, err
		}
		defer tx.Rollback() //nolint:errcheck // it was only read from
		var seen, own string
		err = errors.Join(tx.QueryRowContext(ctx, s.q.Marked).Scan(&seen), self.QueryRowContext(ctx, s.q.Marked).Scan(&own))
		if err != nil {
			return false, err
		}
		if seen == mark || own != mark {
			return true, nil
		}
	}
	_, err = self.ExecContext(ctx, s.q.Mark, "")
	return false, err
}

// conn returns a connection, nil if the pool has none left.
func (s *postgres) conn(ctx context.Context) (*sql.Conn, error) {
	wait, cancel := context.WithTimeout(ctx, pooledWait)
	defer cancel()
	conn, err := s.db.Conn(wait)
	if err != nil && ctx.Err() == nil && wait.Err() != nil {
		return nil, nil
	}
	return conn, err
}
