package main

import (
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestJobsCommand_StartsFollowsPausesAndCancels(t *testing.T) {
	t.Parallel()
	path, run := shopOf(t)
	if out := run(0, "dlq", "replay", "--all", "--dry-run"); !strings.Contains(out, "2 dead letters would be replayed.") || !strings.Contains(out, "stock") {
		t.Error(out)
	}
	for _, args := range [][]string{{"--all"}, {"1", "--all", "--reason", "x"}, {"--all", "--topic", "orders", "--reason", "x"}, {"--reason", "x"}} {
		run(2, append([]string{"dlq", "replay"}, args...)...)
	}
	if out := run(2, "dlq", "replay", "--all", "--rate", "-1", "--reason", "x"); !strings.Contains(out, "dlq.JobPlan.Rate") {
		t.Error(out)
	}
	if out := run(0, "dlq", "replay", "--topic", "orders", "--canary", "1", "--detach", "--reason", "fixed\x1b[31m", "--by", "ada"); out != "job 1 started; oncemill jobs watch 1 follows it\n" {
		t.Error(out)
	}
	if out := run(0, "jobs", "pause", "1", "--reason", "lunch", "--by", "bob"); out != "job 1 is paused\n" {
		t.Error(out)
	}
	if out := run(1, "jobs", "watch", "1"); !strings.Contains(out, "job 1 is paused: paused by bob: lunch; oncemill jobs resume 1 goes on") {
		t.Error(out)
	}
	if out := run(1, "jobs", "pause", "1", "--reason", "x"); !strings.Contains(out, "job 1 cannot be paused: it is paused") {
		t.Error(out)
	}
	run(2, "jobs", "resume", "1")
	run(2, "jobs", "watch", "x")
	run(1, "jobs", "show", "9")
	if out := run(0, "jobs", "resume", "1", "--reason", "back"); out != "job 1 is collecting\n" {
		t.Error(out)
	}
	letters, err := dlq.New(testserver.OpenSQLite(t, path), dlq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		if _, err := letters.RunJobs(t.Context()); err != nil {
			t.Fatal(err)
		}
		job, err := letters.Job(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		if job.Asked == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", job)
		}
	}
	if out := run(0, "jobs", "cancel", "1", "--reason", "enough"); out != "job 1 is canceling\n" {
		t.Error(out)
	}
	if out := run(0, "jobs"); strings.Contains(out, "\x1b") || !strings.Contains(out, "canceled by") {
		t.Errorf("%q", out)
	}
}

// Somebody else cancels the job that a script follows: it must not take that for success.
func TestReplayCommand_AJobThatIsCanceledFails(t *testing.T) {
	t.Parallel()
	_, run := shopOf(t)
	run(0, "dlq", "replay", "1", "2", "--rate", "1", "--detach", "--reason", "fixed")
	run(0, "jobs", "cancel", "1", "--reason", "not yet")
	if out := run(1, "jobs", "watch", "1"); !strings.Contains(out, "job 1 was canceled: it has replayed 0 dead letters and skipped 2") {
		t.Error(out)
	}
}
