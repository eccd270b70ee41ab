package outboxstore

import "errors"

// ErrSequenceBehind is outbox.ErrSequenceBehind.
var ErrSequenceBehind = errors.New("outbox: the id sequence is behind its rows; run oncemill repair-sequence")
