package dlqstore_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/dlqstore"
)

// failWrites lets each change of a letter of a job fail, until mendWrites.
func (f *fixture) failWrites(t *testing.T, job int64) {
	t.Helper()
	if f.where.Dialect == oncemill.SQLite {
		f.exec(t, fmt.Sprintf(`create trigger broken before update on {{dead_letter_job_letters}} when new.job = %d begin select raise(abort, 'broken'); end`, job))
		return
	}
	f.exec(t, fmt.Sprintf(`alter table {{dead_letter_job_letters}} add constraint broken check (job <> %d or state = 'pending')`, job))
}

func (f *fixture) mendWrites(t *testing.T) {
	t.Helper()
	if f.where.Dialect == oncemill.SQLite {
		f.exec(t, `drop trigger broken`)
		return
	}
	f.exec(t, `alter table {{dead_letter_job_letters}} drop constraint broken`)
}

// The canary fails while the job is paused for another reason. Whoever resumes it has seen no
// failure.
func TestJob_ACanaryThatFailsDuringAPauseDoesNotPass(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 30)
		plan := fast
		plan.Canary = 5
		job := f.start(t, plan)
		f.run(t, job, asked(5))
		_, paused, err := f.PauseJob(t.Context(), job, "ada", "lunch")
		must(t, err)
		f.carryOut(t, ids[:5]...)
		f.run(t, job, func(j *dlqstore.Job) bool { return j.Failed == 5 })
		_, resumed, err := f.ResumeJob(t.Context(), job, "ada", "back")
		must(t, err)
		if !paused || !resumed {
			t.Error(paused, resumed)
		}
		f.run(t, job, asked(5))
		f.carryOut(t, ids[6])
		if j := f.run(t, job, inState("paused")); j.CanaryPassed || j.Note != "canary failed: 1 of 5 failed again" {
			t.Errorf("%+v", j)
		}
	})
}

// What others have discarded proves nothing.
func TestJob_ADiscardIsNoCanary(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		ids := f.addMany(t, 9)
		plan := fast
		plan.Canary = 3
		job := f.start(t, plan)
		f.run(t, job, asked(3))
		_, err := f.Discard(t.Context(), ids[:3], "bob", "d")
		must(t, err)
		j := f.run(t, job, func(j *dlqstore.Job) bool { return j.Discarded == 3 && j.Asked > 0 })
		if j.CanaryPassed || j.Asked != 3 {
			t.Errorf("%+v", j)
		}
	})
}

// A job whose steps fail delays no other.
func TestJob_OneThatFailsDelaysNoOther(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		bad := f.addMany(t, 1)
		broken := f.start(t, dlqstore.JobPlan{IDs: bad, Rate: 1000})
		good := f.start(t, dlqstore.JobPlan{IDs: f.addMany(t, 1), Rate: 1000})
		f.failWrites(t, broken)
		failed := false
		for range 200 {
			if j := f.job(t, good); j.Asked == 1 {
				break
			}
			worked, err := f.RunJob(t.Context())
			if failed = failed || err != nil; !worked && err == nil {
				f.elapse(t)
			}
		}
		if j := f.job(t, good); j.Asked != 1 || !failed {
			t.Errorf("%+v, failed %v", j, failed)
		}
		j := f.job(t, broken)
		if j.Asked != 0 || !strings.HasPrefix(j.Waiting, "its last step failed: ") || !strings.Contains(j.Waiting, "broken") {
			t.Errorf("%+v", j)
		}
		paused, _, err := f.PauseJob(t.Context(), broken, "ada", "broken")
		must(t, err)
		if paused.Waiting != "" || paused.Note != "paused by ada: broken" {
			t.Errorf("%+v", paused)
		}
		_, _, err = f.ResumeJob(t.Context(), broken, "ada", "")
		must(t, err)
		f.mendWrites(t)
		if j := f.run(t, broken, asked(1)); j.Waiting != "" {
			t.Errorf("%+v", j)
		}
	})
}

// Somebody has locked dead letters. A job replays the others, and those once they are free.
func TestJob_LockedLettersDelayNoOthers(t *testing.T) {
	once(t, func(t *testing.T, f *fixture) {
		if f.where.Dialect == oncemill.SQLite {
			return // it has one writer, and no locks on rows
		}
		ids := f.addMany(t, 30)
		job := f.start(t, fast)
		tx, err := f.db.BeginTx(t.Context(), nil)
		must(t, err)
		defer tx.Rollback() //nolint:errcheck // nothing has changed
		_, err = tx.ExecContext(t.Context(), f.where.Expand(`select from {{dead_letters}} where id <= $1 for update`), ids[19])
		must(t, err)
		if j := f.run(t, job, asked(10)); j.Pending != 20 || j.Waiting != "" {
			t.Errorf("%+v", j)
		}
		if j := f.run(t, job, func(j *dlqstore.Job) bool { return j.Waiting != "" }); !strings.Contains(j.Waiting, "have locked") {
			t.Errorf("%+v", j)
		}
		must(t, tx.Rollback())
		f.carryOut(t)
		if j := f.run(t, job, asked(20)); j.Waiting != "" {
			t.Errorf("%+v", j)
		}
		f.carryOut(t)
		if j := f.run(t, job, inState("finished")); j.Replayed != 30 {
			t.Errorf("%+v", j)
		}
	})
}
