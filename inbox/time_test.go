package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// limited returns a message that has so much time.
func limited(t *testing.T, id string, d time.Duration) *message.Message {
	ctx, cancel := context.WithTimeout(inbox.ContextWithDelivery(t.Context(), delivery{}), d)
	t.Cleanup(cancel)
	return message.NewMessageWithContext(ctx, id, nil)
}

// keepRows does something while it uses the bytes of a row, which belong to the driver.
func keepRows(m *message.Message, do func()) error {
	tx, _ := inbox.TxFromContext(m.Context())
	rows, err := tx.QueryContext(m.Context(), `select '1' union all select '2'`)
	if err != nil {
		return err
	}
	defer rows.Close()
	var raw sql.RawBytes
	if rows.Next() {
		err = rows.Scan(&raw)
	}
	do()
	return errors.Join(err, errUndo)
}

// Somebody else has what a message needs (its id, on SQLite the turn to write) for most of the
// message's time. That its handler then comes too late is no failure of the message.
func TestInbox_TimeThatOthersHaveUsedUpIsNoFailure(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.Timeout, cfg.Retry = 2*time.Second, inbox.Retry{Tries: 1, Deliveries: 1}
			if cfg.Database.Dialect != oncemill.SQLite {
				cfg.LockTimeout = time.Minute
			}
		})
		expectNoError(t, deliver(t, in, "first", effect))
		for runs := 0; runs == 0; {
			holding := make(chan struct{})
			var other sync.WaitGroup
			other.Go(func() {
				_ = deliver(t, p.inbox(t, nil), "a", func(*message.Message) ([]*message.Message, error) {
					close(holding)
					testserver.Pause(t.Context(), 1500*time.Millisecond)
					return nil, errUndo
				})
			})
			<-holding
			_ = deliver(t, in, "a", func(m *message.Message) ([]*message.Message, error) {
				runs++
				select {
				case <-m.Context().Done():
				case <-time.After(time.Second):
				}
				return nil, m.Context().Err()
			})
			other.Wait()
		}
		if letters := dead.all(); len(letters) > 0 {
			t.Errorf("letter %+v", letters[0])
		}
	})
}
