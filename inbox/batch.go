package inbox

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/nopanic"
)

// BatchHandler handles messages whose effects commit together, for example with one
// statement for all of them:
//
//	func reserve(ctx context.Context, orders []*message.Message) error {
//		tx, _ := inbox.TxFromContext(ctx)
//		...
//		_, err := tx.ExecContext(ctx, `insert into reservations (order_id, item)
//			select * from unnest($1::text[], $2::text[])`, pq.Array(ids), pq.Array(items))
//		return err
//	}
//
// There is at least one message. The messages are new to the consumer, all different, and
// sorted by ordering key, with at most one of a key. The context carries the transaction,
// as the messages' contexts do, and the values of the first message's context. It ends
// when the contexts of all messages have ended. To publish to the outbox, the handler uses
// that context.
type BatchHandler func(ctx context.Context, msgs []*message.Message) error

// Batch makes a handler of h that includes the inbox, so it needs no inbox middleware:
//
//	router.AddConsumerHandler("reserve", "orders", subscriber, in.Batch(reserve))
//
// h is called for groups, limited by Config.Group and formed as by
// [Inbox.GroupMiddleware]. The requirements on handlers and the statements about groups
// there apply to h too. If h fails for several messages, it is called again for parts of
// them until the failing one is found, and the rest is handled; the failing one is tried
// again alone. If all parts fail, each message is tried alone.
//
// Batch may be called several times on one Inbox; each handler has its own groups.
func (in *Inbox) Batch(h BatchHandler) message.NoPublishHandlerFunc {
	alone := func(msg *message.Message) ([]*message.Message, error) {
		return nil, h(msg.Context(), []*message.Message{msg})
	}
	handler := in.middleware(alone, newShared(in, h).attempt)
	return func(msg *message.Message) error {
		_, err := handler(msg)
		return err
	}
}

// batchEffect calls the handler for the members whose ids were claimed. The culprit is a
// member that may not have its effects now.
func (s *shared) batchEffect(ctx context.Context, tx *boundtx.Tx, members []*member, claimed map[string]bool) (culprit *member, err error) {
	in := s.in
	var h *handle
	var msgs []*message.Message
	err = nopanic.Call(func() error {
		for _, m := range members {
			if !claimed[m.ID] {
				continue
			}
			mine := until(ctx, m.Context())
			admitted, err := in.admit(mine, tx, m.Work)
			if err != nil {
				culprit = m
				return err
			}
			if !admitted {
				continue
			}
			if h == nil {
				h = in.newHandle(m.ID, tx, tx.Raw)
				h.Share(ErrShared)
				// Also when the handler ends its goroutine.
				defer h.Close(ErrTxEnded) //nolint:errcheck // its reason was asked for, or nobody is there to hear it
			}
			msgs = append(msgs, forHandler(mine, h, m.Work.msg))
		}
		if len(msgs) == 0 {
			return nil
		}
		if err := s.batch(oncemill.ContextWithTx(ctx, h), msgs); err != nil {
			return err
		}
		return h.Close(ErrTxEnded) // what the handler has overlooked
	})
	return culprit, err
}

// search finds the member for which a batch failed, by halving, and has the others
// handled.
func (s *shared) search(ctx context.Context, members []*member) {
	for len(members) > 1 {
		half := len(members) / 2
		var bad [][]*member
		for _, part := range [][]*member{members[:half], members[half:]} {
			claimed, _, e := s.try(ctx, part)
			if e.err != nil {
				bad = append(bad, part)
				continue
			}
			s.committed(part, claimed) //nolint:contextcheck // each member has its own
		}
		switch len(bad) {
		case 0:
			return
		case 2:
			s.disband(members)
			return
		}
		members = bad[0]
	}
	s.disband(members)
}
