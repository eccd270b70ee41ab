package outboxqueue

import "github.com/oncemill/oncemill/internal/outboxstore"

// KnowRefused sets how many scheduled messages that cannot be moved are known one by one
// (PostgreSQL). For tests.
func (q *Queue) KnowRefused(most int) { outboxstore.KnowRefused(q.store, most) }

// TryRefusedNow has what could not be moved be tried again (PostgreSQL). For tests.
func (q *Queue) TryRefusedNow() { outboxstore.TryRefusedNow(q.store) }

// PassOver sets how many keys a look passes over (PostgreSQL). For tests.
func (q *Queue) PassOver(keys int) { outboxstore.PassOver(q.store, keys) }
