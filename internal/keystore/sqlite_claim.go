package keystore

import (
	"context"
	"database/sql"
	"time"

	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

// Claim implements [Store]. It reads first, so that a duplicate does not wait for the
// writer.
func (s *sqlite) Claim(ctx context.Context, c Claim) (Record, bool, error) {
	if err := s.prepared.ready(ctx); err != nil {
		return Record{}, false, err
	}
	if record, found, err := s.Find(ctx, c.ID); err != nil || found {
		return record, found, err
	}
	return s.claimInTurn(ctx, c)
}

// claimInTurn claims a key when it is its turn to write. The writer it waits for may be
// the handler of a copy that was slightly faster, and whose claim did not exist at the
// first look. So it looks again while it waits, and gives its turn up if another owner
// has the key. It returns the record that exists then.
func (s *sqlite) claimInTurn(ctx context.Context, c Claim) (Record, bool, error) {
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	other := make(chan Record, 1)
	go func() {
		defer close(other)
		if r, found := s.watch(waiting, c); found {
			other <- r
			stop()
		}
	}()
	record, found, err := s.writeAndFind(waiting, c.ID, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(waiting, s.q.Purge, c.ID[:]); err != nil {
			return err
		}
		_, err := tx.ExecContext(waiting, s.q.Claim, claimArgs(c)...)
		return err
	})
	stop()
	r, seen := <-other
	if err == nil || !seen {
		return record, found, err // what was committed counts, whatever has been seen before
	}
	return r, true, nil
}

// watch polls the key until another owner has it, at first often.
func (s *sqlite) watch(ctx context.Context, c Claim) (Record, bool) {
	const least, most = 10 * time.Millisecond, 400 * time.Millisecond
	for pause := least; ; pause = min(2*pause, most) {
		if !sleep.For(ctx, pause) {
			return Record{}, false
		}
		if r, found, err := s.Find(ctx, c.ID); err == nil && found && r.Owner.Token != c.Token {
			return r, true
		}
	}
}

// writeAndFind writes in a transaction, and returns the record that exists afterwards. If
// it has committed it reports that, even if ctx has ended meanwhile.
func (s *sqlite) writeAndFind(ctx context.Context, id ID, do func(tx *sql.Tx) error) (record Record, found bool, err error) {
	err = sqlitetx.Write(ctx, s.db, turn.Caller, func(tx *sql.Tx) (err error) {
		if err := do(tx); err != nil {
			return err
		}
		record, found, err = scanRow(id, tx.QueryRowContext(ctx, s.q.Find, id[:]))
		return err
	})
	if err != nil {
		return Record{}, false, err
	}
	return record, found, nil
}
