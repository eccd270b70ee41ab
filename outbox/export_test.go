package outbox

import "time"

// KnowRefused sets how many scheduled messages that cannot be moved are known one by one
// (PostgreSQL).
func KnowRefused(q *Queue, most int) { q.box.store.(*postgresStore).pace.most = most }

// TryRefusedNow has what could not be moved be tried again (PostgreSQL).
func TryRefusedNow(q *Queue) {
	p := &q.box.store.(*postgresStore).pace
	p.mu.Lock()
	defer p.mu.Unlock()
	p.largeAt, p.roundAt = time.Time{}, time.Time{}
	for i := range p.aside {
		p.aside[i].until = time.Time{}
	}
}

// PassOver sets how many keys a look passes over (PostgreSQL).
func PassOver(q *Queue, keys int) { q.box.store.(*postgresStore).pace.mostWaiting = keys }
