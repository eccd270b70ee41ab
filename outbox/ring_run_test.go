package outbox_test

import (
	"context"
	crand "crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
)

// ringRun drives an outbox round its ring with everybody at work: producers that
// are fast, slow, or change their minds, readers that remove what they read,
// several upkeeps at once, and a transaction that is open all along.
type ringRun struct {
	*fixture
	stop func() // ends the producers
	ctx  context.Context

	turns     atomic.Int64 // of the sequence, jumps included
	truncated atomic.Int64
	late      atomic.Int64 // rows committed into a partition that ids had left
	rollbacks atomic.Int64

	mu        sync.Mutex
	committed map[string]bool
	delivered map[string]bool
}

func TestRing_LosesNothingWhileItGoesRound(t *testing.T) {
	t.Parallel()
	truncations, few := testserver.Rounds[int64](4, 200), testserver.Rounds[int64](3, 5)
	r := &ringRun{fixture: ring(t), committed: map[string]bool{}, delivered: map[string]bool{}}
	r.db.SetMaxOpenConns(20)
	r.spread(t)
	r.exec(t, `create table report (id int)`)
	holder, err := r.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback()
	_, err = holder.ExecContext(t.Context(), `insert into report values (1)`)
	expectNoError(t, err)

	r.ctx, r.stop = context.WithCancel(t.Context())
	defer r.stop()
	var producers, others sync.WaitGroup
	for w := range 4 {
		producers.Go(func() { r.produce(t, w) })
	}
	producers.Go(func() { r.advance(t) })
	working, end := context.WithCancel(t.Context())
	defer end()
	for range 2 {
		others.Go(func() {
			for working.Err() == nil {
				r.deliver(t)
			}
		})
		others.Go(func() {
			for working.Err() == nil {
				done, err := r.queue.Maintain(t.Context(), always)
				expectNoError(t, err)
				r.truncated.Add(int64(done.Truncated))
				testserver.Pause(working, time.Millisecond)
			}
		})
	}
	// Only a run that has been everywhere means anything.
	been, cancel := context.WithTimeout(t.Context(), testserver.MaxWait)
	testserver.Poll(been, func() bool {
		return t.Failed() || r.truncated.Load() >= truncations && r.turns.Load() >= 8 && r.late.Load() >= few && r.rollbacks.Load() >= few
	})
	cancel()
	r.stop()
	producers.Wait()
	end()
	others.Wait()
	for r.deliver(t) > 0 {
	}
	t.Logf("%d messages, %d turns, %d truncations, %d late commits, %d rollbacks",
		len(r.committed), r.turns.Load(), r.truncated.Load(), r.late.Load(), r.rollbacks.Load())
	if r.truncated.Load() < truncations || r.turns.Load() < 8 || r.late.Load() < few || r.rollbacks.Load() < few {
		t.Error("the run has not been everywhere: it shows nothing")
	}
	for id := range r.committed {
		if !r.delivered[id] {
			t.Errorf("%s is lost", id)
		}
	}
	for id := range r.delivered {
		if !r.committed[id] {
			t.Errorf("%s was never committed", id)
		}
	}
}

var errChangedMind = errors.New("changed its mind")

func (r *ringRun) produce(t *testing.T, writer int) {
	payload := make([]byte, 1200)
	crand.Read(payload)
	for n := 0; r.ctx.Err() == nil; n++ {
		msgs := make([]*message.Message, 1+rand.IntN(40))
		for i := range msgs {
			msgs[i] = message.NewMessage(fmt.Sprintf("%d-%d-%d", writer, n, i), payload)
		}
		slow := rand.IntN(10) == 0
		var turn int64
		err := r.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			turn = r.turns.Load()
			if err := r.box.Publisher(tx).Publish("orders", msgs...); err != nil {
				return err
			}
			if slow { // stays open until the ids have gone on
				limited, cancel := context.WithTimeout(r.ctx, 2*time.Second)
				testserver.Poll(limited, func() bool { return r.turns.Load() != turn })
				cancel()
			}
			if rand.IntN(10) == 0 {
				return errChangedMind
			}
			return nil
		})
		switch {
		case errors.Is(err, errChangedMind):
			r.rollbacks.Add(1)
			continue
		case err != nil:
			t.Error(err)
			return
		case slow && r.turns.Load() > turn:
			r.late.Add(1)
		}
		r.mu.Lock()
		for _, msg := range msgs {
			r.committed[msg.UUID] = true
		}
		r.mu.Unlock()
	}
}

// advance lets a thousand rows into a partition and then jumps to just before
// the end of a later one: the ring goes round in thousands instead of 262,144 ids,
// and every boundary is crossed by producers.
func (r *ringRun) advance(t *testing.T) {
	for ; r.ctx.Err() == nil; testserver.Pause(r.ctx, 2*time.Millisecond) {
		last := int64(r.count(t, `select last_value from {{outbox_id}}`))
		if last%idsPerPartition < 1100 || last%idsPerPartition > idsPerPartition-1000 {
			continue
		}
		// The upkeep turns the ring at the same time: the ids must never go back.
		jump := int64(rand.IntN(3))
		if _, err := r.db.ExecContext(t.Context(), r.expand(t, `select count(nextval('{{outbox_id}}')) from generate_series(1, $1::bigint)`), (last/idsPerPartition+1+jump)*idsPerPartition-20-last); err != nil {
			t.Error(err)
		}
		r.turns.Add(jump + 1)
	}
}

// deliver reads, takes the rows for delivered, removes them, and returns how
// many they were.
func (r *ringRun) deliver(t *testing.T) int {
	rows, err := r.queue.Read(t.Context(), outboxstore.ReadRequest{Lanes: allLanes(), Rows: 50, Bytes: 1 << 20})
	if err != nil {
		t.Error(err)
		return 0
	}
	r.mu.Lock()
	for _, row := range rows {
		r.delivered[row.MessageID] = true
	}
	r.mu.Unlock()
	for failures := 1; ; failures++ {
		_, err := r.queue.Remove(t.Context(), refs(rows))
		if err == nil {
			return len(rows)
		}
		// A relay tries again, too: the server may stand for longer than a removal may take.
		if again := sqlerr.Retryable(err) || sqlerr.TimedOut(err); !again || failures == 20 {
			t.Error(err)
			return 0
		}
	}
}
