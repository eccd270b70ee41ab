package relay

import (
	"context"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/outbox"
)

// RepairSequence sets the outbox's id sequence above every id in use, in the outbox,
// its history, retrying messages and dead letters, with writers locked out. It returns
// the last id given out. It repairs outbox.ErrSequenceBehind, which keeps a relay from
// starting, and is harmless if nothing is wrong.
func RepairSequence(ctx context.Context, box *outbox.Outbox) (last int64, err error) {
	return relaystore.RepairSequences(ctx, storeOf(box), outboxqueue.Of(box))
}

// storeOf returns the store beside an outbox.
func storeOf(box *outbox.Outbox) relaystore.Store {
	return relaystore.Open(box.DB(), database.Of(box.Config().Database))
}
