package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
)

func TestContextPublisher_WritesInTheTransactionOfTheContext(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		publisher := p.box.ContextPublisher()
		for _, end := range []struct {
			id  string
			err error
		}{{"committed", nil}, {"rolled back", errors.New("no")}} {
			err := p.box.RunInTx(t.Context(), func(ctx context.Context, _ *sql.Tx) error {
				first, second := newMessage(end.id+" 1", "k"), newMessage(end.id+" 2", "k")
				first.SetContext(ctx)
				second.SetContext(ctx)
				if err := publisher.Publish("orders", first, second); err != nil {
					return err
				}
				return end.err
			})
			expectError(t, err, end.err)
		}
		expectIDs(t, p.read(t), "committed 1", "committed 2")
	})
}

func TestContextPublisher_RefusesAMessageWithoutTransaction(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		publisher := p.box.ContextPublisher()
		p.inTx(t, func(tx *sql.Tx) {
			with, without := newMessage("with", ""), newMessage("without", "")
			with.SetContext(oncemill.ContextWithTx(t.Context(), tx))
			none := newMessage("nil transaction", "")
			none.SetContext(oncemill.ContextWithTx(t.Context(), nil))
			p.tap.sent()
			for _, msgs := range [][]*message.Message{{without}, {without, with}, {with, without}, {none}} {
				expectError(t, publisher.Publish("orders", msgs...), outbox.ErrNoTx)
			}
			if sent := p.tap.sent(); len(sent) != 0 {
				t.Errorf("sent %s", firstWords(sent))
			}
		})
		expectIDs(t, p.read(t))
	})
}

func TestContextPublisher_RefusesMessagesOfSeveralTransactions(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.inTx(t, func(tx *sql.Tx) {
			// SQLite has one writer; another handle on it is as good.
			other := endlessTx{tx, t}
			a, b := newMessage("a", ""), newMessage("b", "")
			a.SetContext(oncemill.ContextWithTx(t.Context(), tx))
			b.SetContext(oncemill.ContextWithTx(t.Context(), other))
			p.tap.sent()
			expectError(t, p.box.ContextPublisher().Publish("orders", a, b), outbox.ErrMixedTx)
			expectError(t, p.box.ContextPublisher().Publish("orders", b, a), outbox.ErrMixedTx)
			if sent := p.tap.sent(); len(sent) != 0 {
				t.Errorf("sent %s", firstWords(sent))
			}
			// A publisher that is bound to one does not ask the contexts.
			expectNoError(t, p.box.Publisher(tx).Publish("orders", a, b))
		})
		if n := len(p.read(t)); n != 2 {
			t.Errorf("%d rows", n)
		}
	})
}

// notedTx is a transaction whose type cannot be compared.
type notedTx struct {
	oncemill.ExecTx
	_ []string
}

func TestContextPublisher_RefusesToGuessWhetherTransactionsAreTheSame(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.inTx(t, func(tx *sql.Tx) {
			a, b := newMessage("a", ""), newMessage("b", "")
			for _, msg := range []*message.Message{a, b} {
				msg.SetContext(oncemill.ContextWithTx(t.Context(), notedTx{ExecTx: tx}))
			}
			expectError(t, p.box.ContextPublisher().Publish("orders", a, b), outbox.ErrMixedTx)
			expectNoError(t, p.box.ContextPublisher().Publish("orders", a))
		})
		expectIDs(t, p.read(t), "a")
	})
}

type orderPlaced struct {
	OrderID  string
	Customer string
}

// One bus, made at the start, serves every transaction.
func TestContextPublisher_ServesACQRSEventBus(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		bus, err := cqrs.NewEventBusWithConfig(p.box.ContextPublisher(), cqrs.EventBusConfig{
			GeneratePublishTopic: func(params cqrs.GenerateEventPublishTopicParams) (string, error) {
				return params.EventName, nil
			},
			OnPublish: func(params cqrs.OnEventSendParams) error {
				if event, ok := params.Event.(orderPlaced); ok {
					outbox.SetKey(params.Message, event.Customer)
				}
				return nil
			},
			Marshaler: cqrs.JSONMarshaler{GenerateName: cqrs.StructName},
		})
		if err != nil {
			t.Fatal(err)
		}
		p.exec(t, `create table sales (id text)`)
		refused := errors.New("refused")
		order := func(id string, result error) error {
			return p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
				if _, err := tx.ExecContext(ctx, `insert into sales (id) values ($1)`, id); err != nil {
					return err
				}
				return errors.Join(bus.Publish(ctx, orderPlaced{id, "zoë"}), result)
			})
		}
		expectNoError(t, order("1", nil))
		expectError(t, order("2", refused), refused)
		expectNoError(t, order("3", nil))
		expectError(t, bus.Publish(t.Context(), orderPlaced{OrderID: "4"}), outbox.ErrNoTx)

		rows := p.read(t)
		if len(rows) != 2 || p.count(t, `select count(*) from sales`) != 2 {
			t.Fatalf("%d rows", len(rows))
		}
		for i, want := range []string{`{"OrderID":"1","Customer":"zoë"}`, `{"OrderID":"3","Customer":"zoë"}`} {
			if r := rows[i]; r.Topic != "orderPlaced" || r.Key != "zoë" || string(r.Payload) != want {
				t.Errorf("got %+v", r)
			}
		}
	})
}
