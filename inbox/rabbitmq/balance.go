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
// line. So the process that comes first gets all of them. But the line shows how many
// processes there are, and that is all they need to know of each other: a process with more
// than its share of the shards leaves some of them and gets in line again. The next process
// does the same if it has its share already. As there is room for all shards, each soon
// arrives where there is. A view that is out of date leads to another division, never to two
// consumers of a shard.

// balance hands over shards until ctx ends.
func (set *shardSet) balance(ctx context.Context) {
	ticker := time.NewTicker(set.owner.settings.Shards.Rebalance)
	defer ticker.Stop()
	first := rand.IntN(set.layout.count)
	for before := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		processes := set.processes()
		for _, sub := range set.excess(processes, processes > before, first) {
			sub.handOver()
		}
		before = processes
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

// lookAt is how many lines are looked at: a process that hands a shard over is missing in its
// line for a moment.
const lookAt = 3

// processes returns how many processes subscribe; 1 if the broker does not answer.
func (set *shardSet) processes() int {
	most := 1
	// After an error there is nothing to hand over: the next look may succeed.
	_ = set.owner.onChannel(set.owner.connector, func(_ *link, channel *amqp.Channel) error {
		first := rand.IntN(set.layout.count)
		for i := range min(lookAt, set.layout.count) {
			state, err := channel.QueueDeclarePassive(set.layout.queue((first+i)%set.layout.count), true, false, false, false, nil)
			if err != nil {
				return err
			}
			most = max(most, state.Consumers)
		}
		return nil
	})
	return most
}
