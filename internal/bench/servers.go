package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"
)

const serversScript = "../../scripts/servers.sh"

// startServers starts a PostgreSQL and a RabbitMQ; stop removes them, also after the
// program was interrupted. fsync, synchronous_commit and full_page_writes are on.
func (b *bench) startServers(ctx context.Context) (stop func() error, err error) {
	dir, err := os.MkdirTemp("", "oncemill-bench-")
	if err != nil {
		return nil, err
	}
	stop = func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		var errs []error
		started, _ := filepath.Glob(filepath.Join(dir, "*")) // the pattern is well-formed
		for _, server := range started {
			if out, err := exec.CommandContext(ctx, serversScript, "remove", server).CombinedOutput(); err != nil {
				errs = append(errs, fmt.Errorf("remove %s: %w: %s", server, err, out))
			}
		}
		return errors.Join(append(errs, os.RemoveAll(dir))...)
	}
	err = os.Chmod(dir, 0o755) // the servers run as users of their own
	if err == nil {
		b.postgres, err = startServer(ctx, filepath.Join(dir, "postgres"), "ONCEMILL_TEST_POSTGRES", "shared_buffers=512MB")
	}
	if err == nil {
		b.amqp, err = startServer(ctx, filepath.Join(dir, "rabbitmq"), "ONCEMILL_TEST_AMQP")
	}
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return stop, nil
}

// startServer starts the server that the directory is named after, and returns the value
// that the script exports as name.
func startServer(ctx context.Context, dir, name string, settings ...string) (string, error) {
	args := append([]string{"start", filepath.Base(dir), dir, "--owner", strconv.Itoa(os.Getpid())}, settings...)
	cmd := exec.CommandContext(ctx, serversScript, args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("start %s: %w", dir, err)
	}
	exported := regexp.MustCompile(`(?m)^export ` + name + `='?([^'\n]*)`).FindSubmatch(out)
	if exported == nil {
		return "", fmt.Errorf("start %s: %s does not export %s", dir, serversScript, name)
	}
	return string(exported[1]), nil
}

// open returns a pool that keeps conns connections, as that of a service does.
// parameters are lib/pq's.
func (b *bench) open(conns int, parameters string) (*sql.DB, error) {
	address, err := url.Parse(b.postgres)
	if err != nil {
		return nil, errors.New("the URL of the database cannot be parsed")
	}
	address.RawQuery += "&" + parameters
	db, err := sql.Open("postgres", address.String())
	if err != nil {
		return nil, err
	}
	db.SetMaxIdleConns(conns)
	return db, nil
}

// oneTrip makes lib/pq use one round trip for a statement with arguments.
const oneTrip = "binary_parameters=yes"

func (b *bench) exec(ctx context.Context, what string, texts ...string) error {
	for _, text := range texts {
		if _, err := b.db.ExecContext(ctx, text); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	return nil
}

// settled brings the database into the state from which a run on a backlog starts:
// statistics known, nothing to vacuum.
func (b *bench) settled(ctx context.Context) error {
	return b.exec(ctx, "settle", `vacuum (analyze)`)
}

// settle is for a run that has no backlog: dirty pages are written before it begins.
func (b *bench) settle(ctx context.Context) error {
	return b.exec(ctx, "settle", `vacuum (analyze)`, `checkpoint`)
}

// expectRows fails if a query that counts does not return n.
func (b *bench) expectRows(ctx context.Context, n int, query string) error {
	var got int
	if err := b.db.QueryRowContext(ctx, query).Scan(&got); err != nil {
		return fmt.Errorf("count rows: %w", err)
	}
	if got != n {
		return fmt.Errorf("%d rows, want %d: %s", got, n, query)
	}
	return nil
}

func pauseFor(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
