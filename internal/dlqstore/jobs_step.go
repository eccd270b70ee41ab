package dlqstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/text"
)

const (
	jobStepEvery   = 100 * time.Millisecond // while there is something to do
	jobRestEvery   = time.Second            // while replays are waited for
	jobFailedEvery = 10 * time.Second       // after a step that failed
	jobPostpones   = 2 * time.Second        // at most
	jobCollects    = 500                    // dead letters in a step
	jobAsks        = 500
	jobLooks       = 1000
	jobMostAsked   = 10_000 // replays that nobody has carried out yet
	jobPassesOver  = 100    // dead letters that somebody has locked

	// jobStuck is how long a replay takes at most, normally; see dlq.StuckAfter.
	jobStuck = time.Minute

	// jobCatchUp bounds the replays that were not requested while nobody ran the job.
	jobCatchUp = 500 * time.Millisecond

	stepFailed = "its last step failed: " // a prefix of Job.Waiting
	allLocked  = "transactions of others have locked the next dead letters"
)

func (s *store) RunJob(ctx context.Context) (worked bool, err error) {
	// A look without a lock first: on SQLite a transaction would keep writers waiting.
	var due int64
	if err := s.db.QueryRowContext(ctx, s.text.LookForJob).Scan(&due); err != nil {
		if errors.Is(err, sql.ErrNoRows) {
			return false, nil
		}
		return false, err
	}
	var id int64
	err = s.write(ctx, func(tx *sql.Tx) error {
		worked, id = false, 0
		j, err := scanJob(tx.QueryRowContext(ctx, s.text.DueJob))
		switch {
		case errors.Is(err, sql.ErrNoRows): // another runner has it
			return nil
		case err != nil:
			return err
		}
		worked, id = true, j.ID
		return s.step(ctx, tx, j)
	})
	if err != nil && id != 0 && !errors.Is(ctx.Err(), context.Canceled) {
		err = errors.Join(fmt.Errorf("job %d: %w", id, err), s.postpone(ctx, id, err))
	}
	return worked && err == nil, err
}

// postpone lets other jobs go first after the step of a job has failed.
func (s *store) postpone(ctx context.Context, id int64, failure error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), jobPostpones) // its own may have ended
	defer cancel()
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, s.text.PostponeJob, id, jobFailedEvery.Microseconds(), text.Clean(stepFailed+failure.Error()))
		return err
	})
}

// step does the next step of a locked job.
func (s *store) step(ctx context.Context, tx *sql.Tx, j *Job) error {
	before, state := j.JobCounts, j.State
	if strings.HasPrefix(j.Waiting, stepFailed) {
		j.Waiting = ""
	}
	if err := s.lookForOutcomes(ctx, tx, j); err != nil {
		return err
	}
	var err error
	if j.unreadable && (j.State == jobCollecting || j.State == jobRunning) {
		if err := s.stop(ctx, tx, j, "its plan cannot be read"); err != nil {
			return err
		}
		return s.saveJob(ctx, tx, j, jobRestEvery)
	}
	switch j.State {
	case jobCollecting:
		err = s.collect(ctx, tx, j)
	case jobRunning:
		err = s.advance(ctx, tx, j)
	case jobCanceling:
		if j.Asked == 0 {
			j.State = jobCanceled
			err = s.recordJob(ctx, tx, j, actJobEnd, j.By, j.Reason, j.summary())
		}
	}
	if err != nil {
		return err
	}
	pause := jobRestEvery
	switch {
	case state == jobCollecting:
		pause = 0
	case j.JobCounts != before, j.State == jobRunning && j.Pending > 0 && j.Asked < jobMostAsked && !j.canaryWaits():
		pause = jobStepEvery
	}
	return s.saveJob(ctx, tx, j, pause)
}

// collect adds the next dead letters to the set.
func (s *store) collect(ctx context.Context, tx *sql.Tx, j *Job) error {
	f := j.Plan.Filter
	if j.part < len(f.States) {
		page, err := s.list(ctx, tx, Filter{
			States: f.States[j.part : j.part+1], Source: f.Source, Consumer: f.Consumer, Topic: f.Topic, Key: f.Key, MessageID: f.MessageID,
			Reason: f.Reason, Fingerprint: f.Fingerprint, From: f.From, Until: f.Until,
			OldestFirst: true, Limit: jobCollects, AfterDiedAt: time.UnixMicro(j.afterDiedAt), AfterID: j.afterID,
		})
		if err != nil {
			return err
		}
		var ids []int64
		for _, l := range page {
			if l.ID <= j.bound {
				ids = append(ids, l.ID)
			}
			j.afterDiedAt, j.afterID = l.DiedAt.UnixMicro(), l.ID
		}
		if len(page) == jobCollects {
			return s.addLetters(ctx, tx, j, ids)
		}
		j.part, j.afterDiedAt, j.afterID = j.part+1, 0, 0
		if err := s.addLetters(ctx, tx, j, ids); err != nil {
			return err
		}
	}
	if j.part >= len(f.States) {
		j.collected, j.State, j.elapsed = true, jobRunning, 0
	}
	return nil
}

// advance requests the next replays of a running job, or ends or pauses it.
func (s *store) advance(ctx context.Context, tx *sql.Tx, j *Job) error {
	failures := j.Failed - j.failedBefore
	canary := int64(j.Plan.Canary)
	switch {
	case j.Plan.StopAfter > 0 && failures >= int64(j.Plan.StopAfter):
		return s.stop(ctx, tx, j, fmt.Sprintf("stopped after %d renewed failures", failures))
	case j.canaryRuns() && j.refused >= max(canary, mostRefused) && j.Replayed+j.Failed == j.canaryFrom:
		return s.stop(ctx, tx, j, fmt.Sprintf("canary failed: its consumer refuses the messages, %d of %d", j.refused, j.Asked))
	case j.Asked == j.refused && j.canaryAsks() > 0 && (j.canaryWaits() || j.canaryRuns() && j.Pending == 0):
		if failures > 0 {
			return s.stop(ctx, tx, j, fmt.Sprintf("canary failed: %d of %d failed again", failures, j.canaryAsks()))
		}
		j.CanaryPassed, j.elapsed = true, 0
		if err := s.recordJob(ctx, tx, j, actJobCanary, j.By, j.Reason, ""); err != nil || j.Pending > 0 {
			return err
		}
	}
	if j.Pending == 0 {
		if j.Asked > 0 {
			return nil
		}
		j.State = jobFinished
		return s.recordJob(ctx, tx, j, actJobEnd, j.By, j.Reason, j.summary())
	}
	n := j.budget()
	if j.canaryRuns() {
		n = min(n, canary-j.canaryAsks())
	}
	if n <= 0 {
		return nil
	}
	return s.ask(ctx, tx, j, n)
}

// mostRefused is how many messages a consumer may refuse again, as those of strangers, before a
// canary without any success has failed.
const mostRefused = 10

// stop pauses a job because of what happened to its replays.
func (s *store) stop(ctx context.Context, tx *sql.Tx, j *Job, why string) error {
	j.State, j.Note = jobPaused, why
	return s.recordJob(ctx, tx, j, actJobStop, j.By, j.Reason, why)
}

func (j *Job) canaryRuns() bool { return j.Plan.Canary > 0 && !j.CanaryPassed }

// canaryWaits reports that the job requests nothing before the outcomes of its canary.
func (j *Job) canaryWaits() bool { return j.canaryRuns() && j.canaryAsks() >= int64(j.Plan.Canary) }

// canaryAsks is how many replays the current canary has. Those that others have discarded
// prove nothing, nor do those that their consumer does not accept.
func (j *Job) canaryAsks() int64 { return j.Asked - j.refused + j.Replayed + j.Failed - j.canaryFrom }

func (j *Job) summary() string {
	return fmt.Sprintf("of %d dead letters, %d replayed, %d failed again, %d discarded, %d taken by others, %d skipped",
		j.sum(), j.Replayed, j.Failed, j.Discarded, j.Taken, j.Skipped)
}

// budget returns how many replays the rate permits now, and keeps the rest of the elapsed
// time. Time in which nobody ran the job, or a clock that was set, is not made up for.
func (j *Job) budget() int64 {
	each := time.Second / time.Duration(j.Plan.Rate)
	j.elapsed = min(max(0, j.elapsed), max(jobCatchUp, each))
	n := min(int64(j.elapsed/each), jobAsks, jobMostAsked-j.Asked)
	j.elapsed -= time.Duration(max(0, n)) * each
	return n
}

// ask requests at most n replays. Dead letters that somebody has locked stay pending.
func (s *store) ask(ctx context.Context, tx *sql.Tx, j *Job, n int64) error {
	ids, err := s.column(ctx, tx, s.text.PendingJobLetters, j.ID, n+jobPassesOver)
	if err != nil {
		return err
	}
	open, err := s.column(ctx, tx, s.text.OpenLetters, s.ids(ids))
	if err != nil {
		return err
	}
	did, err := s.column(ctx, tx, s.text.ReplaySome, s.ids(open), text.Clean(j.By), text.Clean(j.Reason), n)
	if err != nil {
		return err
	}
	switch {
	case len(did) == 0 && len(open) > 0:
		j.Waiting = allLocked
	case j.Waiting == allLocked:
		j.Waiting = ""
	}
	if taken := slices.DeleteFunc(ids, func(id int64) bool { return slices.Contains(open, id) }); len(taken) > 0 {
		if err := s.endLetters(ctx, tx, j, "taken", taken); err != nil {
			return err
		}
		j.Pending, j.Taken = j.Pending-int64(len(taken)), j.Taken+int64(len(taken))
	}
	if len(did) == 0 {
		return nil
	}
	if _, err := tx.ExecContext(ctx, s.text.AskJobLetters, j.ID, s.ids(did)); err != nil {
		return err
	}
	j.Pending, j.Asked = j.Pending-int64(len(did)), j.Asked+int64(len(did))
	act := auditstore.Act{Action: actReplay, By: j.By, Reason: j.Reason, Details: "replay_job " + strconv.FormatInt(j.ID, 10)}
	for _, id := range did {
		act.Subjects = append(act.Subjects, "dead_letter "+strconv.FormatInt(id, 10))
	}
	return s.audit.Record(ctx, tx, act)
}

func (s *store) endLetters(ctx context.Context, tx *sql.Tx, j *Job, state string, ids []int64) error {
	_, err := tx.ExecContext(ctx, s.text.EndJobLetters, j.ID, s.ids(ids), state)
	return err
}

// outcome is what is known of a replay that a job has requested.
type outcome struct {
	letter, asked    int64 // asked: the version
	state            string
	version          int64
	source, consumer string
	askedFor         int64 // microseconds
	failedAgain      bool
	retried          bool // a relay still has it
	refusedAgain     bool // as unverified or malformed, which does not end a replay
}

// of returns the state of the job's letter; "" while the replay is not over.
func (o *outcome) of() string {
	switch {
	case o.state == "": // purged
		return "taken"
	case o.state == "replaying":
		if o.version != o.asked {
			return "taken"
		}
		return ""
	case o.state != "replayed":
		return "discarded"
	case o.version != o.asked+1:
		return "taken"
	case o.failedAgain:
		return "failed"
	case o.retried:
		return ""
	}
	return "replayed"
}

// waits says what a replay that takes long waits for.
func (o *outcome) waits() string {
	switch {
	case o.refusedAgain:
		return "consumer " + o.consumer + " refuses some messages again: discard their dead letters"
	case o.retried:
		return "relays retry messages that were refused again, or wait for a broker"
	case o.source == "relay":
		return "nobody carries out the replays of relays"
	}
	return "nobody carries out the replays of consumer " + o.consumer
}

// outcomes looks at the next of the replays that were requested.
func (s *store) outcomes(ctx context.Context, tx *sql.Tx, j *Job) (found []*outcome, err error) {
	err = each(ctx, tx, func(rows *sql.Rows) error {
		o := &outcome{}
		found = append(found, o)
		return rows.Scan(&o.letter, &o.asked, &o.state, &o.version, &o.source, &o.consumer, &o.askedFor, &o.failedAgain, &o.refusedAgain)
	}, s.text.JobOutcomes, j.ID, j.lookAfter, jobLooks, jobStuck.Microseconds())
	var ids []int64
	of := map[int64]*outcome{}
	for _, o := range found {
		if o.source == "relay" && o.state == "replayed" {
			ids, of[o.letter] = append(ids, o.letter), o
		}
	}
	if err != nil || len(ids) == 0 { // a database without a relay has no table for it
		return found, err
	}
	err = each(ctx, tx, func(rows *sql.Rows) error {
		var id int64
		var retried, failedAgain bool
		if err := rows.Scan(&id, &retried, &failedAgain); err != nil {
			return err
		}
		of[id].retried, of[id].failedAgain = retried, failedAgain
		return nil
	}, s.text.RelayOutcomes, s.ids(ids))
	return found, err
}

// lookForOutcomes records what has become of the next of the replays that were requested.
func (s *store) lookForOutcomes(ctx context.Context, tx *sql.Tx, j *Job) error {
	if j.refused = 0; j.Asked == 0 {
		j.Waiting = ""
		return nil
	}
	first := j.lookAfter == 0
	outcomes, err := s.outcomes(ctx, tx, j)
	if err != nil {
		return err
	}
	ended, stuck := map[string][]int64{}, ""
	for _, o := range outcomes {
		j.lookAfter = o.letter
		if state := o.of(); state != "" {
			ended[state] = append(ended[state], o.letter)
		} else if time.Duration(o.askedFor)*time.Microsecond > jobStuck {
			if stuck == "" || o.refusedAgain {
				stuck = o.waits()
			}
			if o.refusedAgain {
				j.refused++
			}
		}
	}
	if len(outcomes) < jobLooks {
		j.lookAfter = 0
	}
	if !first || j.lookAfter != 0 { // with so many, they count
		j.refused = 0
	}
	for state, count := range map[string]*int64{"replayed": &j.Replayed, "failed": &j.Failed, "discarded": &j.Discarded, "taken": &j.Taken} {
		if ids := ended[state]; len(ids) > 0 {
			if err := s.endLetters(ctx, tx, j, state, ids); err != nil {
				return err
			}
			*count, j.Asked = *count+int64(len(ids)), j.Asked-int64(len(ids))
		}
	}
	switch {
	case stuck != "":
		j.Waiting = stuck
	case len(ended) > 0:
		j.Waiting = ""
	}
	return nil
}

// column returns the ids that a statement returns.
func (s *store) column(ctx context.Context, tx *sql.Tx, query string, args ...any) (ids []int64, err error) {
	err = each(ctx, tx, func(rows *sql.Rows) error {
		var id int64
		err := rows.Scan(&id)
		ids = append(ids, id)
		return err
	}, query, args...)
	return ids, err
}
