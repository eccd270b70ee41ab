package relay_test

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/steer"
)

// Under load, with three topics and keys that cross them, one topic is paused for a minute (4 s
// in short): nothing of it goes out after 2 s, the others keep their rate, and keys their order.
func TestSteer_PausesATopicUnderLoad(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		during, perSecond, backlog := testserver.Rounds(4*time.Second, time.Minute), testserver.Rounds(100, 300), testserver.Rounds(1000, 3000)
		if testserver.Long() && p.postgres() {
			backlog = 100_000
		}
		control, box, sink := p.control(t), p.box(t), newCounting()
		start(t, box, sink, p.unhurried())
		producing, stop := context.WithCancel(t.Context())
		var group sync.WaitGroup
		t.Cleanup(func() { stop(); group.Wait() })
		var sent []string
		var others atomic.Int64
		// A third of the keys has messages of the paused topic; the others have none.
		group.Go(func() {
			for tick := 0; producing.Err() == nil; tick++ {
				var ids []string
				free := int64(0)
				err := box.RunInTx(context.WithoutCancel(producing), func(_ context.Context, tx *sql.Tx) error {
					ids, free = nil, 0
					for n := range perSecond / 10 {
						topic, key := "b", fmt.Sprint("free", n%7)
						if n%3 == 0 {
							topic, key = []string{"a", "c"}[tick%2], fmt.Sprint("crossing", n%5)
						}
						m := message.NewMessage(fmt.Sprintf("%s/%09d", key, tick*1000+n), nil)
						outbox.SetKey(m, key)
						if err := box.Publisher(tx).Publish(topic, m); err != nil {
							return err
						}
						ids = append(ids, m.UUID)
						if topic == "b" {
							free++
						}
					}
					return nil
				})
				if err == nil {
					sent = append(sent, ids...)
					others.Add(free)
				}
				select {
				case <-producing.Done():
				case <-time.After(100 * time.Millisecond):
				}
			}
		})
		// The machine may be busy: what counts is how much of what is written comes out.
		share := func(over time.Duration) float64 {
			before, written := sink.of("b"), others.Load()
			time.Sleep(over)
			return float64(sink.of("b")-before) / float64(others.Load()-written)
		}
		eventually(t, "it flows", func() bool { return sink.of("a") > 50 && sink.of("b") > 50 })
		do(t, control.Pause(t.Context(), steer.Target{Kind: steer.Topic, Name: "a"}, ada))
		time.Sleep(2 * time.Second)
		paused := sink.of("a")
		for rest := backlog; rest > 0; rest -= 1000 {
			msgs := make([]*message.Message, min(1000, rest))
			for i := range msgs {
				msgs[i] = message.NewMessage(watermill.NewUUID(), []byte("backlog"))
			}
			commitTo(t, box, "a", msgs...)
		}
		free := share(during)
		if n := sink.of("a") - paused; n > 0 {
			t.Errorf("%d of the paused topic were sent later than 2 s after", n)
		}
		t.Logf("%.0f %% of the others were delivered at once while %d and more waited", 100*free, backlog)
		if testserver.Long() && free < 0.9 { // in a few seconds, a delay of the machine is more
			t.Errorf("only %.0f %% of the others were delivered while a topic was paused", 100*free)
		}
		written := others.Load()
		eventually(t, "all others are delivered, while the topic is paused", func() bool { return int64(sink.of("b")) >= written })
		if n := sink.of("a") - paused; n > 0 {
			t.Errorf("%d of the paused topic were sent before it was resumed", n)
		}
		do(t, control.Resume(t.Context(), steer.Target{Kind: steer.Topic, Name: "a"}, ada))
		resumed := time.Now()
		stop()
		group.Wait()
		p.awaitNothingOwed(t)
		t.Logf("all delivered %v after it was resumed", time.Since(resumed).Round(time.Millisecond))
		sink.mu.Lock()
		defer sink.mu.Unlock()
		delivered := 0
		for key, ids := range sink.ids {
			delivered += len(ids)
			if key == "" {
				continue
			}
			for i := 1; i < len(ids); i++ {
				if ids[i] < ids[i-1] {
					t.Fatalf("%s came after %s", ids[i], ids[i-1])
				}
			}
		}
		if want := len(sent) + backlog; delivered != want {
			t.Errorf("%d delivered, want %d", delivered, want)
		}
		if n := p.count(t, `select count(*) from {{dead_letters}}`); n > 0 {
			t.Errorf("%d dead letters", n)
		}
	})
}
