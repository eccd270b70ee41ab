package dlq

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/oncemill/oncemill"
)

// All dialects share these texts. By primary key.
const (
	tokenOf    = `select token from {{dead_letters}} where id = $1 and source = 'consumer' and state = 'replaying' and token <> ''`
	checkToken = ` and source = 'consumer' and token = $2 and token <> ''`
)

// ReplayToken returns the secret of a consumer's dead letter that is being replayed:
// 128 random bits in hexadecimal, which the database generates with the replay. The
// message that is published carries it. The error is [ErrNotFound] if the dead letter
// is not being replayed.
func (s *Store) ReplayToken(ctx context.Context, id int64) (token string, err error) {
	err = s.db.QueryRowContext(ctx, s.texts.token, id).Scan(&token)
	if errors.Is(err, sql.ErrNoRows) {
		return "", fmt.Errorf("dlq: letter %d: %w", id, ErrNotFound)
	}
	if err != nil {
		return "", fmt.Errorf("dlq: read token: %w", err)
	}
	return token, nil
}

// CheckReplay returns a consumer's dead letter, with its message, if token is that of
// its replay, even if the replay has ended. Otherwise the error is [ErrNotFound].
func (s *Store) CheckReplay(ctx context.Context, id int64, token string) (*Letter, error) {
	l, err := scanLetter(s.db.QueryRowContext(ctx, s.texts.check, id, token), true)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("dlq: replay of letter %d: %w", id, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("dlq: check replay: %w", err)
	}
	return l, nil
}

// EndReplay ends the replay of a consumer's dead letter in tx, which holds the outcome
// of the message. The handler of replays calls it: see inbox.Replays. It reports false
// and changes nothing, unless the dead letter belongs to that consumer, is being
// replayed, and has this token and payload. Of two concurrent calls, the second waits
// for the transaction of the first. The caller commits.
func (s *Store) EndReplay(ctx context.Context, tx oncemill.Tx, consumer string, id int64, token string, payload []byte) (ended bool, err error) {
	if payload == nil {
		payload = []byte{} // nil would be NULL
	}
	n, err := affected(tx.ExecContext(ctx, s.texts.replayed, id, consumer, token, payload))
	if err != nil {
		return false, fmt.Errorf("dlq: end replay: %w", err)
	}
	return n == 1, nil
}
