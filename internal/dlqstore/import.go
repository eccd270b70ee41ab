package dlqstore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"time"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/text"
)

func (s *store) Import(ctx context.Context, l *Letter, by, reason string) (id int64, err error) {
	metadata, err := encodeMetadata(l.Metadata)
	if err != nil {
		return 0, err
	}
	attempts, err := encodeAttempts(l.Attempts)
	if err != nil {
		return 0, err
	}
	var lane, row any
	if l.Source == "relay" {
		lane, row = l.Lane, l.RowID
	}
	died := l.DiedAt.UnixMicro()
	failure, class := text.Clean(l.Error), text.Clean(l.Reason)
	did, err := s.act(ctx, auditstore.Act{Action: actImport, By: by, Reason: reason, Details: fmt.Sprintf("was dead letter %d, message %s", l.ID, text.Shorten(l.MessageID))}, s.text.Import,
		l.State, l.Source, text.Clean(l.Consumer), lane, row, text.Clean(l.Topic), text.Clean(l.MessageID), text.Clean(l.Key), notNull(l.Payload), metadata,
		micros(l.CreatedAt), died, class, failure, text.Clean(l.Stack), min(max(0, l.Tries), math.MaxInt32), string(attempts), traceID(l.Metadata),
		Fingerprint(origin(l), class, failure, l.MessageID), l.MayHaveBeenDelivered,
		micros(l.ActedAt), text.Clean(l.ActedBy), text.Clean(l.ActedReason), identity(l))
	if err != nil || len(did) == 0 {
		return 0, err
	}
	return did[0], nil
}

// origin is who wrote a dead letter, as in its fingerprint.
func origin(l *Letter) string {
	if l.Source == "relay" {
		return "relay"
	}
	return l.Consumer
}

// identity is what an imported dead letter is known by: of one source, of one message, of
// one time.
func identity(l *Letter) string {
	hash := sha256.New()
	for _, part := range []string{l.Source, l.Consumer, l.Topic, l.MessageID, l.DiedAt.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano), string(l.Payload)} {
		fmt.Fprintf(hash, "%d %s", len(part), part)
	}
	return hex.EncodeToString(hash.Sum(nil))
}
