package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// Two jobs and an operator by hand want the same dead letters of a consumer, which two
// processes handle; copies arrive in any order, and every fifth message fails again. Each of
// the others has one effect, each failure is linked, and the counts are right.
func TestReplays_JobsAndAnOperatorAtOnceHaveOneEffect(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		const n = 60
		store, rec := p.letterStore(t), &recorder{}
		with := func(cfg *inbox.Config) {
			cfg.DeadLetters, cfg.Replays = store, &inbox.Replays{Publisher: rec, Topic: toQueue}
		}
		processes := []*inbox.Inbox{p.inbox(t, with), p.inbox(t, with)}
		fails := map[string]bool{}
		for i := range n {
			name := fmt.Sprint("m", i)
			fails[name] = i%5 == 0
			expectNoError(t, deliver(t, processes[0], name, bad))
		}
		var ids []int64
		all, err := store.List(t.Context(), dlq.Filter{OldestFirst: true, Limit: n})
		expectNoError(t, err)
		for _, l := range all {
			ids = append(ids, l.ID)
		}
		handler := func(m *message.Message) ([]*message.Message, error) {
			if fails[m.UUID] {
				return bad(m)
			}
			return effect(m)
		}
		plan := dlq.JobPlan{Rate: 200, Filter: dlq.Filter{Consumer: "stock"}}
		first, err := store.StartJob(t.Context(), plan, eve)
		expectNoError(t, err)
		second, err := store.StartJob(t.Context(), plan, dlq.Act{By: "bob", Reason: "mine"})
		expectNoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var workers sync.WaitGroup
		defer workers.Wait()
		defer cancel()
		for _, in := range processes {
			workers.Go(func() {
				for testserver.Pause(ctx, 5*time.Millisecond) {
					if _, err := in.Replay(ctx); err != nil && ctx.Err() == nil {
						t.Error(err)
					}
					rec.mu.Lock()
					batch := append([]*message.Message(nil), rec.msgs...)
					rec.mu.Unlock()
					rand.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
					for _, m := range batch[:min(len(batch), 40)] {
						m = m.Copy()
						m.SetContext(context.WithoutCancel(ctx))
						if err := deliverMessage(t, in, m, handler); err != nil && !errors.Is(err, inbox.ErrBeingHandled) {
							t.Error(err)
						}
					}
				}
			})
			workers.Go(func() { // a runner of jobs
				for testserver.Pause(ctx, 5*time.Millisecond) {
					if _, err := store.RunJobs(ctx); err != nil && ctx.Err() == nil {
						t.Error(err)
					}
				}
			})
		}
		byHand, err := store.Replay(t.Context(), ids[n-7:], dlq.Act{By: "cyd", Reason: "mine, too"})
		var state *dlq.StateError
		if err != nil && !errors.As(err, &state) {
			t.Fatal(err)
		}
		jobs := map[int64]*dlq.Job{}
		testserver.Eventually(t, "both jobs have finished", func() bool {
			for _, id := range []int64{first.ID, second.ID} {
				j, err := store.Job(t.Context(), id)
				expectNoError(t, err)
				if sum := j.Pending + j.Asked + j.Replayed + j.Failed + j.Discarded + j.Taken + j.Skipped; sum != j.Total {
					t.Errorf("the counts of %+v add up to %d", j, sum)
				}
				jobs[id] = j
			}
			return jobs[first.ID].State == dlq.JobFinished && jobs[second.ID].State == dlq.JobFinished
		})
		testserver.Eventually(t, "those by hand are handled", func() bool {
			return p.count(t, `select count(*) from {{dead_letters}} where state = 'replayed'`) == n
		})
		cancel()
		workers.Wait()
		if effects, distinct := p.count(t, `select count(*) from effects`), p.count(t, `select count(distinct message_id) from effects`); effects != n-n/5 || distinct != effects {
			t.Errorf("%d effects of %d messages, want %d", effects, distinct, n-n/5)
		}
		handFailed := int64(0)
		for i, id := range ids {
			l, err := store.Get(t.Context(), id)
			expectNoError(t, err)
			if l.State != dlq.StateReplayed || (l.FailedAgain != 0) != fails[l.MessageID] {
				t.Errorf("dead letter %d of %s is %s, failed again as %d", id, l.MessageID, l.State, l.FailedAgain)
			}
			if l.FailedAgain == 0 {
				continue
			}
			if i >= n-7 && l.Act.By == "cyd" {
				handFailed++
			}
			if again, err := store.Get(t.Context(), l.FailedAgain); err != nil || again.MessageID != l.MessageID || again.State != dlq.StateDead {
				t.Errorf("%+v, %v", again, err)
			}
		}
		a, b, hand := jobs[first.ID], jobs[second.ID], int64(len(byHand))
		if a.Replayed+b.Replayed+a.Failed+b.Failed+hand != n || a.Failed+b.Failed+handFailed != n/5 {
			t.Errorf("%+v, %+v, %d by hand, %d of these failed", a, b, hand, handFailed)
		}
		if audited := p.count(t, `select count(distinct subject) from {{audit}} where action = 'dead_letter.replay'`); audited != n || p.count(t, `select count(*) from {{audit}} where action = 'dead_letter.replay'`) != n {
			t.Errorf("%d replays are in the audit", audited)
		}
	})
}

// A dry run says what the inbox will drop, and a job over these dead letters has no more effects
// than that.
func TestReplays_ADryRunCountsWhatWillHaveNoEffect(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store, rec := p.letterStore(t), &recorder{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters, cfg.Replays = store, &inbox.Replays{Publisher: rec, Topic: toQueue}
		})
		for _, id := range []string{"fresh", "other"} {
			expectNoError(t, deliver(t, in, id, bad))
		}
		expectNoError(t, deliver(t, in, "handled", effect))
		for _, of := range []string{"handled", "twice", "twice"} {
			importLetter(t, store, "stock", of)
		}
		preview, err := store.PreviewJob(t.Context(), dlq.JobPlan{})
		if err != nil || preview.Uncounted != nil || len(preview.Counts) != 1 || preview.Counts[0].Count != 5 || preview.Counts[0].Duplicates != 2 {
			t.Errorf("%+v, %v", preview, err)
		}
		replayAll(t, store, "stock")
		_, err = in.Replay(t.Context())
		expectNoError(t, err)
		for _, m := range rec.msgs {
			m.SetContext(context.WithoutCancel(t.Context()))
			expectNoError(t, deliverMessage(t, in, m, effect))
		}
		if effects := p.count(t, `select count(*) from effects`); effects != 1+3 || len(rec.msgs) != 5 {
			t.Errorf("%d effects of %d replays", effects, len(rec.msgs))
		}
		if open := p.count(t, `select count(*) from {{dead_letters}} where state <> 'replayed'`); open != 0 {
			t.Errorf("%d replays have not ended", open)
		}
		where, err := database.Resolve(p.db, p.cfg)
		expectNoError(t, err)
		p.exec(t, where.Expand(`alter table {{inbox}} rename to inbox_away`))
		preview, err = store.PreviewJob(t.Context(), dlq.JobPlan{Filter: dlq.Filter{Consumer: "stock"}})
		if err != nil || preview.Total != 0 || preview.Uncounted != nil {
			t.Errorf("%+v, %v", preview, err)
		}
		importLetter(t, store, "stock", "late")
		preview, err = store.PreviewJob(t.Context(), dlq.JobPlan{})
		if err != nil || preview.Total != 1 || preview.Uncounted == nil {
			t.Errorf("without the inbox: %+v, %v", preview, err)
		}
	})
}
