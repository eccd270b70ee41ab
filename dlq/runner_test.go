package dlq_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
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

// A process that starts while its database is away still runs the jobs when it is back.
func TestRunner_StartsWithoutItsDatabase(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	p := newTestDB(t, pg.Open(t), pg.Config)
	p.write(t, letter{source: "consumer", consumer: "stock"})
	job, err := p.StartJob(t.Context(), dlq.JobPlan{}, ada)
	must(t, err)
	proxy, db := testserver.OpenSilenceable(t, pg.URL(t))
	failed := make(failures, 1)
	runner, err := dlq.NewRunner(db, dlq.RunnerConfig{Config: dlq.Config{Database: p.cfg}, Logger: slog.New(failed)})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	proxy.SilenceAll()
	ended := make(chan error, 1)
	go func() { ended <- runner.Run(ctx) }()
	for cut := true; cut; {
		select {
		case <-failed:
			cut = false
		case err := <-ended:
			t.Fatalf("Run has ended: %v", err)
		case <-time.After(50 * time.Millisecond):
			proxy.Cut() // a client that connects gets an error
		}
	}
	proxy.Resume()
	testserver.Eventually(t, "the job goes on", func() bool {
		j, err := p.Job(t.Context(), job.ID)
		return err == nil && j.Asked == 1
	})
	cancel()
	must(t, <-ended)
}

// failures is a handler of logs that takes note of the first warning.
type failures chan struct{}

func (f failures) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }
func (f failures) WithAttrs([]slog.Attr) slog.Handler               { return f }
func (f failures) WithGroup(string) slog.Handler                    { return f }
func (f failures) Handle(context.Context, slog.Record) error {
	select {
	case f <- struct{}{}:
	default:
	}
	return nil
}

// Without its tables Run ends: nothing is going to create them.
func TestRunner_EndsWithoutItsTables(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	runner, err := dlq.NewRunner(pg.Open(t), dlq.RunnerConfig{Config: dlq.Config{Database: pg.Config}})
	must(t, err)
	var schema *oncemill.SchemaError
	if err := runner.Run(t.Context()); !errors.As(err, &schema) {
		t.Errorf("%v", err)
	}
}
