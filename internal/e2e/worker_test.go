package e2e

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// workerEnv holds the workerSpec of a process that is a relay.
const workerEnv = "ONCEMILL_TEST_E2E_WORKER"

type workerSpec struct {
	DSN      string
	Database oncemill.Config
	AMQP     string
	Queues   bool // a topic is a queue's name, and nothing is declared
	Retry    relay.Retry
}

func (s workerSpec) run(ctx context.Context) (err error) {
	db, err := sql.Open(testserver.DriverName(), s.DSN)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	db.SetMaxIdleConns(8)
	db.SetMaxOpenConns(testserver.MaxOpenConns())
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	box, err := outbox.New(db, outbox.Config{Database: s.Database, Logger: log})
	if err != nil {
		return err
	}
	config := amqp.NewDurablePubSubConfig(s.AMQP, nil)
	if s.Queues {
		config = amqp.NewDurableQueueConfig(s.AMQP)
	}
	sink, err := rabbitmq.New(config, rabbitmq.Config{Logger: log})
	if err != nil {
		return err
	}
	worker, err := relay.New(box, sink, relay.Config{Lease: 3 * time.Second, Retry: s.Retry, Logger: log})
	if err != nil {
		return err
	}
	return worker.Run(ctx)
}

func workerMain(text string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var spec workerSpec
	if err := errors.Join(json.Unmarshal([]byte(text), &spec), spec.run(ctx)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// process is this binary as something else: a relay, or a node of a broker.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	stderr *bytes.Buffer
	wait   func() error
}

func startWorker(t *testing.T, spec workerSpec) *process {
	t.Helper()
	return startProcess(t, workerEnv, spec)
}

// startProcess starts what TestMain runs for the variable. It has a pipe as its input, which
// ends with this process.
func startProcess(t *testing.T, variable string, spec any) *process {
	t.Helper()
	return startProcessWith(t, variable, spec, func(*exec.Cmd) error { return nil })
}

// startProcessWith calls prepare before the start.
func startProcessWith(t *testing.T, variable string, spec any, prepare func(*exec.Cmd) error) *process {
	t.Helper()
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, cmd: exec.Command(os.Args[0]), stderr: &bytes.Buffer{}}
	p.cmd.Env = append(os.Environ(), variable+"="+string(text))
	p.cmd.Stderr = p.stderr
	if _, err := p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := prepare(p.cmd); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.wait = sync.OnceValue(p.cmd.Wait)
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // of no effect on one that has ended
		_ = p.wait()
		if t.Failed() {
			t.Logf("%s %s:\n%s", variable, text, p.stderr)
		}
	})
	return p
}

func (p *process) kill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		p.t.Errorf("kill: %v", err)
	}
	_ = p.wait() // "signal: killed"
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Errorf("%v: %v", s, err)
	}
}

// end stops the process cleanly.
func (p *process) end() {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	if err := p.wait(); err != nil {
		p.t.Errorf("process: %v", err)
	}
}
