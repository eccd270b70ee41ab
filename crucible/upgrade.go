package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"github.com/oncemill/oncemill/crucible/nemesis"
	"github.com/oncemill/oncemill/crucible/work"
	"github.com/oncemill/oncemill/internal/sleep"
)

// upgrade replaces the older build, while everything works and fails as usual: after a third of
// the time it migrates the tables, which the older processes then use too, even if they are
// started again; after that it replaces one process after the other. It does nothing without an
// older build.
func (c *crucible) upgrade(ctx context.Context) error {
	if c.upgradeFrom == "" {
		return nil
	}
	newer, err := os.Executable()
	if err != nil {
		return err
	}
	if !sleep.For(ctx, c.time/3) {
		return ctx.Err()
	}
	if err := untilDone(ctx, func() error { return work.Migrate(ctx, c.site.db) }); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	say("  %4.0f s  the tables are migrated", time.Since(c.began).Seconds())
	pause := c.time / 3 / time.Duration(len(c.processes))
	for _, name := range slices.Sorted(maps.Keys(c.processes)) {
		if !sleep.For(ctx, pause) {
			return ctx.Err()
		}
		c.processes[name].replace(newer)
		if err := c.hurt.strike(ctx, fault{inject: c.hurt.end(syscall.SIGTERM)}, nemesis.Fault{Kind: "upgrade", Target: name}); err != nil {
			return err
		}
	}
	say("  %4.0f s  all processes are replaced", time.Since(c.began).Seconds())
	return nil
}

// replace makes later lives of the process another build.
func (p *process) replace(path string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.path = path
}

// untilDone repeats what a fault of the database may have ended.
func untilDone(ctx context.Context, do func() error) error {
	ctx, cancel := context.WithTimeout(ctx, healTimeout)
	defer cancel()
	for {
		err := do()
		if err == nil {
			return nil
		}
		if !sleep.For(ctx, time.Second) {
			return errors.Join(err, ctx.Err())
		}
	}
}

// migrateWith lets a build migrate the tables as it needs them.
func migrateWith(ctx context.Context, build, url string) error {
	job, err := json.Marshal(work.Job{Role: work.RoleMigrate, Postgres: url})
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, build)
	cmd.Env, cmd.Stderr = append(os.Environ(), work.Variable+"="+string(job)), os.Stderr
	return cmd.Run()
}
