package testserver

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"
)

// scriptTimeout covers the installation of a package on a slow machine.
const scriptTimeout = 8 * time.Minute

const (
	envPostgres  = "ONCEMILL_TEST_POSTGRES"
	envAMQP      = "ONCEMILL_TEST_AMQP"
	envAMQPAdmin = "ONCEMILL_TEST_AMQP_ADMIN"
)

// sharedPostgres returns the URL of the PostgreSQL that all tests share.
var sharedPostgres = sync.OnceValues(func() (string, error) {
	if url := os.Getenv(envPostgres); url != "" {
		return url, nil
	}
	exports, err := script(context.Background(), "up", "postgres")
	return exports[envPostgres], err
})

type rabbit struct {
	uri   string
	admin string // URL of the management API; empty if there is none
}

// sharedRabbitMQ returns the RabbitMQ that all tests share.
var sharedRabbitMQ = sync.OnceValues(func() (rabbit, error) {
	r := rabbit{os.Getenv(envAMQP), os.Getenv(envAMQPAdmin)}
	if r.uri != "" && r.admin != "" {
		return r, nil
	}
	exports, err := script(context.Background(), "up", "rabbitmq")
	return rabbit{exports[envAMQP], exports[envAMQPAdmin]}, err
})

// script runs scripts/servers.sh and returns the variables that it exports.
func script(ctx context.Context, args ...string) (map[string]string, error) {
	out, err := scriptOutput(ctx, args...)
	if err != nil {
		return nil, err
	}
	exports := map[string]string{}
	for line := range strings.Lines(out) {
		assignment, ok := strings.CutPrefix(strings.TrimSpace(line), "export ")
		if !ok {
			continue
		}
		name, value, _ := strings.Cut(assignment, "=")
		exports[name] = strings.Trim(value, "'")
	}
	return exports, nil
}

func scriptOutput(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, scriptTimeout)
	defer cancel()
	_, here, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(here) {
		return "", fmt.Errorf("scripts/servers.sh cannot be found: built with -trimpath")
	}
	path := filepath.Join(filepath.Dir(here), "..", "..", "scripts", "servers.sh")
	cmd := exec.CommandContext(ctx, "bash", append([]string{path}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("servers.sh %s: %w\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}
