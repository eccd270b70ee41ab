package relay_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
)

// Dead letters in 40 groups are replayed by a job with a canary. Its worker is killed in the
// middle, and a second operator replays one group, and then all of it with another job, at the
// same time. Each message arrives, each dead letter is replayed once and audited once, and the
// counts are right.
func TestRelay_AReplayJobSurvivesAKillAndASecondOperator(t *testing.T) {
	testserver.NeedsLong(t)
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) { // what differs is in internal/dlqstore
		const groups, n, rate = 40, 50_000, 500
		letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg})
		if err != nil {
			t.Fatal(err)
		}
		box := p.boxOn(t, p.db, 24*time.Hour)
		var mended atomic.Bool
		broker := startBroker(t, func(frame) (outcome, time.Duration) {
			if mended.Load() {
				return confirmed, 0
			}
			return refused, 0
		})
		for i := 0; i < n; i += 400 {
			var batch []*message.Message
			for j := i; j < i+400; j++ {
				m := message.NewMessage(fmt.Sprint("m", j), []byte("payload"))
				m.Metadata.Set("oncemill_key", fmt.Sprint("group ", j%groups))
				batch = append(batch, m)
			}
			commit(t, box, batch...)
		}
		worker := func(name string) *process {
			return startProcess(t, p, broker, workerSpec{Name: name, History: 24 * time.Hour, Lease: 15 * time.Second, Window: 64, Batch: 64, Retry: relay.Retry{MaxAttempts: 1}})
		}
		began := time.Now()
		step := func(what string) {
			t.Logf("%d dead letters: %s after %v", n, what, time.Since(began).Round(time.Second/10))
			began = time.Now()
		}
		first := worker("first")
		dead := func() int { return p.count(t, `select count(*) from {{dead_letters}} where state = 'dead'`) }
		testserver.EventuallyMoving(t, "all are dead", func() bool { return dead() == n }, dead)
		mended.Store(true)
		step("died")
		preview, err := letters.PreviewJob(t.Context(), dlq.JobPlan{})
		if err != nil || preview.Total != 10_000 || !preview.Partial {
			t.Errorf("preview %+v, %v", preview, err)
		}
		step("dry run")
		act, other := dlq.Act{By: "ada", Reason: "broker is mended"}, dlq.Act{By: "bob", Reason: "mine"}
		job, err := letters.StartJob(t.Context(), dlq.JobPlan{Canary: 10, Rate: rate, StopAfter: 20}, act)
		if err != nil {
			t.Fatal(err)
		}
		get := func(id int64) *dlq.Job {
			j, err := letters.Job(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			if sum := j.Pending + j.Asked + j.Replayed + j.Failed + j.Discarded + j.Taken + j.Skipped; sum != j.Total {
				t.Fatalf("counts of %+v add up to %d", j, sum)
			}
			return j
		}
		eventually(t, "the job is in the middle", func() bool { j := get(job.ID); return j.CanaryPassed && j.Total-j.Pending > int64(n)/10 })
		step("canary and a tenth")
		first.kill()
		if j := get(job.ID); j.Pending == 0 || j.Ended() {
			t.Fatalf("the kill came too late: %+v", j)
		}
		group, err := letters.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateDead}, Key: "group 39", Limit: 1000})
		if err != nil || len(group) == 0 {
			t.Fatal(len(group), err)
		}
		var ids []int64
		for _, l := range group {
			ids = append(ids, l.ID)
		}
		mine, err := letters.Replay(t.Context(), ids, other)
		if err != nil || len(mine) != len(ids) {
			t.Fatal(len(mine), len(ids), err)
		}
		second, err := letters.StartJob(t.Context(), dlq.JobPlan{Rate: 500}, other)
		if err != nil {
			t.Fatal(err)
		}
		p.letLeasesExpire(t, "first")
		third := worker("second")
		eventually(t, "both jobs have finished", func() bool {
			a, b := get(job.ID), get(second.ID)
			if a.State == dlq.JobPaused || b.State == dlq.JobPaused {
				t.Fatalf("%+v, %+v", a, b)
			}
			return a.State == dlq.JobFinished && b.State == dlq.JobFinished
		})
		step("replayed by two jobs, with the kill")
		third.end()
		a, b := get(job.ID), get(second.ID)
		if a.Total != int64(n) || a.Failed+b.Failed != 0 || a.Replayed+b.Replayed+int64(len(mine)) != int64(n) || a.Taken != int64(len(mine))+b.Replayed {
			t.Errorf("%+v, %+v, %d by hand", a, b, len(mine))
		}
		arrived := map[string]bool{}
		for _, d := range broker.all() {
			arrived[d.MessageID] = true
		}
		for name, query := range map[string]string{
			"replayed":              `select count(*) from {{dead_letters}} where state = 'replayed'`,
			"audited":               `select count(*) from {{audit}} where action = 'dead_letter.replay'`,
			"audited, each once":    `select count(distinct subject) from {{audit}} where action = 'dead_letter.replay'`,
			"arrived, by the relay": `select count(distinct message_id) from {{outbox_history}}`,
		} {
			if got := p.count(t, query); got != n || len(arrived) < n {
				t.Errorf("%s: %d of %d", name, got, n)
			}
		}
	})
}

// A broker that still refuses fails a canary, however long a relay retries the messages before
// they are dead letters again.
func TestRelay_ACanaryWaitsWhileMessagesAreRetried(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg})
		if err != nil {
			t.Fatal(err)
		}
		box := p.boxOn(t, p.db, 24*time.Hour)
		broker := startBroker(t, func(frame) (outcome, time.Duration) { return refused, 0 })
		var batch []*message.Message
		for i := range 6 {
			batch = append(batch, message.NewMessage(fmt.Sprint("m", i), []byte("payload")))
		}
		commit(t, box, batch...)
		worker := startProcess(t, p, broker, workerSpec{
			Name: "first", History: 24 * time.Hour, Lease: 15 * time.Second, Window: 64, Batch: 64,
			Retry: relay.Retry{MaxAttempts: 4, Initial: 2 * time.Second, Max: 4 * time.Second},
		})
		defer worker.end()
		eventually(t, "all are dead", func() bool {
			return p.count(t, `select count(*) from {{dead_letters}} where state = 'dead'`) == 6
		})
		job, err := letters.StartJob(t.Context(), dlq.JobPlan{Canary: 3}, dlq.Act{By: "ada", Reason: "broker is mended"})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "the canary fails", func() bool {
			j, err := letters.Job(t.Context(), job.ID)
			if err != nil || j.CanaryPassed || j.Replayed > 0 || j.Pending > 0 && j.Pending < 3 { // a rate may ask for one at a time
				t.Fatalf("%+v, %v", j, err)
			}
			return j.State == dlq.JobPaused && j.Failed == 3 && j.Note == "canary failed: 3 of 3 failed again"
		})
	})
}
