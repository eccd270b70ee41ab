package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A job has a stranger's message as its canary, which Config.Verify refuses again and again.
func TestReplays_AJobGoesOnAlthoughAMessageIsRefusedAgain(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, func(cfg *inbox.Config) {
			cfg.Verify = func(m *message.Message) error {
				if string(m.Payload) == "x" {
					return errors.New("no signature")
				}
				return nil
			}
		})
		expectNoError(t, deliverMessage(t, in, message.NewMessage("forged", []byte("x")), effect))
		for i := range 5 {
			expectNoError(t, deliver(t, in, fmt.Sprint("m", i), bad))
		}
		job, err := store.StartJob(t.Context(), dlq.JobPlan{Filter: dlq.Filter{Consumer: "stock"}, Canary: 1}, eve)
		expectNoError(t, err)
		back := `asked_at - interval '2 minutes'`
		if p.cfg.Dialect == oncemill.SQLite {
			back = `asked_at - 120000000`
		}
		came := 0
		testserver.Eventually(t, "all but one are replayed", func() bool {
			_, err := store.RunJobs(t.Context())
			expectNoError(t, err)
			_, err = in.Replay(t.Context())
			expectNoError(t, err)
			for ; came < len(rec.msgs); came++ {
				m := rec.msgs[came]
				m.SetContext(context.WithoutCancel(t.Context()))
				expectNoError(t, deliverMessage(t, in, m, effect))
				if string(m.Payload) == "x" {
					p.exec(t, `update {{dead_letter_job_letters}} set asked_at = `+back+` where state = 'asked'`)
				}
			}
			testserver.Pause(t.Context(), 20*time.Millisecond)
			job, err = store.Job(t.Context(), job.ID)
			expectNoError(t, err)
			return job.Replayed == 5
		})
		if job.State != dlq.JobRunning || !job.CanaryPassed || job.Asked != 1 || !strings.Contains(job.Waiting, "consumer stock refuses some messages again") {
			t.Errorf("%+v", job)
		}
		if n := p.count(t, `select count(*) from effects`); n != 5 {
			t.Errorf("%d effects", n)
		}
	})
}

// While a message was a dead letter, another one with its id was handled. Its replay is a
// conflict: it takes no effect and becomes a dead letter again.
func TestReplays_OneThatIsAConflictHasFailedAgain(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		signed := false
		in, store, rec := p.replaying(t, func(cfg *inbox.Config) {
			cfg.Fingerprint = func(m *message.Message) []byte { return m.Payload }
			cfg.Verify = func(m *message.Message) error {
				if string(m.Payload) == "x" && !signed {
					return errors.New("no signature")
				}
				return nil
			}
		})
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", []byte("x")), effect))
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", []byte("y")), effect))
		expectNoError(t, deliver(t, in, "b", bad))
		signed = true
		job, err := store.StartJob(t.Context(), dlq.JobPlan{Filter: dlq.Filter{Consumer: "stock"}, Canary: 1}, eve)
		expectNoError(t, err)
		came := 0
		testserver.Eventually(t, "the job is paused", func() bool {
			_, err := store.RunJobs(t.Context())
			expectNoError(t, err)
			_, err = in.Replay(t.Context())
			expectNoError(t, err)
			for ; came < len(rec.msgs); came++ {
				rec.msgs[came].SetContext(context.WithoutCancel(t.Context()))
				expectNoError(t, deliverMessage(t, in, rec.msgs[came], effect))
			}
			testserver.Pause(t.Context(), 20*time.Millisecond)
			job, err = store.Job(t.Context(), job.ID)
			expectNoError(t, err)
			return job.State == dlq.JobPaused || job.Ended()
		})
		letters, err := store.List(t.Context(), dlq.Filter{MessageID: "a", OldestFirst: true})
		expectNoError(t, err)
		if len(letters) != 2 || letters[1].Reason != string(inbox.ReasonConflict) {
			t.Fatalf("%+v", letters)
		}
		first, err := store.Get(t.Context(), letters[0].ID)
		expectNoError(t, err)
		if job.State != dlq.JobPaused || job.Failed != 1 || job.Pending != 1 || first.FailedAgain != letters[1].ID {
			t.Errorf("%+v; failed again as %d, want %d", job, first.FailedAgain, letters[1].ID)
		}
	})
}
