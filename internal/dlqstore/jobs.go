package dlqstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/text"
)

// The states of a job; see dlq.JobState.
const (
	jobCollecting = "collecting"
	jobRunning    = "running"
	jobPaused     = "paused"
	jobCanceling  = "canceling"
	jobCanceled   = "canceled"
	jobFinished   = "finished"
)

// The acts on jobs, as they are in the audit.
const (
	actJobStart  = "replay_job.start"
	actJobCanary = "replay_job.canary_passed"
	actJobStop   = "replay_job.stop"
	actJobPause  = "replay_job.pause"
	actJobResume = "replay_job.resume"
	actJobCancel = "replay_job.cancel"
	actJobEnd    = "replay_job.end"
)

// Jobs are the replay jobs of a database.
type Jobs interface {
	// StartJob adds a job for the dead letters that plan selects, and returns it. RunJob
	// does the rest.
	StartJob(ctx context.Context, plan JobPlan, by, reason string) (*Job, error)

	// Job returns a job, or ErrNotFound.
	Job(ctx context.Context, id int64) (*Job, error)

	// ListJobs returns the newest jobs, at most so many.
	ListJobs(ctx context.Context, most int) ([]*Job, error)

	// PauseJob, ResumeJob and CancelJob change the state of a job. They report false, with
	// the job as it is, if its state does not allow that. The error is ErrNotFound for an
	// unknown job. CancelJob leaves replays that were requested to their owners.
	PauseJob(ctx context.Context, id int64, by, reason string) (job *Job, done bool, err error)
	ResumeJob(ctx context.Context, id int64, by, reason string) (job *Job, done bool, err error)
	CancelJob(ctx context.Context, id int64, by, reason string) (job *Job, done bool, err error)

	// RunJob does one step of the job that has been due for longest, in one transaction, and
	// reports whether there was one. Of concurrent calls, each takes another job.
	RunJob(ctx context.Context) (worked bool, err error)
}

// JobPlan is what a job does; see dlq.JobPlan.
type JobPlan struct {
	Filter    JobFilter
	IDs       []int64 `json:",omitempty"` // instead of Filter; sorted
	Canary    int     `json:"-"`
	Rate      int     `json:"-"`
	StopAfter int     `json:"-"`
}

// JobFilter is a Filter as a job keeps it.
type JobFilter struct {
	States                                                       []string
	Source, Consumer, Topic, Key, MessageID, Reason, Fingerprint string    `json:",omitempty"`
	From, Until                                                  time.Time `json:",omitzero"`
}

// Job is a job and how far it is; see dlq.Job for its fields.
type Job struct {
	ID                 int64
	State              string
	By, Reason         string
	Plan               JobPlan
	CreatedAt, EndedAt time.Time
	CanaryPassed       bool
	Note, Waiting      string
	Total              int64 // the sum of the counts
	JobCounts

	bound        int64 // the newest dead letter when the job started
	collected    bool
	part         int   // of Plan.Filter.States
	afterDiedAt  int64 // with afterID, the last dead letter that was collected
	afterID      int64
	lookAfter    int64 // the last dead letter whose outcome was looked for
	canaryFrom   int64 // replays that had ended when the current canary began
	failedBefore int64 // failures before the last resume
	elapsed      time.Duration
	refused      int64 // of Asked, if all were looked at: what its consumer refuses again and again
	unreadable   bool  // the plan
}

// JobCounts are the dead letters of a job, by what has become of them.
type JobCounts struct {
	Pending, Asked, Replayed, Failed, Discarded, Taken, Skipped int64
}

func (c *JobCounts) sum() int64 {
	return c.Pending + c.Asked + c.Replayed + c.Failed + c.Discarded + c.Taken + c.Skipped
}

func scanJob(row scanner) (*Job, error) {
	j := &Job{}
	var plan []byte
	var created, elapsed int64
	var ended sql.NullInt64
	err := row.Scan(&j.ID, &j.State, &j.By, &j.Reason, &plan, &j.bound, &j.Plan.Canary, &j.Plan.Rate, &j.Plan.StopAfter,
		&created, &ended, &j.collected, &j.part, &j.afterDiedAt, &j.afterID, &j.lookAfter, &j.CanaryPassed, &j.canaryFrom, &j.failedBefore, &j.Note, &j.Waiting,
		&j.Total, &j.Pending, &j.Asked, &j.Replayed, &j.Failed, &j.Discarded, &j.Taken, &j.Skipped, &elapsed)
	if err != nil {
		return nil, err
	}
	j.CreatedAt, j.EndedAt, j.elapsed = time.UnixMicro(created).UTC(), at(ended), time.Duration(elapsed)*time.Microsecond
	if err := json.Unmarshal(plan, &j.Plan); err != nil {
		j.unreadable = true // somebody else wrote it; see step
	}
	return j, nil
}

func (s *store) StartJob(ctx context.Context, plan JobPlan, by, reason string) (job *Job, err error) {
	encoded, err := text.JSON(plan)
	if err != nil {
		return nil, err
	}
	err = s.write(ctx, func(tx *sql.Tx) error {
		var bound, id int64
		if err := tx.QueryRowContext(ctx, s.text.NewestLetter).Scan(&bound); err != nil {
			return err
		}
		if err := tx.QueryRowContext(ctx, s.text.StartJob, text.Clean(by), text.Clean(reason), string(encoded), bound, plan.Canary, plan.Rate, plan.StopAfter).Scan(&id); err != nil {
			return err
		}
		if job, err = scanJob(tx.QueryRowContext(ctx, s.text.LockJob, id)); err != nil {
			return err
		}
		if len(plan.IDs) > 0 {
			if err := s.addLetters(ctx, tx, job, plan.IDs); err != nil {
				return err
			}
			job.collected, job.State = true, jobRunning
			if err := s.saveJob(ctx, tx, job, 0); err != nil {
				return err
			}
		}
		return s.recordJob(ctx, tx, job, actJobStart, by, reason, "")
	})
	if err != nil {
		return nil, err
	}
	return job, nil
}

func (s *store) Job(ctx context.Context, id int64) (*Job, error) {
	return orNotFound(scanJob(s.db.QueryRowContext(ctx, s.text.GetJob, id)))
}

func (s *store) ListJobs(ctx context.Context, most int) (jobs []*Job, err error) {
	err = each(ctx, s.db, func(rows *sql.Rows) error {
		j, err := scanJob(rows)
		jobs = append(jobs, j)
		return err
	}, s.text.ListJobs, most)
	return jobs, err
}

func (s *store) PauseJob(ctx context.Context, id int64, by, reason string) (*Job, bool, error) {
	return s.changeJob(ctx, id, actJobPause, by, reason, func(j *Job) bool {
		if j.State != jobCollecting && j.State != jobRunning {
			return false
		}
		j.State, j.Note = jobPaused, "paused by "+text.Clean(by)
		if reason != "" {
			j.Note += ": " + text.Clean(reason)
		}
		return true
	})
}

func (s *store) ResumeJob(ctx context.Context, id int64, by, reason string) (*Job, bool, error) {
	return s.changeJob(ctx, id, actJobResume, by, reason, func(j *Job) bool {
		if j.State != jobPaused {
			return false
		}
		if j.Failed > j.failedBefore { // the canary proves nothing; another one begins
			j.canaryFrom = j.Replayed + j.Failed
		}
		j.State, j.Note, j.failedBefore, j.elapsed = jobCollecting, "", j.Failed, 0
		if j.collected {
			j.State = jobRunning
		}
		return true
	})
}

func (s *store) CancelJob(ctx context.Context, id int64, by, reason string) (*Job, bool, error) {
	return s.changeJob(ctx, id, actJobCancel, by, reason, func(j *Job) bool {
		if j.State != jobCollecting && j.State != jobRunning && j.State != jobPaused {
			return false
		}
		j.Skipped, j.Pending = j.Skipped+j.Pending, 0
		j.State, j.Note = jobCanceling, "canceled by "+text.Clean(by)
		if j.Asked == 0 {
			j.State = jobCanceled
		}
		return true
	})
}

// changeJob changes a job, and writes the entry of the audit in the same transaction.
func (s *store) changeJob(ctx context.Context, id int64, action, by, reason string, change func(*Job) bool) (job *Job, done bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		job, err = orNotFound(scanJob(tx.QueryRowContext(ctx, s.text.LockJob, id)))
		if err != nil {
			return err
		}
		if done = change(job); !done {
			return nil
		}
		job.Waiting = "" // it would hide the note
		if err := s.saveJob(ctx, tx, job, 0); err != nil {
			return err
		}
		return s.recordJob(ctx, tx, job, action, by, reason, "")
	})
	if err != nil {
		return nil, false, err
	}
	return job, done, nil
}

// saveJob writes a locked job. Its next step is due after a pause.
func (s *store) saveJob(ctx context.Context, tx *sql.Tx, j *Job, pause time.Duration) error {
	j.Total = j.sum()
	n, err := database.Affected(tx.ExecContext(ctx, s.text.SaveJob, j.ID, j.State, j.collected, j.part, j.afterDiedAt, j.afterID, j.lookAfter,
		j.CanaryPassed, j.failedBefore, text.Clean(j.Note), text.Clean(j.Waiting),
		j.Total, j.Pending, j.Asked, j.Replayed, j.Failed, j.Discarded, j.Taken, j.Skipped, pause.Microseconds(), j.elapsed.Microseconds(), j.canaryFrom))
	if err == nil && n != 1 {
		err = errors.New("the job is gone")
	}
	return err
}

func (s *store) recordJob(ctx context.Context, tx *sql.Tx, j *Job, action, by, reason, details string) error {
	return s.audit.Record(ctx, tx, auditstore.Act{Action: action, By: by, Reason: reason, Subjects: []string{"replay_job " + strconv.FormatInt(j.ID, 10)}, Details: details})
}

// addLetters adds those of the dead letters that are dead or held to a job.
func (s *store) addLetters(ctx context.Context, tx *sql.Tx, j *Job, ids []int64) error {
	added, err := database.Affected(tx.ExecContext(ctx, s.text.AddJobLetters, j.ID, s.ids(ids)))
	j.Pending += added
	return err
}

// purgeSomeOfAJob deletes at most so many letters of a job past its retention, or the job, if
// it has none left.
func (s *store) purgeSomeOfAJob(ctx context.Context, tx *sql.Tx, retention time.Duration, most int) (letters, jobs int64, err error) {
	letters, err = database.Affected(tx.ExecContext(ctx, s.text.PurgeJobLetters, retention.Microseconds(), most))
	if err == nil && letters == 0 {
		jobs, err = database.Affected(tx.ExecContext(ctx, s.text.PurgeJob, retention.Microseconds()))
	}
	return letters, jobs, err
}
