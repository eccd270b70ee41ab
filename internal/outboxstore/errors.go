package outboxstore

import "errors"

// Errors of Check; package outbox documents them.
var (
	ErrSequenceBehind = errors.New("outbox: the id sequence is behind its rows; run oncemill repair-sequence")
	ErrReadOnly       = errors.New("outbox: the database is read-only; connect to the primary, or promote this server")
	ErrSequenceCached = errors.New("outbox: the id sequence has a cache above 1; run alter sequence with cache 1")
)
