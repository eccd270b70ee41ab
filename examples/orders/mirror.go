package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/examples/internal/demo"
)

// mirror is the demo's own view of the broker, by the plain AMQP client: a queue
// on the same exchange that gets every message the inventory gets, read when all
// is over.
type mirror struct {
	conn      *amqp091.Connection
	channel   *amqp091.Channel
	exchange  string
	queue     string
	inventory string // the consumer's queue
	copied    int    // messages at the head of the queue that Copy has used
}

func newMirror(url, topic string, config amqp.Config) (*mirror, error) {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return nil, fmt.Errorf("connect to RabbitMQ: %w", err)
	}
	m := &mirror{conn: conn, exchange: topic, queue: topic + "_mirror", inventory: config.Queue.GenerateName(topic)}
	if err := m.declare(config); err != nil {
		return nil, errors.Join(fmt.Errorf("declare mirror: %w", err), conn.Close())
	}
	return m, nil
}

func (m *mirror) declare(config amqp.Config) (err error) {
	if m.channel, err = m.conn.Channel(); err != nil {
		return err
	}
	if err := m.channel.Confirm(false); err != nil {
		return err
	}
	if err := config.TopologyBuilder.ExchangeDeclare(m.channel, m.exchange, config); err != nil {
		return err
	}
	if _, err := m.channel.QueueDeclare(m.queue, true, false, false, false, nil); err != nil {
		return err
	}
	return m.channel.QueueBind(m.queue, "", m.exchange, false, nil)
}

// close removes what the demo declared, the inventory's queue too.
func (m *mirror) close() error {
	_, err1 := m.channel.QueueDelete(m.queue, false, false, false)
	_, err2 := m.channel.QueueDelete(m.inventory, false, false, false)
	err3 := m.channel.ExchangeDelete(m.exchange, false, false)
	return errors.Join(err1, err2, err3, m.conn.Close())
}

// Copy implements demo.Broker.
func (m *mirror) Copy(ctx context.Context, n int) ([]string, error) {
	var ids []string
	var last amqp091.Delivery
	for i := range m.copied + n {
		delivery, ok, err := m.channel.Get(m.queue, false)
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		last = delivery
		if i < m.copied {
			continue
		}
		if err := m.publish(ctx, delivery); err != nil {
			return nil, err
		}
		ids = append(ids, delivery.MessageId)
	}
	m.copied += len(ids)
	if last.DeliveryTag == 0 {
		return nil, nil
	}
	return ids, last.Nack(true, true) // all of them go back to where they stood
}

func (m *mirror) publish(ctx context.Context, d amqp091.Delivery) error {
	confirm, err := m.channel.PublishWithDeferredConfirmWithContext(ctx, m.exchange, d.RoutingKey, true, false, amqp091.Publishing{
		Headers:      d.Headers,
		ContentType:  d.ContentType,
		DeliveryMode: d.DeliveryMode,
		MessageId:    d.MessageId,
		Timestamp:    d.Timestamp,
		Type:         d.Type,
		Body:         d.Body,
	})
	if err != nil {
		return err
	}
	acked, err := confirm.WaitContext(ctx)
	if err == nil && !acked {
		err = errors.New("RabbitMQ refused a copy")
	}
	return err
}

// Waiting implements demo.Broker. RabbitMQ does not count the message that the
// inventory is at.
func (m *mirror) Waiting(context.Context) (int, error) {
	queue, err := m.channel.QueueDeclarePassive(m.inventory, true, false, false, false, nil)
	return queue.Messages, err
}

// Wire implements demo.Broker. It empties the queue.
func (m *mirror) Wire(ctx context.Context) ([]demo.Delivery, error) {
	queue, err := m.channel.QueueDeclarePassive(m.queue, true, false, false, false, nil)
	if err != nil {
		return nil, err
	}
	deliveries, err := m.channel.ConsumeWithContext(ctx, m.queue, "", true, true, false, false, nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	read := make([]demo.Delivery, 0, queue.Messages)
	for len(read) < queue.Messages {
		select {
		case d, ok := <-deliveries:
			if !ok {
				return nil, errors.New("RabbitMQ closed the channel")
			}
			read = append(read, demo.Delivery{MessageID: d.MessageId, Payload: d.Body})
		case <-ctx.Done():
			return nil, fmt.Errorf("%d of %d messages read: %w", len(read), queue.Messages, ctx.Err())
		}
	}
	return read, nil
}
