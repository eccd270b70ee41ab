package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/crucible/work"
)

const (
	// drainStall is how long nothing may move, with something left, before the checkers count it.
	drainStall = time.Minute
	lossyStall = 20 * time.Second // what an asynchronous PostgreSQL has lost is left for ever, except for replays
	settleTime = 5 * time.Second
	statsDelay = 30 * time.Second
)

// backlog is what is not yet done.
type backlog struct {
	Outbox, Retrying, Scheduled int
	Replaying                   int // dead letters on their way
	Unhandled                   int // messages without an effect and without a dead letter
	Unrecorded                  int // messages that have left the outbox but are not on the record
}

const countBacklog = `select
	(select count(*) from mill.outbox),
	(select count(*) from mill.parked),
	(select count(*) from mill.scheduled),
	(select count(*) from mill.dead_letters where state in ('replaying', 'discarding')),
	(select count(*) from app.sent s where topic in ('transfers', 'receipts')
		and not exists (select from app.effects e where e.message_id = s.message_id)
		and not exists (select from mill.dead_letters d where d.message_id = s.message_id)),
	(select count(*) from app.sent s
		where not exists (select from mill.dead_letters d where d.message_id = s.message_id and d.source = 'relay'))`

func (c *crucible) backlog(ctx context.Context) (b backlog, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	recorded := c.recorder.different()
	err = c.site.db.QueryRowContext(ctx, countBacklog).Scan(&b.Outbox, &b.Retrying, &b.Scheduled, &b.Replaying, &b.Unhandled, &b.Unrecorded)
	b.Unrecorded = max(0, b.Unrecorded-recorded)
	return b, err
}

// drain waits until nothing is left to do, then stops who makes more, and waits a little longer
// for what should not come. If nothing moves for long, it gives up: the checkers then count what
// is missing.
func (c *crucible) drain(ctx context.Context, stopOthers func()) error {
	var last backlog
	moved := time.Now()
	ticker := time.NewTicker(500 * time.Millisecond)
	defer ticker.Stop()
	for {
		now, err := c.backlog(ctx)
		if err != nil {
			return fmt.Errorf("count the backlog: %w", err)
		}
		if now != last {
			last, moved = now, time.Now()
		}
		if now == (backlog{}) {
			stopOthers()
			if time.Since(moved) > settleTime {
				return nil
			}
		}
		stall := drainStall
		if c.cluster == clusterAsync && now.Replaying == 0 {
			stall = lossyStall
		}
		if time.Since(moved) > stall {
			say("crucible: the backlog does not drain: %+v", now)
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// left returns what is left in tables and queues, for the checkers.
func (c *crucible) left(ctx context.Context) (map[string]int, error) {
	b, err := c.backlog(ctx)
	if err != nil {
		return nil, err
	}
	left := map[string]int{"the outbox": b.Outbox, "the table of retrying messages": b.Retrying, "the table of scheduled messages": b.Scheduled}
	// What RabbitMQ says of its queues is a few seconds old.
	for deadline := time.Now().Add(statsDelay); ; {
		total, err := c.countQueues(ctx, left)
		if err != nil {
			return nil, err
		}
		if total == 0 {
			return left, nil
		}
		if time.Now().After(deadline) {
			return left, c.askQueues(left)
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// askQueues asks the leaders of queues themselves. After a leader was frozen, the management API
// may go on to show what it had then.
func (c *crucible) askQueues(left map[string]int) error {
	if c.site.brokers == nil {
		return nil
	}
	return c.site.onChannel(func(ch *amqp091.Channel) error {
		for _, name := range emptyQueues {
			const durable, autoDelete, exclusive, noWait = true, false, false, false
			q, err := ch.QueueDeclarePassive(name, durable, autoDelete, exclusive, noWait, nil)
			if err != nil {
				return err
			}
			left["the queue "+name] = q.Messages
		}
		return nil
	})
}

// emptyQueues are the queues that have to be empty at the end.
var emptyQueues = []string{mirrorQueue, work.Queue(work.TopicTransfers, work.RoleLedger), work.Queue(work.TopicReceipts, work.RoleReceipts)}

// countQueues adds the messages in the queues that have to be empty.
func (c *crucible) countQueues(ctx context.Context, left map[string]int) (total int, err error) {
	var queues []queue
	if err := c.site.do(ctx, "GET", "queues/%2F?columns=name,messages", "", &queues); err != nil {
		return 0, err
	}
	for _, q := range queues {
		if slices.Contains(emptyQueues, q.Name) {
			left["the queue "+q.Name] = q.Messages
			total += q.Messages
		}
	}
	return total, nil
}
