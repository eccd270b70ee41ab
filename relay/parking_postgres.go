package relay

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"

	"github.com/oncemill/oncemill/internal/database"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

type postgresParking struct {
	box     *outbox.Outbox
	db      *sql.DB
	history bool

	keysText, topicsText, dueText, findText, commandsText, lettersText string
	fenceText, parkText, buryText, againText, skipText, holdText       string
	replayText, discardText, postponeText, followText                  string
	settleText, settleMoveText, promoteText, closeLettersText          string
	suspectText, calmText, beyondText, pieceText                       string
}

func newPostgresParking(box *outbox.Outbox) *postgresParking {
	names := database.Of(box.Config().Database)
	return &postgresParking{
		box: box, db: box.DB(), history: box.Config().History > 0,
		keysText: names.Expand(postgresParkedKeys), topicsText: names.Expand(postgresParkedTopics), dueText: names.Expand(postgresDue),
		findText: names.Expand(postgresFind), commandsText: names.Expand(postgresCommands),
		lettersText: names.Expand(postgresLetterKeys), fenceText: names.Expand(postgresFenceAlone),
		parkText: names.Expand(postgresPark), buryText: names.Expand(postgresBury),
		againText: names.Expand(postgresAgain), skipText: names.Expand(postgresSkip), holdText: names.Expand(postgresHold),
		postponeText: names.Expand(postgresPostpone), followText: names.Expand(postgresFollow), replayText: names.Expand(postgresReplay), discardText: names.Expand(postgresDiscard),
		settleText: names.Expand(postgresSettle), settleMoveText: names.Expand(postgresSettleMove),
		promoteText: names.Expand(postgresPromote), closeLettersText: names.Expand(postgresCloseLetters),
		suspectText: names.Expand(postgresSuspect), calmText: names.Expand(postgresCalm),
		beyondText: names.Expand(postgresBeyond), pieceText: names.Expand(postgresParkedPiece),
	}
}

func (s *postgresParking) fail(ctx context.Context, f fence, failures []failure, followers []outboxstore.Ref) error {
	var groups [2][3][]failure
	var postponed []failure
	for _, one := range failures {
		if one.parked && one.free {
			postponed = append(postponed, one)
			continue
		}
		origin := 0
		if one.parked {
			origin = 1
		}
		groups[origin][one.verdict] = append(groups[origin][one.verdict], one)
	}
	fresh, again := groups[0], groups[1]

	park := slices.Concat(fresh[retryLater], fresh[letterHold])
	kinds := append(repeat(kindRetry, len(fresh[retryLater])), repeat(kindHold, len(fresh[letterHold]))...)
	for _, ref := range followers {
		park, kinds = append(park, failure{Ref: ref}), append(kinds, kindFollower)
	}
	// Each is a separate fenced statement, correct without the others.
	wrote := false
	for _, w := range []struct {
		text string
		rows []failure
	}{
		{s.buryText, fresh[letterSkip]},
		{s.againText, again[retryLater]},
		{s.postponeText, postponed},
		{s.skipText, again[letterSkip]},
		{s.holdText, again[letterHold]},
		{s.parkText, park},
	} {
		if len(w.rows) == 0 {
			continue
		}
		args := failureArgs(w.rows)
		if w.text == s.parkText {
			args = append(args, pq.Array(kinds))
		}
		if err := s.fenced(ctx, w.text, f, args...); err != nil {
			return fmt.Errorf("write failures: %w", err)
		}
		wrote = true
	}
	if !wrote {
		if err := s.fenced(ctx, s.fenceText, f); err != nil {
			return fmt.Errorf("write failures: %w", err)
		}
	}
	return nil
}

func (s *postgresParking) follow(ctx context.Context, f fence, keys []string, known []outboxstore.Known, limit int) (moved int, err error) {
	ids, created := knownArrays(known)
	err = shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) error {
		var stood int
		if err := tx.QueryRowContext(ctx, s.followText, f.lane, f.owner, f.epoch, pq.Array(keys), limit, ids, created).Scan(&stood, &moved); err != nil {
			return err
		}
		if stood == 0 {
			return errFenced
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("move what follows in parked: %w", err)
	}
	return moved, nil
}

func knownArrays(known []outboxstore.Known) (ids, created any) {
	numbers, times := make([]int64, len(known)), make([]int64, len(known))
	for i, k := range known {
		numbers[i], times[i] = k.ID, k.CreatedAt.UnixMicro()
	}
	return pq.Array(numbers), pq.Array(times)
}

func repeat(kind int64, n int) []int64 { return slices.Repeat([]int64{kind}, n) }

// fenced executes a statement that begins with the fence, and returns errFenced if the
// lease did not match.
func (s *postgresParking) fenced(ctx context.Context, text string, f fence, args ...any) error {
	return shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) error {
		var stood int
		if err := tx.QueryRowContext(ctx, text, append([]any{f.lane, f.owner, f.epoch}, args...)...).Scan(&stood); err != nil {
			return err
		}
		if stood == 0 {
			return errFenced
		}
		return nil
	})
}

// failureArgs returns the rows as arrays, $4 to $12.
func failureArgs(rows []failure) []any {
	n := len(rows)
	ids, created, attempts, waits := make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n)
	unanswered := make([]bool, n)
	messages, classes, texts, prints := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	for i, r := range rows {
		ids[i], messages[i], created[i] = r.ID, r.MessageID, r.CreatedAt.UnixMicro()
		attempts[i], waits[i] = int64(r.attempt), r.retryIn.Microseconds()
		classes[i], texts[i] = clean(r.class), clean(r.text)
		prints[i], unanswered[i] = r.fingerprint(), r.unanswered
	}
	return []any{
		pq.Array(ids), pq.Array(messages), pq.Array(created), pq.Array(attempts),
		pq.Array(classes), pq.Array(texts), pq.Array(waits), pq.Array(prints), pq.Array(unanswered),
	}
}

func (s *postgresParking) carryOut(ctx context.Context, f fence, letters []int64) (parked, unparked []parkedKey, err error) {
	for _, text := range []string{s.replayText, s.discardText} {
		if err := s.fenced(ctx, text, f, pq.Array(letters)); err != nil {
			return nil, nil, fmt.Errorf("carry commands out: %w", err)
		}
	}
	parked, unparked, err = scanKeyStates(s.db.QueryContext(ctx, s.lettersText, pq.Array(letters)))
	if err != nil {
		return nil, nil, fmt.Errorf("carry commands out: look at the keys: %w", err)
	}
	return parked, unparked, nil
}

func (s *postgresParking) suspect(ctx context.Context, f fence, id int64) error {
	result, err := s.db.ExecContext(ctx, s.suspectText, f.lane, f.owner, f.epoch, id)
	if err != nil {
		return fmt.Errorf("write suspect: %w", err)
	}
	return stood(result)
}

// stood returns errFenced for an update of a lease that changed nothing.
func stood(result sql.Result) error {
	n, err := result.RowsAffected()
	if err == nil && n == 0 {
		err = errFenced
	}
	return err
}

func (s *postgresParking) calm(ctx context.Context, owner string, epochs map[int]int64) error {
	lanes, numbers := make([]int, 0, len(epochs)), make([]int64, 0, len(epochs))
	for lane, epoch := range epochs {
		lanes, numbers = append(lanes, lane), append(numbers, epoch)
	}
	if _, err := s.db.ExecContext(ctx, s.calmText, owner, smallints(lanes), pq.Array(numbers)); err != nil {
		return fmt.Errorf("calm lanes: %w", err)
	}
	return nil
}

func (s *postgresParking) settle(ctx context.Context, rows []outboxstore.Ref) (unparked []parkedKey, missed int, err error) {
	if len(rows) == 0 {
		return nil, 0, nil
	}
	if s.history {
		unparked, _, err = s.settleBy(ctx, s.settleMoveText, rows)
		if err == nil {
			return unparked, 0, nil
		}
		if ctx.Err() != nil || sqlerr.Connection(err) || sqlerr.Retryable(err) {
			return nil, 0, fmt.Errorf("settle parked, into the history: %w", err)
		}
	}
	broken := err // the history must never stop delivery
	unparked, removed, err := s.settleBy(ctx, s.settleText, rows)
	if err != nil {
		return nil, 0, fmt.Errorf("settle parked: %w", err)
	}
	if broken == nil || removed == 0 {
		return unparked, 0, nil
	}
	reportMissed(ctx, s.box, removed, broken)
	return unparked, removed, nil
}

// settleBy deletes and then promotes, in one transaction. A writer of a follower
// without a time locks the head of its key in the same statement, so a second statement
// after the deletion sees each of them. READ COMMITTED is explicit because of that.
func (s *postgresParking) settleBy(ctx context.Context, text string, rows []outboxstore.Ref) (unparked []parkedKey, removed int, err error) {
	rows = slices.Clone(rows)
	slices.SortFunc(rows, func(a, b outboxstore.Ref) int { return cmp.Compare(a.ID, b.ID) })
	n := len(rows)
	lanes, ids, messages, created := make([]int, n), make([]int64, n), make([]string, n), make([]int64, n)
	for i, r := range rows {
		lanes[i], ids[i], messages[i], created[i] = r.Lane, r.ID, r.MessageID, r.CreatedAt.UnixMicro()
	}
	args := []any{smallints(lanes), pq.Array(ids), pq.Array(messages), pq.Array(created)}
	err = shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) error {
		var keys []parkedKey
		if keys, removed, err = scanSettled(tx.QueryContext(ctx, text, args...)); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.closeLettersText, args...); err != nil || len(keys) == 0 {
			return err
		}
		lanes, names := make([]int, len(keys)), make([]string, len(keys))
		for i, k := range keys {
			lanes[i], names[i] = k.lane, k.key
		}
		unparked, err = scanKeys(tx.QueryContext(ctx, s.promoteText, smallints(lanes), pq.Array(names)))
		return err
	})
	return unparked, removed, err
}
