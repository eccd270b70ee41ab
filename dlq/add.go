package dlq

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"time"

	"github.com/oncemill/oncemill"
)

// A message that a consumer could not handle. An unknown time is null.
const (
	addColumns = `
insert into {{dead_letters}} (source, consumer, topic, message_id, key, payload, metadata,
	reason, error, stack, attempts, errors, trace_id, fingerprint, created_at)
values ('consumer', $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, `
	postgresAdd = addColumns + `timestamptz 'epoch' + $14::bigint * interval '1 microsecond')`
	sqliteAdd   = addColumns + `$14)`
)

// Add writes a consumer's dead letter in a transaction of the consumer's database,
// which is also the store's. It takes the description of the message and of its failure
// from l. The id, the state, the times and the fingerprint are assigned. Texts that a
// database does not accept are cleaned, and cut at 4 KiB with a mark, so that a dead
// letter can always be written. The caller commits.
func (s *Store) Add(ctx context.Context, tx oncemill.Tx, l *Letter) error {
	metadata, err := encode(map[string]string(l.Metadata))
	if err != nil {
		return fmt.Errorf("dlq: encode metadata: %w", err)
	}
	if len(l.Metadata) == 0 {
		metadata = []byte{}
	}
	type attempt struct {
		At    int64  `json:"at"`
		Class string `json:"class"`
		Text  string `json:"text"`
	}
	attempts := make([]attempt, len(l.Attempts))
	for i, a := range l.Attempts {
		attempts[i] = attempt{At: a.At.UnixMicro(), Class: clean(a.Class), Text: clean(a.Error)}
	}
	history, err := encode(attempts)
	if err != nil {
		return fmt.Errorf("dlq: encode attempts: %w", err)
	}
	payload := l.Payload
	if payload == nil {
		payload = []byte{} // nil would be NULL
	}
	text, reason := clean(l.Error), clean(l.Reason)
	_, err = tx.ExecContext(ctx, s.texts.add, clean(l.Consumer), clean(l.Topic), clean(l.MessageID), clean(l.Key), payload, metadata,
		reason, text, clean(l.Stack), min(max(1, l.Tries), math.MaxInt32), string(history), traceID(l.Metadata),
		Fingerprint(l.Consumer, reason, text, l.MessageID), micros(l.CreatedAt))
	if err != nil {
		return fmt.Errorf("dlq: add letter: %w", err)
	}
	return nil
}

func encode(v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), err
}

// micros returns a time that a producer gave, or nil for a time that no table can
// store.
func micros(t time.Time) any {
	if t.Year() < 1970 || t.Year() > 9999 { // includes the zero time
		return nil
	}
	return t.UnixMicro()
}
