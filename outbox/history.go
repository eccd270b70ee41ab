package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxstore"
)

// History gives access to delivered messages that are still kept (Config.History), for
// search and resend. It holds no state.
type History struct{ box *Outbox }

// History returns the delivered messages of o.
func (o *Outbox) History() *History { return &History{box: o} }

// HistoryRow is a message that the broker has confirmed.
type HistoryRow struct {
	ID        int64
	Lane      int
	Topic     string
	MessageID string
	Key       string // empty for an unkeyed message
	Payload   []byte
	Metadata  []byte    // a JSON object of strings; empty for none
	Size      int       // of the payload, in bytes
	CreatedAt time.Time // by the database's clock, at the insert
	RelayedAt time.Time // by the database's clock, when the confirmed row was moved
}

// Position returns the position of the row in the order of the history.
func (r HistoryRow) Position() HistoryPosition { return HistoryPosition{r.ID, r.RelayedAt} }

// HistoryPosition is a position in the history. An id alone is not enough: a server
// that lost its latest commits gives ids out again.
type HistoryPosition struct {
	ID        int64
	RelayedAt time.Time
}

// HistoryFilter selects rows of the history: those that match all fields that are set.
//
// Ids and times are indexed. A search by message id, key or topic alone reads the whole
// history. If that is large, set the times too, or create an index of your own on
// outbox_history. The partitions of later days get it too. Each index costs about 70
// bytes of write-ahead log per delivered message.
type HistoryFilter struct {
	IDs        []int64  // ids of rows, at most 10,000
	MessageIDs []string // at most 10,000
	Key        string
	Topic      string

	// From and To bound the time at which the message was confirmed: at or after From
	// and before To. Zero is no bound.
	From, To time.Time

	// After is where a page of List starts: behind this row. Set it to the Position of
	// the last row of the previous page. Zero is the start.
	After HistoryPosition

	// Brief makes List leave out payloads and metadata.
	Brief bool

	// Limit is the largest number of rows that List returns or Resend sends. Default:
	// 100 for List, 1000 for Resend. At most 10,000.
	Limit int
}

const (
	listByDefault   = 100
	resendByDefault = 1000
	mostOfHistory   = 10_000
)

// List returns delivered messages in the order of their ids. For one key, that is the
// order of delivery. An empty filter selects all messages. The error is a
// [*FilterError] if the filter is invalid.
func (h *History) List(ctx context.Context, f HistoryFilter) ([]HistoryRow, error) {
	f, err := f.resolve(listByDefault)
	if err != nil {
		return nil, err
	}
	rows, err := h.box.store.ListHistory(ctx, f.stored())
	if err != nil {
		return nil, fmt.Errorf("outbox: list history: %w", err)
	}
	list := make([]HistoryRow, len(rows))
	for i, r := range rows {
		list[i] = HistoryRow(r)
	}
	return list, nil
}

// Count returns how many messages Resend would send with this filter and no limit. Like
// Resend, it requires a filter that is not empty.
func (h *History) Count(ctx context.Context, f HistoryFilter) (int, error) {
	f, err := f.resolveToSend()
	if err != nil {
		return 0, err
	}
	n, err := h.box.store.CountHistory(ctx, f.stored())
	if err != nil {
		return 0, fmt.Errorf("outbox: count history: %w", err)
	}
	return n, nil
}

// Now returns the time of the database's clock, which HistoryRow.RelayedAt comes from. To
// resend in several calls what was confirmed until now, set HistoryFilter.To to it:
// otherwise later calls send again what earlier ones have sent.
func (h *History) Now(ctx context.Context) (time.Time, error) {
	now, err := h.box.store.Now(ctx)
	if err != nil {
		return time.Time{}, fmt.Errorf("outbox: read time: %w", err)
	}
	return now, nil
}

// Resend writes delivered messages to the outbox again, in a new transaction (RunInTx),
// and returns how many. See [History.ResendTx].
func (h *History) Resend(ctx context.Context, f HistoryFilter) (sent int, err error) {
	err = h.box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) (err error) {
		sent, err = h.ResendTx(ctx, tx, f)
		return err
	})
	if err != nil {
		return 0, err
	}
	return sent, nil
}

// ResendTx writes delivered messages to the outbox again, in the caller's transaction,
// and returns how many. It takes the first Limit of them in the order of their ids.
// Messages of one key thus keep the order in which they were delivered. They are not
// ordered relative to messages published meanwhile. A message that was sent more than
// once is taken once.
//
// They are the same messages to every consumer: they keep the message id and the
// creation time, in rows with new ids. An inbox that knows the message drops it. An
// inbox that may have forgotten it because of its age refuses it. Resending therefore
// supplies what a broker or a new consumer lacks, and repeats no effect. All consumers
// of the topic get the messages.
//
// The error is [ErrEmptyFilter] for a filter without a condition, and a [*FilterError]
// for an invalid one. After cannot be used here. For a nil tx it is [ErrNoTx].
func (h *History) ResendTx(ctx context.Context, tx oncemill.ExecTx, f HistoryFilter) (sent int, err error) {
	if f, err = f.resolveToSend(); err != nil {
		return 0, err
	}
	if isNil(tx) {
		return 0, ErrNoTx
	}
	n, err := h.box.store.Resend(ctx, tx, f.stored())
	if err != nil {
		return 0, fmt.Errorf("outbox: resend: %w", err)
	}
	return int(n), nil
}

func (f HistoryFilter) resolveToSend() (HistoryFilter, error) {
	if f.After != (HistoryPosition{}) {
		return f, &FilterError{Field: "After", Problem: "is for List"}
	}
	if len(f.IDs) == 0 && len(f.MessageIDs) == 0 && f.Key == "" && f.Topic == "" && f.From.IsZero() && f.To.IsZero() {
		return f, ErrEmptyFilter
	}
	return f.resolve(resendByDefault)
}

func (f HistoryFilter) resolve(limit int) (HistoryFilter, error) {
	bad := func(field, problem string) (HistoryFilter, error) {
		return f, &FilterError{Field: field, Problem: problem}
	}
	switch {
	case f.Limit == 0:
		f.Limit = limit
	case f.Limit < 0 || f.Limit > mostOfHistory:
		return bad("Limit", "must be 1 to "+strconv.Itoa(mostOfHistory)+", or 0 for "+strconv.Itoa(limit))
	}
	if len(f.IDs) > mostOfHistory {
		return bad("IDs", "are "+strconv.Itoa(len(f.IDs))+"; at most "+strconv.Itoa(mostOfHistory)+" are allowed")
	}
	if len(f.MessageIDs) > mostOfHistory {
		return bad("MessageIDs", "are "+strconv.Itoa(len(f.MessageIDs))+"; at most "+strconv.Itoa(mostOfHistory)+" are allowed")
	}
	for _, id := range f.MessageIDs {
		if problem := checkText(id, maxID, true); problem != "" {
			return bad("MessageIDs", "one of them "+problem)
		}
	}
	if problem := checkText(f.Key, maxKey, false); problem != "" {
		return bad("Key", problem)
	}
	if problem := checkText(f.Topic, maxTopic, false); problem != "" {
		return bad("Topic", problem)
	}
	if !f.From.IsZero() && !f.To.IsZero() && !f.From.Before(f.To) {
		return bad("To", "must be after From")
	}
	if f.After.ID < 0 || f.After.RelayedAt.IsZero() != (f.After.ID == 0) {
		return bad("After", "must be the Position of a row")
	}
	return f, nil
}

func (f HistoryFilter) stored() outboxstore.HistoryFilter {
	return outboxstore.HistoryFilter{
		IDs: f.IDs, MessageIDs: f.MessageIDs, Key: f.Key, Topic: f.Topic, From: f.From, To: f.To,
		After: outboxstore.HistoryPosition(f.After), Brief: f.Brief, Limit: f.Limit,
	}
}
