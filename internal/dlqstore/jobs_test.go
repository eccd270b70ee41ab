package dlqstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/dlqstore"
)

// fast is a plan for all dead letters at the highest rate.
var fast = dlqstore.JobPlan{Filter: dlqstore.JobFilter{States: []string{"dead", "held"}}, Rate: 1000}

// addMany adds n dead letters of the consumer stock, and returns their ids.
func (f *fixture) addMany(t *testing.T, n int) (ids []int64) {
	t.Helper()
	f.inTx(t, func(tx *sql.Tx) error {
		for i := range n {
			if err := f.Add(t.Context(), tx, &dlqstore.Letter{Consumer: "stock", Topic: "orders", MessageID: fmt.Sprint("m", i), Payload: []byte("p"), Reason: "failed"}); err != nil {
				return err
			}
		}
		return nil
	})
	rows, err := f.db.QueryContext(t.Context(), f.where.Expand(`select id from {{dead_letters}} order by id desc limit $1`), n)
	must(t, err)
	defer rows.Close()
	for rows.Next() {
		var id int64
		must(t, rows.Scan(&id))
		ids = append(ids, id)
	}
	must(t, rows.Err())
	slices.Reverse(ids)
	return ids
}

func (f *fixture) start(t *testing.T, plan dlqstore.JobPlan) int64 {
	t.Helper()
	j, err := f.StartJob(t.Context(), plan, "ada", "fixed")
	must(t, err)
	return j.ID
}

// job returns a job, whose counts have to add up.
func (f *fixture) job(t *testing.T, id int64) *dlqstore.Job {
	t.Helper()
	j, err := f.Job(t.Context(), id)
	must(t, err)
	if sum := j.Pending + j.Asked + j.Replayed + j.Failed + j.Discarded + j.Taken + j.Skipped; sum != j.Total {
		t.Errorf("the counts of %+v add up to %d", j, sum)
	}
	return j
}

// run runs jobs until done reports true of the job. Whenever nothing is due, everything is.
func (f *fixture) run(t *testing.T, id int64, done func(*dlqstore.Job) bool) *dlqstore.Job {
	t.Helper()
	for range 3000 {
		if j := f.job(t, id); done(j) {
			return j
		}
		if worked, err := f.RunJob(t.Context()); err != nil {
			t.Fatal(err)
		} else if !worked {
			f.elapse(t)
		}
	}
	t.Fatalf("not done: %+v", f.job(t, id))
	return nil
}

// elapse makes what is due in a second due now.
func (f *fixture) elapse(t *testing.T) {
	t.Helper()
	second := `interval '1 second'`
	if f.where.Dialect == oncemill.SQLite {
		second = `1000000`
	}
	f.exec(t, strings.ReplaceAll(`update {{dead_letter_jobs}} set due_at = due_at - SECOND, paced_at = paced_at - SECOND where ended_at is null`, "SECOND", second))
}

// carryOut ends all replays in progress, as the consumer's inbox does; those of fail fail again.
func (f *fixture) carryOut(t *testing.T, fail ...int64) {
	t.Helper()
	list, err := f.List(t.Context(), dlqstore.Filter{States: []string{"replaying"}, Limit: 1000})
	must(t, err)
	tokens := map[int64]string{}
	for _, l := range list {
		tokens[l.ID], err = f.ReplayToken(t.Context(), l.ID)
		must(t, err)
	}
	f.inTx(t, func(tx *sql.Tx) error {
		for _, l := range list {
			if ended, err := f.EndReplay(t.Context(), tx, "stock", l.ID, tokens[l.ID], []byte("p")); err != nil || !ended {
				return fmt.Errorf("ended %v: %w", ended, err)
			}
			if !slices.Contains(fail, l.ID) {
				continue
			}
			if err := f.Add(t.Context(), tx, &dlqstore.Letter{Consumer: "stock", Topic: l.Topic, MessageID: l.MessageID, Payload: []byte("p"), Reason: "failed"}); err != nil {
				return err
			}
		}
		return nil
	})
}

func inState(state string) func(*dlqstore.Job) bool {
	return func(j *dlqstore.Job) bool { return j.State == state }
}

func asked(n int64) func(*dlqstore.Job) bool {
	return func(j *dlqstore.Job) bool { return j.Asked == n }
}

// once is for tests of what does not depend on the isolation level.
func once(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	eachDatabase(t, []string{"read committed"}, test)
}

func TestJob_ReplaysWhatWasThereWhenItStarted(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 703)
		_, err := f.Discard(t.Context(), ids[:1], "bob", "d")
		must(t, err)
		job := f.start(t, fast)
		late := f.addMany(t, 1)[0]
		f.run(t, job, func(j *dlqstore.Job) bool { return j.Pending == 0 && j.Asked > 0 })
		f.carryOut(t)
		if j := f.run(t, job, inState("finished")); j.Total != 702 || j.Replayed != 702 || j.EndedAt.IsZero() {
			t.Errorf("%+v", j)
		}
		f.expectStates(t, map[int64]string{ids[0]: "discarded", ids[1]: "replayed", ids[702]: "replayed", late: "dead"})
	})
}

func TestJob_EveryReplayAndEveryActIsAudited(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 2)
		job := f.start(t, dlqstore.JobPlan{IDs: ids, Rate: 1000, Canary: 1})
		f.run(t, job, asked(1))
		f.carryOut(t)
		f.run(t, job, func(j *dlqstore.Job) bool { return j.CanaryPassed && j.Asked == 1 })
		_, paused, err := f.PauseJob(t.Context(), job, "bob", "lunch")
		must(t, err)
		_, resumed, err := f.ResumeJob(t.Context(), job, "cyd", "")
		must(t, err)
		f.carryOut(t)
		f.run(t, job, inState("finished"))
		want := []string{
			"replay_job.start replay_job 1 ada fixed", fmt.Sprintf("dead_letter.replay dead_letter %d ada fixed", ids[0]), "replay_job.canary_passed replay_job 1 ada fixed",
			fmt.Sprintf("dead_letter.replay dead_letter %d ada fixed", ids[1]), "replay_job.pause replay_job 1 bob lunch", "replay_job.resume replay_job 1 cyd ", "replay_job.end replay_job 1 ada fixed",
		}
		if got := f.audited(t); !paused || !resumed || !slices.Equal(got, want) {
			t.Errorf("audited\n%s", strings.Join(got, "\n"))
		}
	})
}

func TestJob_WaitsForItsCanaryAndStopsIfItFails(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 30)
		plan := fast
		plan.Canary = 10
		job := f.start(t, plan)
		f.run(t, job, asked(10))
		for range 20 { // time alone does not pass it
			f.elapse(t)
			_, err := f.RunJob(t.Context())
			must(t, err)
		}
		if j := f.job(t, job); j.Asked != 10 || j.Pending != 20 || j.CanaryPassed {
			t.Errorf("%+v", j)
		}
		f.carryOut(t, ids[3])
		j := f.run(t, job, inState("paused"))
		if j.Failed != 1 || j.Replayed != 9 || j.Pending != 20 || j.Note != "canary failed: 1 of 10 failed again" {
			t.Errorf("%+v", j)
		}
		if _, done, err := f.ResumeJob(t.Context(), job, "ada", "known"); err != nil || !done {
			t.Fatal(done, err)
		}
		f.run(t, job, asked(10)) // another canary
		f.carryOut(t)
		f.run(t, job, func(j *dlqstore.Job) bool { return j.CanaryPassed && j.Asked == 10 })
		f.carryOut(t)
		if j := f.run(t, job, inState("finished")); j.Replayed != 29 || j.Failed != 1 {
			t.Errorf("%+v", j)
		}
	})
}

func TestJob_StopsAfterRenewedFailures(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 300)
		plan := fast
		plan.Rate, plan.StopAfter = 100, 3 // so that not all of them are asked for before
		job := f.start(t, plan)
		f.run(t, job, func(j *dlqstore.Job) bool { return j.Asked > 10 })
		f.carryOut(t, ids[0], ids[1], ids[2])
		j := f.run(t, job, inState("paused"))
		if j.Failed != 3 || j.Pending == 0 || j.Note != "stopped after 3 renewed failures" {
			t.Errorf("%+v", j)
		}
	})
}

// Two jobs with the same dead letters, run by several runners at once, beside somebody who
// replays and discards some of them: each dead letter is replayed once.
func TestJob_NoLetterIsReplayedTwice(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 600)
		jobs := []int64{f.start(t, fast), f.start(t, fast)}
		for _, id := range jobs {
			f.run(t, id, inState("running"))
		}
		replayed, err := f.Replay(t.Context(), ids[550:560], "bob", "")
		must(t, err)
		discarded, err := f.Discard(t.Context(), ids[570:580], "bob", "d")
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
		defer cancel()
		var runners sync.WaitGroup
		for range 4 {
			runners.Go(func() {
				for ctx.Err() == nil {
					if _, err := f.RunJob(ctx); err != nil && ctx.Err() == nil {
						t.Error(err)
					}
					a, errA := f.Job(ctx, jobs[0])
					b, errB := f.Job(ctx, jobs[1])
					if errA == nil && errB == nil && a.Pending+b.Pending == 0 {
						return
					}
				}
			})
		}
		runners.Wait()
		a, b := f.job(t, jobs[0]), f.job(t, jobs[1])
		if a.Asked+b.Asked != 580 || a.Taken+b.Taken != 620 || len(replayed)+len(discarded) != 20 {
			t.Errorf("%+v, %+v", a, b)
		}
		seen := map[string]bool{}
		rows, err := f.db.QueryContext(t.Context(), f.where.Expand(`select subject from {{audit}} where action = 'dead_letter.replay'`))
		must(t, err)
		defer rows.Close()
		for rows.Next() {
			var subject string
			must(t, rows.Scan(&subject))
			if seen[subject] {
				t.Errorf("%s was replayed twice", subject)
			}
			seen[subject] = true
		}
		if must(t, rows.Err()); len(seen) != 590 {
			t.Errorf("%d were replayed", len(seen))
		}
	})
}

func TestJob_AfterABreakItDoesNotCatchUp(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		f.addMany(t, 300)
		plan := fast
		plan.Rate = 100
		job := f.start(t, plan)
		f.run(t, job, inState("running"))
		for range 60 {
			f.elapse(t)
		}
		before := f.job(t, job).Asked
		_, err := f.RunJob(t.Context())
		must(t, err)
		if n := f.job(t, job).Asked - before; n < 1 || n > 50 {
			t.Errorf("%d replays in a step after a minute, want at most those of half a second", n)
		}
	})
}

func TestJob_PausesResumesAndCancelsInEachState(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		acts := map[string]func(context.Context, int64, string, string) (*dlqstore.Job, bool, error){"pause": f.PauseJob, "resume": f.ResumeJob, "cancel": f.CancelJob}
		reach := map[string]func() int64{
			"collecting": func() int64 { return f.start(t, fast) },
			"running":    func() int64 { id := f.start(t, fast); f.run(t, id, inState("running")); return id },
			"paused": func() int64 {
				id := f.start(t, fast)
				_, _, err := f.PauseJob(t.Context(), id, "ada", "")
				must(t, err)
				return id
			},
			"canceling": func() int64 {
				id := f.start(t, fast)
				f.run(t, id, func(j *dlqstore.Job) bool { return j.Asked > 0 })
				_, _, err := f.CancelJob(t.Context(), id, "ada", "")
				must(t, err)
				return id
			},
			"canceled": func() int64 {
				id := f.start(t, fast)
				_, _, err := f.CancelJob(t.Context(), id, "ada", "")
				must(t, err)
				return id
			},
		}
		allowed := map[string]string{
			"collecting pause": "paused", "collecting cancel": "canceled", "running pause": "paused", "running cancel": "canceled",
			"paused resume": "collecting", "paused cancel": "canceled",
		}
		for state, get := range reach {
			for name, act := range acts {
				f.exec(t, `update {{dead_letter_jobs}} set state = 'canceled', ended_at = created_at where ended_at is null`)
				f.addMany(t, 3)
				id := get()
				if j := f.job(t, id); j.State != state {
					t.Fatalf("is %s, want %s", j.State, state)
				}
				want, may := allowed[state+" "+name]
				j, done, err := act(t.Context(), id, "bob", "r")
				if !may {
					want = state
				}
				if err != nil || done != may || j.State != want || f.job(t, id).State != want {
					t.Errorf("%s while %s: %v, %v, %+v", name, state, done, err, j)
				}
			}
		}
	})
}

func TestJob_FollowsWhatItAskedForWhenItIsCanceledOrPaused(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 40)
		plan := fast
		plan.Canary = 4
		job := f.start(t, plan)
		f.run(t, job, asked(4))
		_, _, err := f.PauseJob(t.Context(), job, "ada", "")
		must(t, err)
		_, err = f.Discard(t.Context(), ids[:1], "bob", "d")
		must(t, err)
		f.run(t, job, func(j *dlqstore.Job) bool { return j.Discarded == 1 && j.State == "paused" })
		_, _, err = f.CancelJob(t.Context(), job, "ada", "")
		must(t, err)
		f.carryOut(t, ids[1])
		j := f.run(t, job, inState("canceled"))
		if j.Skipped != 36 || j.Discarded != 1 || j.Failed != 1 || j.Replayed != 2 || j.Total != 40 {
			t.Errorf("%+v", j)
		}
	})
}

func TestJob_SaysWhatItWaitsFor(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		f.addMany(t, 1)
		job := f.start(t, fast)
		f.run(t, job, asked(1))
		back := `interval '2 minutes'`
		if f.where.Dialect == oncemill.SQLite {
			back = `120000000`
		}
		f.exec(t, `update {{dead_letter_job_letters}} set asked_at = asked_at - `+back)
		j := f.run(t, job, func(j *dlqstore.Job) bool { return j.Waiting != "" })
		if j.Waiting != "nobody carries out the replays of consumer stock" {
			t.Error(j.Waiting)
		}
	})
}

func TestJob_IsPurgedAfterTheRetention(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		f.addMany(t, 700)
		old, kept := f.start(t, fast), f.start(t, fast)
		for _, id := range []int64{old, kept} {
			f.run(t, id, inState("running"))
		}
		_, canceled, err := f.CancelJob(t.Context(), old, "ada", "")
		must(t, err)
		for _, retention := range []time.Duration{time.Hour, 0} {
			_, err = f.Purge(t.Context(), retention)
			must(t, err)
			var left int
			must(t, f.db.QueryRowContext(t.Context(), f.where.Expand(`select count(*) from {{dead_letter_job_letters}} where job = $1`), old).Scan(&left))
			_, err = f.Job(t.Context(), old)
			if gone := errors.Is(err, dlqstore.ErrNotFound) && left == 0; !canceled || gone != (retention == 0) {
				t.Errorf("after %v, %d of its letters are left, %v", retention, left, err)
			}
		}
		if j := f.job(t, kept); j.Pending+j.Asked+j.Taken != 700 {
			t.Errorf("%+v", j)
		}
	})
}

// A step that fails, or whose process dies, leaves everything as it was, and is done again.
func TestJob_NoReplayWithoutItsAudit(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 1)
		job := f.start(t, fast)
		f.run(t, job, inState("running"))
		f.elapse(t)
		before := f.job(t, job)
		f.exec(t, `alter table {{audit}} rename to away`)
		if worked, err := f.RunJob(t.Context()); err == nil || worked {
			t.Errorf("worked %v, %v", worked, err)
		}
		if after := f.job(t, job); after.JobCounts != before.JobCounts || after.State != before.State {
			t.Errorf("%+v, before %+v", after, before)
		}
		f.expectStates(t, map[int64]string{ids[0]: "dead"})
	})
}
