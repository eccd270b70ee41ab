package dlq

import (
	"context"
	"fmt"
	"time"
)

// Note is what somebody knows of a dead letter.
type Note struct {
	ID   int64
	At   time.Time // by the clock of the database
	By   string
	Text string
}

// mostNotes is how many notes of a dead letter are read.
const mostNotes = 1000

// AddNote adds a note to a dead letter in any state: act.Reason is its text, required and
// kept up to 4 KiB. It changes nothing else. Notes are deleted with the dead letter.
func (s *Store) AddNote(ctx context.Context, id int64, act Act) error {
	if err := act.check(true); err != nil {
		return err
	}
	added, err := s.store.AddNote(ctx, id, act.By, act.Reason)
	if err != nil {
		return fmt.Errorf("dlq: add note: %w", err)
	}
	if !added {
		return fmt.Errorf("dlq: dead letter %d: %w", id, ErrNotFound)
	}
	return nil
}

// Notes returns the notes of a dead letter, the oldest first, at most the newest 1,000.
// There are none for an id that no dead letter has.
func (s *Store) Notes(ctx context.Context, id int64) ([]Note, error) {
	found, err := s.store.Notes(ctx, id, mostNotes)
	if err != nil {
		return nil, fmt.Errorf("dlq: read notes: %w", err)
	}
	notes := make([]Note, len(found))
	for i, n := range found {
		notes[i] = Note(n)
	}
	return notes, nil
}
