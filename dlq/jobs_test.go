package dlq_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestStartJob_ReportsAllBadValuesAtOnce(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		plan := dlq.JobPlan{Filter: dlq.Filter{States: []dlq.State{dlq.StateReplayed}, Limit: 1}, Canary: -1, Rate: 1001, StopAfter: -1}
		_, err := p.StartJob(t.Context(), plan, ada)
		for _, field := range []string{"Filter", "Filter.States", "Canary", "Rate", "StopAfter"} {
			found := false
			if list, ok := err.(interface{ Unwrap() []error }); ok {
				for _, e := range list.Unwrap() {
					var bad *oncemill.ConfigError
					found = found || errors.As(e, &bad) && bad.Field == "dlq.JobPlan."+field
				}
			}
			if !found {
				t.Errorf("%s is not reported: %v", field, err)
			}
		}
		if _, err := p.StartJob(t.Context(), dlq.JobPlan{}, dlq.Act{By: "ada"}); !errors.Is(err, dlq.ErrNoReason) {
			t.Error(err)
		}
		if jobs, err := p.Jobs(t.Context()); err != nil || len(jobs) != 0 {
			t.Errorf("%d jobs, %v", len(jobs), err)
		}
	})
}

// Several runners at once; each is stopped, and a later one ends what they began.
func TestRunner_AnotherOneGoesOn(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		for range 30 {
			p.write(t, letter{source: "consumer", consumer: "stock"})
		}
		job, err := p.StartJob(t.Context(), dlq.JobPlan{Rate: 20, Filter: dlq.Filter{Consumer: "stock"}}, ada)
		must(t, err)
		until := func(what string, reached func(*dlq.Job) bool) {
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 2)
			for range 2 {
				runner, err := dlq.NewRunner(p.db, dlq.RunnerConfig{Config: dlq.Config{Database: p.cfg}})
				must(t, err)
				go func() { ended <- runner.Run(ctx) }()
			}
			testserver.Eventually(t, what, func() bool {
				j, err := p.Job(t.Context(), job.ID)
				must(t, err)
				return reached(j)
			})
			cancel()
			for range 2 {
				must(t, <-ended)
			}
		}
		began := time.Now()
		until("some are asked for", func(j *dlq.Job) bool { return j.Asked > 3 })
		until("all are asked for", func(j *dlq.Job) bool { return j.Asked == 30 && j.Pending == 0 })
		if took := time.Since(began); took < time.Second {
			t.Errorf("30 replays at 20 a second took %v", took)
		}
	})
}
