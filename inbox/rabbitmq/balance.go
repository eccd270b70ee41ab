package rabbitmq

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Every process has a consumer at every shard, and RabbitMQ gives a shard to the first in
// line. So the process that comes first gets all of them. Each process also has a consumer at
// a queue that never has messages. The number of its consumers is all that processes need to
// know of each other: one with more than its share of the shards leaves some of them and gets
// in line again. The next process does the same if it has its share already. As there is room
// for all shards, each soon arrives where there is. A number that is out of date leads to
// another division, never to two consumers of a shard.

// balance hands over shards until ctx ends.
func (set *shardSet) balance(ctx context.Context) {
	var here presence
	defer here.leave()
	ticker := time.NewTicker(set.owner.settings.Shards.Rebalance)
	defer ticker.Stop()
	first := rand.IntN(set.layout.count)
	for before := 0; ; {
		processes, err := here.count(ctx, set)
		if err != nil && ctx.Err() == nil {
			set.owner.settings.Logger.DebugContext(ctx, "consumers not counted", "topic", set.topic, "error", err)
		}
		if err == nil {
			for _, sub := range set.excess(processes, processes > before, first) {
				sub.handOver()
			}
			before = processes
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// presence is the consumer of a process at the queue of all processes.
type presence struct {
	link    *link
	channel *amqp.Channel
}

// count returns how many processes are there, this one included.
func (p *presence) count(ctx context.Context, set *shardSet) (processes int, err error) {
	if p.channel == nil {
		if p.link, err = set.owner.connector.get(ctx); err != nil {
			return 0, err
		}
	}
	err = p.link.within(func() error {
		if p.channel == nil {
			if err := p.enter(set); err != nil {
				return err
			}
		}
		state, err := p.channel.QueueDeclarePassive(set.layout.processes(), durable, autoDelete, exclusive, noWait, nil)
		processes = max(1, state.Consumers)
		return err
	})
	if err != nil {
		p.leave()
	}
	return processes, err
}

func (p *presence) enter(set *shardSet) (err error) {
	if p.channel, err = p.link.conn.Channel(); err != nil {
		return err
	}
	// A message is a mistake of its sender. It stays here, and no other comes.
	if err := p.channel.Qos(1, 0, false); err != nil {
		return err
	}
	queue, arguments := set.layout.processes(), amqp.Table{queueTypeArgument: set.owner.settings.topology.Queue.Arguments[queueTypeArgument]}
	if _, err := p.channel.QueueDeclare(queue, durable, autoDelete, exclusive, noWait, arguments); err != nil {
		return err
	}
	const autoAck, noLocal = false, false
	_, err = p.channel.Consume(queue, "", autoAck, exclusive, noLocal, noWait, nil)
	return err
}

func (p *presence) leave() {
	if p.channel != nil {
		// If it fails, the channel is closed too.
		_ = p.link.within(p.channel.Close)
		p.channel = nil
	}
}

// excess returns the subscriptions beyond the share of this process.
func (set *shardSet) excess(processes int, added bool, first int) (found []*subscription) {
	set.mu.Lock()
	defer set.mu.Unlock()
	since := make([]int64, set.layout.count)
	for i := range since {
		since[i] = absent
		if sub := set.shards[i]; sub != nil {
			since[i] = sub.shard.since.Load()
		}
	}
	for _, i := range excess(since, processes, added, first) {
		found = append(found, set.shards[i])
	}
	return found
}

// absent is the time of a shard without a consumer here: it is being handed over, or gone.
const absent = -1

// excess returns the numbers of the shards beyond the share of a process, by the times of the
// first messages (0: none yet). A consumer notices that it is the active one when it gets a
// message. So those with messages count, and the latest ones go first. If processes have been
// added, shards without messages go too: this process may be the active consumer of all of
// them. Processes keep different ones, beginning at first.
func excess(since []int64, processes int, added bool, first int) (numbers []int) {
	share := (len(since) + processes - 1) / processes
	var active, silent []int
	for i := range since {
		switch i := (first + i) % len(since); {
		case since[i] > 0:
			active = append(active, i)
		case since[i] == 0:
			silent = append(silent, i)
		}
	}
	slices.SortStableFunc(active, func(a, b int) int { return cmp.Compare(since[a], since[b]) })
	numbers = active[min(share, len(active)):]
	if added {
		numbers = append(numbers, silent[min(max(0, share-len(active)), len(silent)):]...)
	}
	return numbers
}
