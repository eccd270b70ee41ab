package outboxstore

import "time"

// KnowRefused sets how many scheduled messages that cannot be moved are known one by one
// (PostgreSQL).
func KnowRefused(s Store, most int) { paceOf(s).most = most }

// TryRefusedNow has what could not be moved be tried again (PostgreSQL).
func TryRefusedNow(s Store) {
	p := paceOf(s)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.largeAt, p.roundAt = time.Time{}, time.Time{}
	for i := range p.aside {
		p.aside[i].until = time.Time{}
	}
}

// PassOver sets how many keys a look passes over (PostgreSQL).
func PassOver(s Store, keys int) { paceOf(s).mostWaiting = keys }

func paceOf(s Store) *pace {
	p, ok := s.(*postgresStore)
	if !ok {
		panic("outboxstore: not on PostgreSQL")
	}
	return &p.pace
}
