package inboxstore

import (
	"encoding/json"
	"fmt"
	"time"
)

// Claim is an id to take.
type Claim struct {
	ID          string
	Fingerprint []byte // nil for none
}

// Start is what RecordStart returns.
type Start struct {
	Recorded bool          // false: the message has been handled, and no start was counted
	Unended  bool          // an earlier start has not ended
	Early    time.Duration // until the message is to be handled again
}

// Failure is a delivery that failed.
type Failure struct {
	Text        string // valid UTF-8 without NUL
	Unavailable bool   // what the handler needs was unavailable
	Uncounted   bool   // the message is not at fault
	Key         string // with Seq, the position of the message
	Seq         *int64 // nil if it has none

	Recorded bool // its start was recorded
	Charged  bool // its start was charged

	// Again returns the time until the next delivery.
	Again func(Record) time.Duration
}

// counts returns by how much the failure raises the two counts.
func (f *Failure) counts() (failures, unavailable int) {
	switch {
	case f.Uncounted:
		return 0, 0
	case f.Unavailable:
		return 0, 1
	}
	return 1, 0
}

// Record is what is stored about a failing message.
type Record struct {
	Failures    int
	Unavailable int
	Errors      []KeptError
	Again       time.Duration
}

// KeptError is a failed delivery, as it is stored.
type KeptError struct {
	At    time.Time `json:"at"`
	Error string    `json:"error"`
}

// mostErrors is how many failures of a message are stored in full.
const mostErrors = 10

// add appends a failure to those of a row, and returns the new content of the row.
func (r *Record) add(kept string, now time.Time, text string) (string, error) {
	if err := json.Unmarshal([]byte(kept), &r.Errors); err != nil {
		return "", fmt.Errorf("read former failures: %w", err)
	}
	r.Errors = append(r.Errors, KeptError{At: now.UTC(), Error: text})
	r.Errors = r.Errors[max(0, len(r.Errors)-mostErrors):]
	encoded, err := json.Marshal(r.Errors)
	return string(encoded), err
}

// Position is where a message is in the sequence of its key.
type Position int

// The positions of a message.
const (
	PositionNext   Position = iota
	PositionPassed          // it, or a later message, has been handled
	PositionEarly           // an earlier message has not been handled
)
