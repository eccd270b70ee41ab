package dlq

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/repeats"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Runner runs the replay jobs of a database. Each relay runs one; run your own only where
// there is no relay. Any number of them may run at once: each step of a job is a transaction
// that locks the job, so a runner that dies loses nothing, and another one goes on. A Runner
// only decides which dead letters are replayed and when; relays and inboxes deliver them.
type Runner struct {
	letters *Store
	logger  *slog.Logger
	calls   *bounded.Calls
}

// RunnerConfig configures a Runner. The zero value is right for most services.
type RunnerConfig struct {
	Config // of the Store

	// Logger gets a warning when jobs cannot be run. Default: slog.Default().
	Logger *slog.Logger
}

// NewRunner returns a runner of the jobs of db. It does no I/O. Errors are those of [New].
func NewRunner(db *sql.DB, cfg RunnerConfig) (*Runner, error) {
	letters, err := New(db, cfg.Config)
	if err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Runner{letters, cfg.Logger, bounded.Over(letters.DB(), runSilent)}, nil
}

const (
	runBusy  = 50 * time.Millisecond // between looks while a job is in progress
	runRest  = time.Second
	runAfter = 5 * time.Second // after the last step
	runLimit = 15 * time.Second

	// A connection that answers no more holds up the jobs for runWait, and is given up.
	runWait   = 20 * time.Second
	runSilent = 4 // connections that are given up before the next ones only test for an answer
)

// Run runs jobs until ctx ends, and returns nil. A database error is logged and tried again, at
// the start too, and a connection without an answer is given up after 20 seconds. The error is an
// [*oncemill.SchemaError] if the tables are missing, too old or too new, and an
// [*oncemill.ConfigError] for settings of SQLite that oncemill.CheckSQLite refuses.
func (r *Runner) Run(ctx context.Context) error {
	var last time.Time
	var failing repeats.Series
	step := r.check
	for ctx.Err() == nil {
		worked, err := bounded.Do(ctx, r.calls, runWait, step)
		switch {
		case err == nil:
			step = r.letters.RunJobs
			if attrs, report := failing.Over(); report {
				r.logger.InfoContext(ctx, "replay jobs run again", attrs...)
			}
		case unusable(err):
			return err
		case ctx.Err() == nil && !sqlerr.Retryable(err):
			level, attrs := failing.Failed(slog.LevelWarn, err.Error())
			r.logger.Log(ctx, level, "running replay jobs failed; trying again", append(attrs, "error", err)...)
		}
		if worked {
			last = time.Now()
			continue
		}
		rest := runRest
		if err == nil && time.Since(last) < runAfter {
			rest = runBusy
		}
		sleep.For(ctx, rest)
	}
	return nil
}

// check is the step before the first one.
func (r *Runner) check(ctx context.Context) (bool, error) {
	err := oncemill.CheckMigrated(ctx, r.letters.db, r.letters.cfg.Database, Migrations)
	return err == nil, err
}

// unusable reports that trying again helps nothing: the tables or the settings are wrong.
func unusable(err error) bool {
	var schema *oncemill.SchemaError
	var config *oncemill.ConfigError
	return errors.As(err, &schema) || errors.As(err, &config)
}

// RunJobs does one step of the job that has been due for longest, in a short transaction, and
// reports whether there was one. [Runner] calls it in a loop.
func (s *Store) RunJobs(ctx context.Context) (worked bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, runLimit)
	defer cancel()
	worked, err = s.store.RunJob(ctx)
	if err != nil {
		return false, fmt.Errorf("dlq: run job: %w", err)
	}
	return worked, nil
}
