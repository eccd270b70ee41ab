package testserver

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
)

// Instance is a private server that no test owns: for programs that stop, kill, fill or
// reconfigure a server. Tests use PrivatePostgres and PrivateRabbitMQ.
type Instance struct {
	kind    string
	dir     string
	exports map[string]string
}

// NewInstance creates and starts a server in dir, an absolute path that must not exist. kind is
// "postgres", "rabbitmq", or a part of a replicated PostgreSQL: "etcd", "patroni" or "haproxy";
// see scripts/servers.sh. Each setting is "name=value" of the server's configuration file. It
// is removed by Remove or, if the process dies first, when the script runs again.
func NewInstance(ctx context.Context, kind, dir string, settings ...string) (*Instance, error) {
	i := &Instance{kind: kind, dir: dir}
	args := append([]string{"start", kind, dir, "--owner", strconv.Itoa(os.Getpid())}, settings...)
	var err error
	i.exports, err = script(ctx, args...)
	return i, err
}

// URL returns the URL of the server. It stays the same after a restart.
func (i *Instance) URL() string {
	if i.kind == "rabbitmq" {
		return i.exports[envAMQP]
	}
	return i.exports[envPostgres]
}

// Patroni returns the URL of the REST API of a node.
func (i *Instance) Patroni() string { return i.exports["ONCEMILL_TEST_PATRONI"] }

// Admin returns the URL of RabbitMQ's management API.
func (i *Instance) Admin() string { return i.exports[envAMQPAdmin] }

// Dir returns the directory of the server.
func (i *Instance) Dir() string { return i.dir }

// Log returns the path of the server's log.
func (i *Instance) Log() string { return filepath.Join(i.dir, "log") }

// Start starts the server again after Stop, Crash or Kill and waits until it answers.
func (i *Instance) Start(ctx context.Context) error { return i.do(ctx, "start", i.kind, i.dir) }

// Stop stops the server cleanly.
func (i *Instance) Stop(ctx context.Context) error { return i.do(ctx, "stop", i.dir) }

// Kill ends the server with SIGKILL.
func (i *Instance) Kill(ctx context.Context) error { return i.do(ctx, "kill", i.dir) }

// Freeze stops all processes of a node of a replicated PostgreSQL. Thaw lets them go on.
func (i *Instance) Freeze(ctx context.Context) error { return i.do(ctx, "signal", i.dir, "STOP") }

// Thaw ends Freeze.
func (i *Instance) Thaw(ctx context.Context) error { return i.do(ctx, "signal", i.dir, "CONT") }

// Crash shuts PostgreSQL down at once, without a checkpoint: the next start recovers from the
// log.
func (i *Instance) Crash(ctx context.Context) error { return i.do(ctx, "crash", i.dir) }

// Eval evaluates an Erlang expression in a RabbitMQ.
func (i *Instance) Eval(ctx context.Context, expression string) error {
	return i.do(ctx, "eval", i.dir, expression)
}

// Remove stops the server and deletes its directory. It does nothing if there is none.
func (i *Instance) Remove(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(i.dir, "kind")); err != nil {
		return nil //nolint:nilerr // it was never created, or is removed
	}
	return i.do(ctx, "remove", i.dir)
}

func (i *Instance) do(ctx context.Context, args ...string) error {
	_, err := scriptOutput(ctx, args...)
	return err
}
