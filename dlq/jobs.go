package dlq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/dlqstore"
)

// JobState is the state of a replay job.
type JobState string

// The states of a job. Canceled and finished are final.
const (
	JobCollecting JobState = "collecting" // adds dead letters to its set
	JobRunning    JobState = "running"    // requests replays, and waits for their outcomes
	JobPaused     JobState = "paused"     // by an operator, or because of failures; see Job.Note
	JobCanceling  JobState = "canceling"  // waits for the outcomes of replays it has requested
	JobCanceled   JobState = "canceled"
	JobFinished   JobState = "finished"
)

// JobPlan is what a replay job does. The zero value replays all dead letters that are dead or
// held, 100 a second.
type JobPlan struct {
	// IDs are the dead letters to replay, at most 10,000. Default: those of Filter.
	IDs []int64

	// Filter selects the dead letters to replay, without OldestFirst, Limit and After. Its
	// States may be dead and held. Default: both. Dead letters that are written after the
	// start of the job are not in its set.
	Filter Filter

	// Canary is how many replays have to end well before the job requests more. The job
	// pauses if one of them fails again. Default: none. At most 10,000.
	Canary int

	// Rate is how many replays the job requests a second. Time in which nobody runs the job
	// is not made up for. Default: 100. At most 1000.
	Rate int

	// StopAfter pauses the job after so many renewed failures since its start or last resume.
	// Replays that were requested meanwhile go on. Default: never.
	StopAfter int
}

const (
	defaultRate = 100
	mostRate    = 1000
	mostCanary  = 10_000
	mostJobIDs  = 10_000
	mostPlan    = 64 << 10 // bytes
)

// Job is a replay job: a set of dead letters that is frozen when the job starts, and how far
// their replay is. Total is the sum of Pending, Asked, Replayed, Failed, Discarded, Taken and
// Skipped.
type Job struct {
	ID        int64
	State     JobState
	Plan      JobPlan // defaults filled in
	Act       Act     // who started it, and why
	CreatedAt time.Time
	EndedAt   time.Time `json:",omitzero"` // zero until then

	CanaryPassed bool // the canary ended well

	Note    string // why it is paused or canceled
	Waiting string // what its replays wait for, for a minute or longer; or why its last step failed; or empty

	Total     int64 // grows while the job is collecting
	Pending   int64 // not requested yet
	Asked     int64 // requested, outcome unknown
	Replayed  int64 // a relay has delivered the message, or a consumer has handled it
	Failed    int64 // failed again; each has a new dead letter
	Discarded int64 // discarded by others after the job had requested the replay
	Taken     int64 // replayed, discarded or purged by others before
	Skipped   int64 // not requested since the job was canceled
}

// Done returns how many dead letters of the set need nothing more from the job.
func (j *Job) Done() int64 { return j.Total - j.Pending - j.Asked }

// Ended reports that the job is canceled or finished.
func (j *Job) Ended() bool { return j.State == JobCanceled || j.State == JobFinished }

// StartJob starts a replay job, and returns it. A Runner does the work: relays have one.
// act.By and act.Reason are required, and stand in the audit beside each replay. Of several
// jobs, and callers of Replay, that want the same dead letter, one replays it; the others
// count it as taken. Bad values of plan come back together, each as an
// [*oncemill.ConfigError].
func (s *Store) StartJob(ctx context.Context, plan JobPlan, act Act) (*Job, error) {
	if err := act.check(true); err != nil {
		return nil, err
	}
	resolved, err := plan.resolve()
	if err != nil {
		return nil, err
	}
	j, err := s.store.StartJob(ctx, resolved, act.By, act.Reason)
	if err != nil {
		return nil, fmt.Errorf("dlq: start job: %w", err)
	}
	return jobOf(j), nil
}

// resolve fills in the defaults.
func (p JobPlan) resolve() (dlqstore.JobPlan, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "dlq.JobPlan." + field, Value: value, Problem: problem})
	}
	f := p.Filter
	if f.OldestFirst || f.Limit != 0 || f.After != (Cursor{}) {
		bad("Filter", "OldestFirst, Limit or After", "must not be set: a job replays all that the filter selects")
	}
	if len(p.IDs) > 0 && (len(f.States) > 0 || f.Source != "" || f.Consumer != "" || f.Topic != "" || f.Key != "" || f.MessageID != "" || f.Reason != "" || f.Fingerprint != "" || !f.From.IsZero() || !f.Until.IsZero()) {
		bad("IDs", strconv.Itoa(len(p.IDs))+" ids", "give ids or a filter, not both")
	}
	if len(p.IDs) > mostJobIDs {
		bad("IDs", strconv.Itoa(len(p.IDs))+" ids", "must be at most "+strconv.Itoa(mostJobIDs)+"; use a filter")
	}
	var states []string
	for _, state := range f.States {
		if state != StateDead && state != StateHeld {
			bad("Filter.States", strconv.Quote(string(state)), "must be dead or held")
		}
		if !slices.Contains(states, string(state)) {
			states = append(states, string(state))
		}
	}
	if len(states) == 0 {
		states = []string{string(StateDead), string(StateHeld)}
	}
	if p.Canary < 0 || p.Canary > mostCanary {
		bad("Canary", strconv.Itoa(p.Canary), "must be 0 to "+strconv.Itoa(mostCanary))
	}
	if p.Rate == 0 {
		p.Rate = defaultRate
	}
	if p.Rate < 0 || p.Rate > mostRate {
		bad("Rate", strconv.Itoa(p.Rate), "must be 1 to "+strconv.Itoa(mostRate)+" a second, or 0 for "+strconv.Itoa(defaultRate))
	}
	if p.StopAfter < 0 || p.StopAfter > 1_000_000 {
		bad("StopAfter", strconv.Itoa(p.StopAfter), "must be 0 to 1000000")
	}
	resolved := dlqstore.JobPlan{
		Filter: dlqstore.JobFilter{
			States: states, Source: string(f.Source), Consumer: f.Consumer, Topic: f.Topic, Key: f.Key, MessageID: f.MessageID,
			Reason: f.Reason, Fingerprint: f.Fingerprint, From: f.From, Until: f.Until,
		},
		Canary: p.Canary, Rate: p.Rate, StopAfter: p.StopAfter,
	}
	if size := len(f.Source) + len(f.Consumer) + len(f.Topic) + len(f.Key) + len(f.MessageID) + len(f.Reason) + len(f.Fingerprint); size > mostPlan/8 {
		bad("Filter", strconv.Itoa(size)+" bytes", "must have at most "+strconv.Itoa(mostPlan/8)+" bytes")
	}
	resolved.IDs = slices.Compact(slices.Sorted(slices.Values(p.IDs)))
	return resolved, errors.Join(errs...)
}

// Job returns a job, or [ErrNotFound]. Jobs are purged like dead letters: Config.Retention
// after their end.
func (s *Store) Job(ctx context.Context, id int64) (*Job, error) {
	j, err := s.store.Job(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("dlq: read job %d: %w", id, err)
	}
	return jobOf(j), nil
}

// Jobs returns the newest jobs, at most 100.
func (s *Store) Jobs(ctx context.Context) ([]*Job, error) {
	found, err := s.store.ListJobs(ctx, defaultLimit)
	if err != nil {
		return nil, fmt.Errorf("dlq: list jobs: %w", err)
	}
	jobs := make([]*Job, len(found))
	for i, j := range found {
		jobs[i] = jobOf(j)
	}
	return jobs, nil
}

// PauseJob pauses a job that is collecting or running. The replays that it has requested go
// on, and are still counted. The error is a [*JobStateError] in other states.
func (s *Store) PauseJob(ctx context.Context, id int64, act Act) (*Job, error) {
	return changeJob(ctx, s.store.PauseJob, "paused", id, act)
}

// ResumeJob resumes a paused job. StopAfter counts from zero. If a replay of the canary has
// failed again, another canary follows, which has to end well; to go on without one, cancel
// the job and start another. The error is a [*JobStateError] in other states.
func (s *Store) ResumeJob(ctx context.Context, id int64, act Act) (*Job, error) {
	return changeJob(ctx, s.store.ResumeJob, "resumed", id, act)
}

// CancelJob ends a job that is collecting, running or paused. Dead letters whose replay it has
// not requested stay as they are. The error is a [*JobStateError] in other states.
func (s *Store) CancelJob(ctx context.Context, id int64, act Act) (*Job, error) {
	return changeJob(ctx, s.store.CancelJob, "canceled", id, act)
}

func changeJob(ctx context.Context, change func(context.Context, int64, string, string) (*dlqstore.Job, bool, error), action string, id int64, act Act) (*Job, error) {
	if err := act.check(false); err != nil {
		return nil, err
	}
	j, done, err := change(ctx, id, act.By, act.Reason)
	if err != nil {
		return nil, fmt.Errorf("dlq: job %d: %w", id, err)
	}
	if !done {
		return jobOf(j), &JobStateError{ID: id, State: JobState(j.State), Action: action}
	}
	return jobOf(j), nil
}

func jobOf(j *dlqstore.Job) *Job {
	f := j.Plan.Filter
	plan := JobPlan{IDs: j.Plan.IDs, Canary: j.Plan.Canary, Rate: j.Plan.Rate, StopAfter: j.Plan.StopAfter}
	if len(plan.IDs) == 0 {
		plan.Filter = Filter{
			Source: Source(f.Source), Consumer: f.Consumer, Topic: f.Topic, Key: f.Key, MessageID: f.MessageID,
			Reason: f.Reason, Fingerprint: f.Fingerprint, From: f.From, Until: f.Until,
		}
		for _, state := range f.States {
			plan.Filter.States = append(plan.Filter.States, State(state))
		}
	}
	return &Job{
		ID: j.ID, State: JobState(j.State), Plan: plan, Act: Act{By: j.By, Reason: j.Reason}, CreatedAt: j.CreatedAt, EndedAt: j.EndedAt,
		CanaryPassed: j.CanaryPassed, Note: j.Note, Waiting: j.Waiting, Total: j.Total,
		Pending: j.Pending, Asked: j.Asked, Replayed: j.Replayed, Failed: j.Failed, Discarded: j.Discarded, Taken: j.Taken, Skipped: j.Skipped,
	}
}
