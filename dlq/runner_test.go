package dlq_test

import (
	"context"
	"testing"
	"time"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// The server answers a step's connection no more. The next step is done on another one, and Run
// ends when it is told to.
func TestRunner_GoesOnAndEndsWhenTheServerFallsSilent(t *testing.T) {
	t.Parallel()
	for _, statement := range []string{"for update skip locked", "order by due_at, id", "commit"} {
		t.Run(statement, func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			p := newTestDB(t, pg.Open(t), pg.Config)
			p.write(t, letter{source: "consumer", consumer: "stock"})
			proxy, db := testserver.OpenSilenceable(t, pg.URL(t))
			runner, err := dlq.NewRunner(db, dlq.RunnerConfig{Config: dlq.Config{Database: p.cfg}})
			must(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			proxy.Silence(testserver.Containing(statement), 1)
			go func() { ended <- runner.Run(ctx) }()
			var job *dlq.Job
			testserver.Eventually(t, "a job starts", func() bool { // a slow machine is idle in a transaction for too long
				job, err = p.StartJob(t.Context(), dlq.JobPlan{}, ada)
				return err == nil
			})
			begin := time.Now()
			for {
				j, err := p.Job(t.Context(), job.ID)
				must(t, err)
				if j.Asked == 1 {
					break
				}
				if time.Since(begin) > time.Minute {
					t.Fatalf("%+v", j)
				}
				testserver.Pause(t.Context(), 100*time.Millisecond)
			}
			if proxy.Silenced() == 0 {
				t.Error("nothing was silent")
			}
			proxy.SilenceAll()
			cancel()
			select {
			case err := <-ended:
				must(t, err)
			case <-time.After(10 * time.Second):
				t.Error("Run does not end")
			}
			proxy.Cut()
		})
	}
}
