package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// postgresSettings differ from the defaults; fsync, synchronous_commit and
// full_page_writes are on.
var postgresSettings = []string{"shared_buffers=512MB"}

// servers are a PostgreSQL and a RabbitMQ.
type servers struct {
	postgres string // URL
	amqp     string // URI
	script   string
	dir      string   // holds what we started; empty if nothing
	started  []string // directories of the servers in it
}

// startServers starts private servers for those that are not named.
func startServers(ctx context.Context, root, postgres, amqp string) (*servers, error) {
	script, err := filepath.Abs(filepath.Join(root, "scripts", "servers.sh"))
	if err != nil {
		return nil, err
	}
	s := &servers{postgres: postgres, amqp: amqp, script: script}
	if postgres != "" && amqp != "" {
		return s, nil
	}
	if s.dir, err = os.MkdirTemp("", "oncemill-bench-"); err != nil {
		return nil, err
	}
	if err := s.startMissing(ctx); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

func (s *servers) startMissing(ctx context.Context) (err error) {
	// The servers run as users of their own.
	if err := os.Chmod(s.dir, 0o755); err != nil {
		return err
	}
	if s.postgres == "" {
		if s.postgres, err = s.start(ctx, "postgres", "ONCEMILL_TEST_POSTGRES", postgresSettings...); err != nil {
			return err
		}
	}
	if s.amqp == "" {
		s.amqp, err = s.start(ctx, "rabbitmq", "ONCEMILL_TEST_AMQP")
	}
	return err
}

// start starts a server and returns the value that the script exports as name.
func (s *servers) start(ctx context.Context, kind, name string, settings ...string) (string, error) {
	dir := filepath.Join(s.dir, kind)
	s.started = append(s.started, dir)
	args := append([]string{"start", kind, dir, "--owner", strconv.Itoa(os.Getpid())}, settings...)
	cmd := exec.CommandContext(ctx, s.script, args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("start %s: %w", kind, err)
	}
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), "export "+name+"="); ok {
			return strings.Trim(value, "'"), nil
		}
	}
	return "", fmt.Errorf("start %s: %s does not export %s", kind, s.script, name)
}

// stop removes what was started, also after the program was interrupted.
func (s *servers) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	for _, dir := range s.started {
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		if out, err := exec.CommandContext(ctx, s.script, "remove", dir).CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("remove %s: %w: %s", dir, err, out))
		}
	}
	if s.dir != "" {
		errs = append(errs, os.RemoveAll(s.dir))
	}
	return errors.Join(errs...)
}
