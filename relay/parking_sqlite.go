package relay

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/database"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
	"github.com/oncemill/oncemill/outbox"
)

// sqliteParking writes in transactions that are writers from their start. There is one
// writer at a time, so reading the row of the lease is the fence.
type sqliteParking struct {
	box     *outbox.Outbox
	db      *sql.DB
	history bool
	t       sqliteParkingTexts

	commandTexts [outbox.Lanes + 1]string // by the number of lanes
}

func newSQLiteParking(box *outbox.Outbox) *sqliteParking {
	names := database.Of(box.Config().Database)
	s := &sqliteParking{box: box, db: box.DB(), history: box.Config().History > 0, t: newSQLiteParkingTexts(names)}
	for n := 1; n <= outbox.Lanes; n++ {
		s.commandTexts[n] = commandsOf(n, names.Expand(sqliteCommands))
	}
	return s
}

// commandsOf repeats a limited subselect for n lanes, whose numbers are the parameters
// from the second, and limits the result.
func commandsOf(n int, text string) string {
	parts := make([]string, n)
	for i := range parts {
		parts[i] = strings.ReplaceAll(text, "?lane", fmt.Sprintf("?%d", 2+i))
	}
	return "select id, lane, key from (" + strings.Join(parts, "\nunion all") + "\n) order by row_id, id limit ?1"
}

// fenced runs fn in transactions in which the lease is the owner's, like
// [sqlitetx.WriteSlices]. In each of them it then sets the times of the heads of the
// keys that fn has touched.
func (s *sqliteParking) fenced(ctx context.Context, f fence, fn func(tx *sql.Tx, touched touchedKeys, over func() bool) (more bool, err error)) error {
	return sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		var holds int
		if err := tx.QueryRowContext(ctx, s.t.fence, f.lane, f.owner, f.epoch).Scan(&holds); err != nil {
			return false, err
		}
		if holds == 0 {
			return false, errFenced
		}
		touched := touchedKeys{}
		if more, err = fn(tx, touched, over); err != nil {
			return false, err
		}
		return more, s.straighten(ctx, tx, touched)
	})
}

// some handles elements one by one, at least one, until over reports that it is enough,
// and returns the rest. A row may be of any size, so the elapsed time decides how many.
func some[T any](list []T, over func() bool, do func(T) error) (left []T, err error) {
	for i, one := range list {
		if over() {
			return list[i:], nil
		}
		if err := do(one); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

type touchedKeys map[parkedKey]bool

func (k touchedKeys) add(lane int, key string) {
	if key != "" {
		k[parkedKey{lane, key}] = true
	}
}

// straighten gives the first row of each key a time, unless it has one or is held, and
// removes it from the others.
func (s *sqliteParking) straighten(ctx context.Context, tx *sql.Tx, touched touchedKeys) error {
	for k := range touched {
		for _, text := range []string{s.t.takeTime, s.t.giveTime} {
			if _, err := tx.ExecContext(ctx, text, k.lane, k.key); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *sqliteParking) fail(ctx context.Context, f fence, failures []failure, followers []outboxstore.Ref) error {
	err := s.fenced(ctx, f, func(tx *sql.Tx, touched touchedKeys, over func() bool) (more bool, err error) {
		failures, err = some(failures, over, func(one failure) error { return s.failOne(ctx, tx, f, one, touched) })
		if err != nil || len(failures) > 0 {
			return true, err
		}
		followers, err = some(followers, over, func(ref outboxstore.Ref) error {
			ref.Lane = f.lane
			return s.followOne(ctx, tx, ref, touched)
		})
		return len(followers) > 0, err
	})
	if err != nil {
		return fmt.Errorf("write failures: %w", err)
	}
	return nil
}

func (s *sqliteParking) failOne(ctx context.Context, tx *sql.Tx, f fence, one failure, touched touchedKeys) error {
	one.Lane, one.class, one.text = f.lane, clean(one.class), clean(one.text)
	write := s.failInOutbox
	if one.parked {
		write = s.failInParked
	}
	if err := write(ctx, tx, one, touched); err != nil {
		return err
	}
	if one.unanswered {
		for _, text := range []string{s.t.unanswered, s.t.maybeDelivered} {
			if _, err := tx.ExecContext(ctx, text, refArgs(one.Ref)...); err != nil {
				return err
			}
		}
	}
	_, err := tx.ExecContext(ctx, s.t.cleared, f.lane, one.ID)
	return err
}

func refArgs(r outboxstore.Ref, more ...any) []any {
	return append([]any{r.Lane, r.ID, r.MessageID, r.CreatedAt.UnixMicro()}, more...)
}

// failInOutbox moves a row of the outbox according to its verdict.
func (s *sqliteParking) failInOutbox(ctx context.Context, tx *sql.Tx, one failure, touched touchedKeys) error {
	return s.unbox(ctx, tx, one.Ref, touched, func(string) error {
		if one.verdict != letterSkip {
			var wait any // none: it is held
			if one.verdict == retryLater {
				wait = one.retryIn.Microseconds()
			}
			held := one.verdict == letterHold
			if _, err := tx.ExecContext(ctx, s.t.park, refArgs(one.Ref, one.attempt, one.class, one.text, wait, held)...); err != nil {
				return err
			}
		}
		if one.verdict == retryLater {
			return nil
		}
		state, held := "dead", false
		if one.verdict == letterHold {
			state, held = "held", true
		}
		_, err := tx.ExecContext(ctx, s.t.buryOutbox,
			refArgs(one.Ref, one.attempt, one.class, one.text, one.fingerprint(), state, held)...)
		return err
	})
}

func (s *sqliteParking) follow(ctx context.Context, f fence, keys []string, known []outboxstore.Known, limit int) (moved int, err error) {
	err = s.fenced(ctx, f, func(tx *sql.Tx, touched touchedKeys, over func() bool) (more bool, err error) {
		rows, err := tx.QueryContext(ctx, s.t.ofKeys, f.lane, jsonArray(keys), min(limit, sqliteSweepRows)+len(known))
		if err != nil {
			return false, err
		}
		var refs []outboxstore.Ref
		err = each(rows, func(row *sql.Rows) (bool, error) {
			ref, created := outboxstore.Ref{Lane: f.lane}, int64(0)
			err := row.Scan(&ref.ID, &ref.MessageID, &created)
			ref.CreatedAt = time.UnixMicro(created).UTC()
			if !slices.Contains(known, ref.Known()) {
				refs = append(refs, ref)
			}
			return len(refs) < min(limit, sqliteSweepRows), err
		})
		if err != nil {
			return false, err
		}
		left, err := some(refs, over, func(ref outboxstore.Ref) error { return s.followOne(ctx, tx, ref, touched) })
		moved = len(refs) - len(left)
		if len(left) > 0 || moved == sqliteSweepRows {
			moved = limit // there may be more
		}
		return false, err
	})
	if err != nil {
		return 0, fmt.Errorf("move what follows in parked: %w", err)
	}
	return moved, nil
}

// sqliteSweepRows bounds a move, so that the writer's turn is short.
const sqliteSweepRows = 500

// followOne moves a row of the outbox behind those of its key.
func (s *sqliteParking) followOne(ctx context.Context, tx *sql.Tx, ref outboxstore.Ref, touched touchedKeys) error {
	return s.unbox(ctx, tx, ref, touched, func(key string) error {
		var wait any // straighten gives the head its time
		if key == "" {
			wait = 0
		}
		_, err := tx.ExecContext(ctx, s.t.park, refArgs(ref, 0, "", "", wait, false)...)
		return err
	})
}

// unbox calls copyRow for a row that is in the outbox, and deletes it there.
func (s *sqliteParking) unbox(ctx context.Context, tx *sql.Tx, ref outboxstore.Ref, touched touchedKeys, copyRow func(key string) error) error {
	var key string
	err := tx.QueryRowContext(ctx, s.t.outboxKey, refArgs(ref)...).Scan(&key)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err == nil {
		err = copyRow(key)
	}
	if err != nil {
		return err
	}
	touched.add(ref.Lane, key)
	_, err = tx.ExecContext(ctx, s.t.unbox, refArgs(ref)...)
	return err
}

func (s *sqliteParking) failInParked(ctx context.Context, tx *sql.Tx, one failure, touched touchedKeys) error {
	exec := func(text string, more ...any) (bool, error) {
		result, err := tx.ExecContext(ctx, text, refArgs(one.Ref, append([]any{one.attempt, one.class, one.text}, more...)...)...)
		if err != nil {
			return false, err
		}
		n, err := result.RowsAffected()
		return n > 0, err
	}
	switch one.verdict {
	case retryLater:
		text := s.t.again
		if one.free {
			text = s.t.postpone
		}
		_, err := exec(text, one.retryIn.Microseconds())
		return err
	case letterHold:
		if did, err := exec(s.t.hold); err != nil || !did {
			return err
		}
		_, err := exec(s.t.heldLetter, one.fingerprint())
		return err
	case letterSkip:
		if did, err := exec(s.t.bury, one.fingerprint()); err != nil || !did {
			return err
		}
		key, _, err := s.unpark(ctx, tx, s.t.unpark, one.Ref)
		touched.add(one.Lane, key)
		return err
	}
	return nil
}

// unpark deletes a row of parked and returns its key.
func (s *sqliteParking) unpark(ctx context.Context, tx *sql.Tx, text string, ref outboxstore.Ref) (key string, was bool, err error) {
	err = tx.QueryRowContext(ctx, text, refArgs(ref)...).Scan(&key)
	if errors.Is(err, sql.ErrNoRows) {
		return "", false, nil
	}
	return key, err == nil, err
}

func (s *sqliteParking) settle(ctx context.Context, rows []outboxstore.Ref) (unparked []parkedKey, missed int, err error) {
	if len(rows) == 0 {
		return nil, 0, nil
	}
	touched := touchedKeys{}
	if s.history {
		unparked, _, err = s.settleBy(ctx, rows, true, touched)
		if err == nil {
			return unparked, 0, nil
		}
		if ctx.Err() != nil || sqlerr.Connection(err) || sqlerr.Retryable(err) || sqlerr.Full(err) {
			return nil, 0, fmt.Errorf("settle parked, into the history: %w", err)
		}
	}
	broken := err // the history must never stop delivery
	unparked, removed, err := s.settleBy(ctx, rows, false, touched)
	if err != nil {
		return nil, 0, fmt.Errorf("settle parked: %w", err)
	}
	if broken == nil || removed == 0 {
		return unparked, 0, nil
	}
	reportMissed(ctx, s.box, removed, broken)
	return unparked, removed, nil
}

// settleBy adds the keys of the rows to touched, and returns those of touched that have
// no rows left.
func (s *sqliteParking) settleBy(ctx context.Context, rows []outboxstore.Ref, keep bool, touched touchedKeys) (unparked []parkedKey, removed int, err error) {
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		now := touchedKeys{}
		rows, err = some(rows, over, func(ref outboxstore.Ref) error {
			was, err := s.settleOne(ctx, tx, ref, keep, now)
			if was {
				removed++
			}
			return err
		})
		if err != nil {
			return false, err
		}
		maps.Copy(touched, now)
		if err := s.straighten(ctx, tx, now); err != nil || len(rows) > 0 {
			return true, err
		}
		_, unparked, err = s.keyStates(ctx, tx, touched)
		return false, err
	})
	return unparked, removed, err
}

// settleOne deletes a confirmed row, if it exists.
func (s *sqliteParking) settleOne(ctx context.Context, tx *sql.Tx, ref outboxstore.Ref, keep bool, touched touchedKeys) (was bool, err error) {
	if keep {
		if _, err := tx.ExecContext(ctx, s.t.settleMove, refArgs(ref)...); err != nil {
			return false, err
		}
	}
	key, was, err := s.unpark(ctx, tx, s.t.unpark, ref)
	if err != nil {
		return false, err
	}
	touched.add(ref.Lane, key)
	_, err = tx.ExecContext(ctx, s.t.closeLetters, refArgs(ref)...)
	return was, err
}

func (s *sqliteParking) keyStates(ctx context.Context, tx *sql.Tx, keys touchedKeys) (parked, unparked []parkedKey, err error) {
	for k := range keys {
		var there bool
		if err := tx.QueryRowContext(ctx, s.t.keyThere, k.lane, k.key).Scan(&there); err != nil {
			return nil, nil, err
		}
		if there {
			parked = append(parked, k)
		} else {
			unparked = append(unparked, k)
		}
	}
	return parked, unparked, nil
}

func (s *sqliteParking) carryOut(ctx context.Context, f fence, letters []int64) (parked, unparked []parkedKey, err error) {
	all := touchedKeys{}
	err = s.fenced(ctx, f, func(tx *sql.Tx, touched touchedKeys, over func() bool) (more bool, err error) {
		letters, err = some(letters, over, func(id int64) error { return s.carryOutOne(ctx, tx, f.lane, id, touched) })
		maps.Copy(all, touched)
		if err == nil && len(letters) == 0 {
			parked, unparked, err = s.keyStates(ctx, tx, all)
		}
		return len(letters) > 0, err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("carry commands out: %w", err)
	}
	return parked, unparked, nil
}

func (s *sqliteParking) carryOutOne(ctx context.Context, tx *sql.Tx, lane int, letter int64, touched touchedKeys) error {
	var state, key string
	var created int64
	ref := outboxstore.Ref{Lane: lane}
	err := tx.QueryRowContext(ctx, s.t.letter, letter, lane).Scan(&state, &key, &ref.ID, &ref.MessageID, &created)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	touched.add(lane, key)
	ref.CreatedAt = time.UnixMicro(created)
	var end string
	switch state {
	case "replaying":
		end = "replayed"
		if _, err := tx.ExecContext(ctx, s.t.replay, letter); err != nil {
			return err
		}
	case "discarding":
		end = "discarded"
		if _, _, err := s.unpark(ctx, tx, s.t.dropHeld, ref); err != nil {
			return err
		}
	default:
		return nil // carried out already
	}
	_, err = tx.ExecContext(ctx, s.t.close, letter, end)
	return err
}

func (s *sqliteParking) suspect(ctx context.Context, f fence, id int64) error {
	return sqlitetx.Write(ctx, s.db, turn.Background, func(tx *sql.Tx) error {
		result, err := tx.ExecContext(ctx, s.t.suspect, f.lane, f.owner, f.epoch, id)
		if err != nil {
			return fmt.Errorf("write suspect: %w", err)
		}
		return stood(result)
	})
}

func (s *sqliteParking) calm(ctx context.Context, owner string, epochs map[int]int64) error {
	err := sqlitetx.Write(ctx, s.db, turn.Background, func(tx *sql.Tx) error {
		for lane, epoch := range epochs {
			if _, err := tx.ExecContext(ctx, s.t.calm, owner, lane, epoch); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("calm lanes: %w", err)
	}
	return nil
}
