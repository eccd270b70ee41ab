package dlq

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
)

// exportVersion is Line.Version of what this package writes.
const exportVersion = 1

// Line is a line of an export: one dead letter as a JSON object. Times are in RFC 3339, in
// UTC, with microseconds; payloads are in base64. Fields may be added in later versions of
// this package. A change of the meaning of a field raises Version.
type Line struct {
	Version int `json:"v"` // 1

	ID        int64             `json:"id"` // in the database of the export
	State     State             `json:"state"`
	Source    Source            `json:"source"`
	Consumer  string            `json:"consumer,omitempty"`
	Lane      *int              `json:"lane,omitempty"`   // of a relay's
	RowID     int64             `json:"row_id,omitempty"` // of a relay's
	Topic     string            `json:"topic"`
	MessageID string            `json:"message_id"`
	Key       string            `json:"key,omitempty"`
	Payload   []byte            `json:"payload"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	CreatedAt *time.Time        `json:"created_at,omitempty"`
	DiedAt    time.Time         `json:"died_at"`

	Reason               string        `json:"reason"`
	Error                string        `json:"error"`
	Stack                string        `json:"stack,omitempty"`
	Tries                int           `json:"tries"`
	Attempts             []LineAttempt `json:"attempts,omitempty"`
	MayHaveBeenDelivered bool          `json:"may_have_been_delivered,omitempty"`

	Act      *LineAct   `json:"act,omitempty"` // the last one that has changed the state
	ClosedAt *time.Time `json:"closed_at,omitempty"`

	// For the record; Import leaves them out.
	FailedAgain int64      `json:"failed_again,omitempty"`
	Edit        *LineEdit  `json:"edit,omitempty"`
	Notes       []LineNote `json:"notes,omitempty"`
}

// LineAttempt is a failed attempt.
type LineAttempt struct {
	At    time.Time `json:"at"`
	Class string    `json:"class"`
	Error string    `json:"error"`
}

// LineAct is who did something, why and when.
type LineAct struct {
	By     string    `json:"by"`
	Reason string    `json:"reason,omitempty"`
	At     time.Time `json:"at"`
}

// LineEdit is an edit of the message.
type LineEdit struct {
	LineAct
	Payload  []byte            `json:"payload"`
	Metadata map[string]string `json:"metadata,omitempty"`
	InUse    bool              `json:"in_use"`
}

// LineNote is a note.
type LineNote struct {
	At   time.Time `json:"at"`
	By   string    `json:"by"`
	Text string    `json:"text"`
}

// Export writes the dead letters that f selects to w, with their messages, edits and notes,
// each as a line of JSON (see [Line]), the oldest first. f.Limit is the largest number of
// dead letters; 0 means all. It returns how many lines it has written. With an error of w, the
// last of them, up to 64 KiB, may be missing or cut.
//
// It reads one dead letter at a time, so it needs memory for the largest one. The lines are
// not of one instant: a dead letter that changes, or is purged, during the export is written
// as it was when it was read, or not at all. Replay tokens are not exported.
func (s *Store) Export(ctx context.Context, w io.Writer, f Filter) (written int, err error) {
	out := bufio.NewWriterSize(w, 64<<10)
	written, err = s.export(ctx, out, f)
	if flushed := out.Flush(); err == nil && flushed != nil {
		err = fmt.Errorf("dlq: export: %w", flushed)
	}
	return written, err
}

func (s *Store) export(ctx context.Context, w io.Writer, f Filter) (written int, err error) {
	left := f.Limit
	if left < 0 {
		_, err := s.List(ctx, f) // reports it
		return 0, err
	}
	f.OldestFirst = true
	for {
		f.Limit = defaultLimit
		if left > 0 {
			f.Limit = min(f.Limit, left-written)
		}
		page, err := s.List(ctx, f)
		if err != nil {
			return written, err
		}
		for _, l := range page {
			line, err := s.line(ctx, l.ID)
			if errors.Is(err, ErrNotFound) {
				continue // purged since
			}
			if err == nil {
				err = writeLine(w, line)
			}
			if err != nil {
				return written, fmt.Errorf("dlq: export: %w", err)
			}
			written++
		}
		if len(page) < f.Limit || written == left && left > 0 {
			return written, nil
		}
		f.After = page[len(page)-1].Cursor()
	}
}

// line reads a dead letter with its notes.
func (s *Store) line(ctx context.Context, id int64) (*Line, error) {
	l, err := s.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	notes, err := s.Notes(ctx, id)
	if err != nil {
		return nil, err
	}
	line := &Line{
		Version: exportVersion, ID: l.ID, State: l.State, Source: l.Source, Consumer: l.Consumer, RowID: l.RowID, Topic: l.Topic, MessageID: l.MessageID,
		Key: l.Key, Payload: l.Payload, Metadata: l.Metadata, CreatedAt: timeOrNil(l.CreatedAt), DiedAt: l.DiedAt, Reason: l.Reason, Error: l.Error,
		Stack: l.Stack, Tries: l.Tries, MayHaveBeenDelivered: l.MayHaveBeenDelivered, ClosedAt: timeOrNil(l.ClosedAt), FailedAgain: l.FailedAgain,
	}
	if l.Source == FromRelay {
		line.Lane = &l.Lane
	}
	for _, a := range l.Attempts {
		line.Attempts = append(line.Attempts, LineAttempt(a))
	}
	if !l.ActedAt.IsZero() {
		line.Act = &LineAct{By: l.Act.By, Reason: l.Act.Reason, At: l.ActedAt}
	}
	if e := l.Edited; e != nil {
		line.Edit = &LineEdit{LineAct: LineAct{By: e.Act.By, Reason: e.Act.Reason, At: e.At}, Payload: e.Payload, Metadata: e.Metadata, InUse: e.InUse}
	}
	for _, n := range notes {
		line.Notes = append(line.Notes, LineNote{At: n.At, By: n.By, Text: n.Text})
	}
	return line, nil
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// writeLine writes a line that is safe for terminals. JSON itself escapes only ASCII's
// control characters.
func writeLine(w io.Writer, line *Line) error {
	var encoded strings.Builder
	encoder := json.NewEncoder(&encoded)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(line); err != nil {
		return err
	}
	_, err := io.WriteString(w, escapeControls(encoded.String()))
	return err
}

func escapeControls(text string) string {
	invisible := func(r rune) bool { return r != '\n' && !unicode.IsGraphic(r) }
	if !strings.ContainsFunc(text, invisible) {
		return text
	}
	var out strings.Builder
	for _, r := range text {
		if !invisible(r) {
			out.WriteRune(r)
			continue
		}
		for _, unit := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(&out, `\u%04x`, unit)
		}
	}
	return out.String()
}
