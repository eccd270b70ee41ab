package dlqstore_test

import (
	"database/sql"
	"fmt"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/dlqstore"
)

// wait makes two minutes pass for the replays that were requested.
func (f *fixture) wait(t *testing.T) {
	t.Helper()
	back := `interval '2 minutes'`
	if f.where.Dialect == oncemill.SQLite {
		back = `120000000`
	}
	f.exec(t, `update {{dead_letter_job_letters}} set asked_at = asked_at - `+back)
}

// end ends one replay, as the consumer's inbox does.
func (f *fixture) end(t *testing.T, id int64) {
	t.Helper()
	token, err := f.ReplayToken(t.Context(), id)
	must(t, err)
	f.inTx(t, func(tx *sql.Tx) error {
		ended, err := f.EndReplay(t.Context(), tx, "stock", id, token, []byte("p"))
		if !ended {
			t.Errorf("the replay of %d does not end", id)
		}
		return err
	})
}

// A replay that its consumer refuses again, as it comes from a stranger, never ends. It is no
// part of a canary, and the job says what to do.
func TestJob_ARefusedReplayKeepsNoCanaryFromPassing(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		forgery := dlqstore.Letter{Topic: "orders", MessageID: "forged", Payload: []byte("p"), Reason: "unverified"}
		forged := f.add(t, forgery)
		ids := f.addMany(t, 5)
		plan := fast
		plan.Canary = 1
		job := f.start(t, plan)
		f.run(t, job, asked(1))
		f.wait(t)
		j := f.run(t, job, func(j *dlqstore.Job) bool { return j.Waiting != "" })
		for range 5 {
			f.elapse(t)
			_, err := f.RunJob(t.Context())
			must(t, err)
		}
		if j.Waiting != "nobody carries out the replays of consumer stock" || f.job(t, job).Asked != 1 {
			t.Errorf("nobody has refused it: %+v", j)
		}
		f.add(t, forgery) // the consumer has refused it again
		f.run(t, job, asked(2))
		f.end(t, ids[0])
		f.run(t, job, func(j *dlqstore.Job) bool { return j.CanaryPassed && j.Asked == 5 })
		for _, id := range ids[1:] {
			f.end(t, id)
		}
		j = f.run(t, job, func(j *dlqstore.Job) bool { return j.Replayed == 5 })
		if j.State != "running" || j.Asked != 1 || !strings.Contains(j.Waiting, "consumer stock refuses") || !strings.Contains(j.Waiting, "discard") {
			t.Errorf("%+v", j)
		}
		_, err := f.Discard(t.Context(), []int64{forged}, "ada", "forged")
		must(t, err)
		if j := f.run(t, job, inState("finished")); j.Discarded != 1 || j.Failed != 0 {
			t.Errorf("%+v", j)
		}
	})
}

// A canary whose consumer refuses all messages, since it knows another key by now, has failed.
func TestJob_ACanaryThatIsRefusedAsAWholeHasFailed(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		forge := func() {
			for i := range 40 {
				f.add(t, dlqstore.Letter{Topic: "orders", MessageID: fmt.Sprint("m", i), Payload: []byte("p"), Reason: "unverified"})
			}
		}
		forge()
		plan := fast
		plan.Canary = 10
		job := f.start(t, plan)
		f.run(t, job, asked(10))
		f.wait(t)
		forge() // the consumer has refused them again
		j := f.run(t, job, inState("paused"))
		if j.CanaryPassed || j.Asked != 10 || !strings.Contains(j.Note, "refuses") {
			t.Errorf("%+v", j)
		}
	})
}

// A canary of which no replay has come to an end is not passed.
func TestJob_WithoutAnOutcomeNoCanaryHasPassed(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 5)
		plan := fast
		plan.Canary = 10
		job := f.start(t, plan)
		f.run(t, job, asked(5))
		f.carryOut(t, ids...)
		f.run(t, job, inState("paused"))
		_, _, err := f.ResumeJob(t.Context(), job, "ada", "known")
		must(t, err)
		j := f.run(t, job, inState("finished"))
		if all := strings.Join(f.audited(t), "\n"); j.CanaryPassed || strings.Contains(all, "canary_passed") {
			t.Errorf("%+v; audited\n%s", j, all)
		}
	})
}
