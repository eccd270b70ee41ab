package dlq

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/outbox"
)

// Imported is what an import has done.
type Imported struct {
	Added    int // dead letters
	Existing int // that were in the database already
	Failed   int // lines with errors
}

const (
	// mostLine is the longest line in bytes: the largest message of an outbox, 128 MiB, in
	// base64, and what belongs to it.
	mostLine = 192 << 20

	mostLineErrors   = 20               // that are returned one by one
	mostTextColumn   = 4<<10 + len("…") // what text.Clean leaves of a longer one
	mostConsumer     = 255
	mostLineMetadata = 16 << 20 // bytes, as JSON
	mostLineAttempts = 10       // that are kept
)

// ErrImportRelay is the error of a line that holds an open dead letter of a relay, which is
// not in this database. Its position belongs to another outbox, so it cannot be replayed
// here. Publish its message.
var ErrImportRelay = errors.New("an open dead letter of a relay belongs to its outbox and cannot be imported elsewhere; publish its message instead")

// Import adds the dead letters of an export to the database (see [Line] for the format).
// A reason is required. What is in the database already is left alone: importing a file
// twice adds nothing twice, also if it is imported where it was exported, by two callers at
// once, or again after an error. A dead letter is known by its source, consumer, topic,
// message id, payload and time.
//
// An imported dead letter has a new id. It is dead if it was open, and can be replayed to
// its consumer if that has the same name here; a closed one is closed now, and cannot be
// restored if it is a relay's. Edits, notes and the links between dead letters are not
// imported, nor is anything that could make a message the replay of a dead letter.
//
// Hazards: a message that is replayed both here and where it was exported has its effect in
// both places. A dead letter that was purged here is added again, and its replay repeats the
// effect once the inbox has forgotten the id (inbox.Config.Retention).
//
// Each line is imported in a transaction of its own. A line that is wrong, or longer than
// 192 MiB, is a [*LineError], and the next one is read; of many, the first 20 are returned.
// An error of r or of the database ends the import, and the lines before it stay imported.
func (s *Store) Import(ctx context.Context, r io.Reader, act Act) (done Imported, err error) {
	if err := act.check(true); err != nil {
		return done, err
	}
	in := bufio.NewReaderSize(r, 64<<10)
	var errs []error
	for number := 1; ; number++ {
		line, problem, err := readLine(in)
		if err != nil && !errors.Is(err, io.EOF) {
			return done, errors.Join(append(errs, fmt.Errorf("dlq: import: read line %d: %w", number, err))...)
		}
		end := err != nil
		if problem == nil && len(bytes.TrimSpace(line)) > 0 {
			problem, err = s.importLine(ctx, line, act, &done)
			if err != nil {
				return done, errors.Join(append(errs, fmt.Errorf("dlq: import line %d: %w", number, err))...)
			}
		}
		if problem != nil {
			if done.Failed++; done.Failed <= mostLineErrors {
				errs = append(errs, &LineError{Line: number, Err: problem})
			}
		}
		if end {
			break
		}
	}
	if more := done.Failed - mostLineErrors; more > 0 {
		errs = append(errs, fmt.Errorf("dlq: and %d more lines", more))
	}
	return done, errors.Join(errs...)
}

// readLine returns the next line, without its end. A line that is too long is skipped, and
// problem is set. err is io.EOF with the last line.
func readLine(in *bufio.Reader) (line []byte, problem, err error) {
	for {
		piece, err := in.ReadSlice('\n')
		if len(line)+len(piece) > mostLine {
			line, problem = nil, fmt.Errorf("has more than %d bytes", mostLine)
		}
		if problem == nil {
			line = append(line, piece...)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, problem, err
		}
	}
}

// importLine imports a line. problem is one of the line, err one of the database.
func (s *Store) importLine(ctx context.Context, encoded []byte, act Act, done *Imported) (problem, err error) {
	letter, problem := decodeLine(encoded)
	if problem != nil {
		return problem, nil
	}
	if letter.Source == string(FromRelay) && letter.State == string(StateDead) {
		there, err := s.store.List(ctx, dlqstore.Filter{
			Source: letter.Source, Topic: text.Clean(letter.Topic), MessageID: text.Clean(letter.MessageID), From: letter.DiedAt, Until: letter.DiedAt.Add(time.Microsecond), Limit: 1,
		})
		if err != nil {
			return nil, err
		}
		if len(there) == 0 {
			return ErrImportRelay, nil
		}
		done.Existing++
		return nil, nil
	}
	var id int64
	for range 10 { // as in repeat
		if id, err = s.store.Import(ctx, letter, act.By, act.Reason); !sqlerr.Retryable(err) {
			break
		}
	}
	switch {
	case sqlerr.Unacceptable(err):
		return err, nil
	case err != nil:
		return nil, err
	case id == 0:
		done.Existing++
	default:
		done.Added++
	}
	return nil, nil
}

// marks are the metadata of a replay, which nothing but an inbox may set.
var marks = []string{outbox.ReservedMetadata + "replay", outbox.ReservedMetadata + "token", outbox.ReservedMetadata + "consumer"}

// decodeLine returns the dead letter of a line, as it is imported.
func decodeLine(encoded []byte) (*dlqstore.Letter, error) {
	var line importedLine
	if err := json.Unmarshal(encoded, &line); err != nil {
		return nil, err
	}
	if line.Version != exportVersion {
		return nil, fmt.Errorf(`"v" is %d; this version imports %d`, line.Version, exportVersion)
	}
	if err := line.check(); err != nil {
		return nil, err
	}
	letter := &dlqstore.Letter{
		ID: line.ID, State: string(line.State), Source: string(line.Source), Consumer: line.Consumer, RowID: line.RowID, Topic: line.Topic,
		MessageID: line.MessageID, Key: line.Key, Payload: line.Payload, Metadata: maps.Clone(line.Metadata), DiedAt: line.DiedAt.Truncate(time.Microsecond),
		Reason: line.Reason, Error: line.Error, Stack: line.Stack, Tries: line.Tries, MayHaveBeenDelivered: line.MayHaveBeenDelivered,
	}
	for _, name := range marks {
		delete(letter.Metadata, name)
	}
	if line.State != StateReplayed && line.State != StateDiscarded {
		letter.State = string(StateDead)
	}
	if line.Lane != nil {
		letter.Lane = *line.Lane
	}
	if line.CreatedAt != nil {
		letter.CreatedAt = *line.CreatedAt
	}
	if line.Act != nil {
		letter.ActedBy, letter.ActedReason, letter.ActedAt = line.Act.By, line.Act.Reason, line.Act.At
	}
	for _, a := range line.Attempts {
		letter.Attempts = append(letter.Attempts, dlqstore.Attempt(a))
	}
	return letter, nil
}

// importedLine is a line as it is imported. What it leaves out, and what it keeps a part of,
// takes no memory, however much of it a line holds: a value of a few bytes of JSON may take
// a hundred.
type importedLine struct {
	Line

	Payload  anyPayload  `json:"payload"`
	Metadata fewMetadata `json:"metadata"`
	Attempts fewAttempts `json:"attempts"`
	Edit     ignored     `json:"edit"`
	Notes    ignored     `json:"notes"`
}

type ignored struct{}

func (*ignored) UnmarshalJSON([]byte) error { return nil }

// anyPayload is nil if it is missing. Earlier versions wrote empty ones as null on SQLite.
type anyPayload []byte

func (p *anyPayload) UnmarshalJSON(encoded []byte) error {
	*p = anyPayload{}
	if string(encoded) == "null" {
		return nil
	}
	return json.Unmarshal(encoded, (*[]byte)(p))
}

type fewMetadata map[string]string

func (m *fewMetadata) UnmarshalJSON(encoded []byte) error {
	if len(encoded) > mostLineMetadata {
		return fmt.Errorf(`"metadata" has more than %d bytes`, mostLineMetadata)
	}
	return json.Unmarshal(encoded, (*map[string]string)(m))
}

type fewAttempts []LineAttempt

func (a *fewAttempts) UnmarshalJSON(encoded []byte) error {
	from := json.NewDecoder(bytes.NewReader(encoded))
	switch begin, err := from.Token(); {
	case err != nil || begin == nil: // null
		return err
	case begin != json.Delim('['):
		return errors.New(`"attempts" must be an array`)
	}
	for *a = nil; len(*a) < mostLineAttempts && from.More(); {
		var attempt LineAttempt
		if err := from.Decode(&attempt); err != nil {
			return err
		}
		*a = append(*a, attempt)
	}
	return nil
}

// check returns what is wrong with a line.
func (l *importedLine) check() error {
	switch {
	case !slices.Contains(states, l.State):
		return fmt.Errorf(`"state" is %s`, shortQuote(string(l.State)))
	case l.Source != FromRelay && l.Source != FromConsumer:
		return fmt.Errorf(`"source" is %s; must be "relay" or "consumer"`, shortQuote(string(l.Source)))
	case (l.Source == FromConsumer) != (l.Consumer != ""):
		return errors.New(`"consumer" must be there for a consumer's, and not for a relay's`)
	case l.Payload == nil:
		return errors.New(`"payload" is missing`)
	case l.Reason == "":
		return errors.New(`"reason" is missing`)
	case !storable(l.DiedAt):
		return errors.New(`"died_at" is missing, or not from 1970 to 9999`)
	case l.Source == FromRelay && (l.Lane == nil || *l.Lane < 0 || *l.Lane >= outbox.Lanes || l.CreatedAt == nil || !storable(*l.CreatedAt)):
		return errors.New(`"lane" or "created_at" is missing, or out of range`)
	case l.Act != nil && !storable(l.Act.At):
		return errors.New(`"act" has no time from 1970 to 9999`)
	case slices.ContainsFunc(l.Attempts, func(a LineAttempt) bool { return !storable(a.At) }):
		return errors.New(`"attempts" has a time that is missing, or not from 1970 to 9999`)
	}
	if len(l.Consumer) > mostConsumer {
		return fmt.Errorf(`"consumer" has more than %d bytes`, mostConsumer)
	}
	for name, value := range map[string]string{
		"topic": l.Topic, "message_id": l.MessageID, "key": l.Key, "reason": l.Reason,
	} {
		if len(value) > mostTextColumn {
			return fmt.Errorf("%q has more than %d bytes", name, mostTextColumn)
		}
	}
	return nil
}

// storable reports whether databases take a time, and an export can write it.
func storable(t time.Time) bool { return t.UTC().Year() >= 1970 && t.UTC().Year() < 9999 }

func shortQuote(s string) string { return strconv.Quote(s[:min(len(s), 40)]) }
