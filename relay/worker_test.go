package relay_test

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// workerEnv holds the workerSpec of a process that is a worker.
const workerEnv = "ONCEMILL_TEST_RELAY_WORKER"

// workerListens is what a worker process prints once it heeds SIGTERM.
const workerListens = "listening"

type workerSpec struct {
	Name       string
	UniqueName bool
	Driver     string
	DSN        string
	Database   oncemill.Config
	History    time.Duration
	Broker     string // its address
	HoldBack   string
	Lease      time.Duration
	Window     int
	Batch      int
	Order      relay.Order
	Retry      relay.Retry
	Crash      crashPoint // the process ends there by SIGKILL
	Lethal     string     // and where it is to send this message
}

// workerMain is a worker process: a relay that runs until SIGTERM.
func workerMain(text string) int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var spec workerSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return fail(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	fmt.Println(workerListens)
	db, err := spec.open()
	if err != nil {
		return fail(err)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	box, err := outbox.New(db, outbox.Config{Database: spec.Database, History: spec.History, Logger: log})
	if err != nil {
		return fail(err)
	}
	sink := newRemoteSink(spec.Name, spec.Broker, spec.HoldBack)
	sink.lethal = spec.Lethal
	endToggle := sink.toggle()
	r, err := relay.New(box, sink, relay.Config{
		Name: spec.Name, UniqueName: spec.UniqueName, Lease: spec.Lease, Window: spec.Window, Batch: spec.Batch, Order: spec.Order, Retry: spec.Retry, Logger: log,
	})
	if err != nil {
		return fail(err)
	}
	if err := r.Run(ctx); err != nil {
		return fail(err)
	}
	if err := db.Close(); err != nil {
		return fail(err)
	}
	stop()
	endToggle()
	if err := testserver.Leak(30 * time.Second); err != nil {
		return fail(err)
	}
	return 0
}

func (s workerSpec) open() (*sql.DB, error) {
	db, err := sql.Open(s.Driver, s.DSN)
	if err != nil {
		return nil, err
	}
	if s.Crash.Parts != nil {
		err = db.Close()
		db = sql.OpenDB(&tap{driver: db.Driver(), dsn: s.DSN, around: s.Crash.around})
	}
	db.SetMaxIdleConns(8)
	return db, err
}

// process is a worker process.
type process struct {
	t      testing.TB
	name   string
	cmd    *exec.Cmd
	stderr *bytes.Buffer
	wait   func() error
	ended  chan struct{}
}

func startProcess(t testing.TB, p testDB, b *broker, spec workerSpec) *process {
	t.Helper()
	spec.Driver, spec.DSN, spec.Database, spec.Broker = p.driver, p.workerDSN(), p.cfg, b.address()
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	w := &process{t: t, name: spec.Name, cmd: exec.Command(os.Args[0]), stderr: &bytes.Buffer{}, ended: make(chan struct{})}
	w.cmd.Env = append(os.Environ(), workerEnv+"="+string(text))
	w.cmd.Stderr = w.stderr
	stdout, err := w.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.wait = sync.OnceValue(w.cmd.Wait)
	go func() { defer close(w.ended); _ = w.wait() }() // ends with the process, which the cleanup kills
	t.Cleanup(func() {
		_ = w.cmd.Process.Kill() // of no effect on one that has ended
		<-w.ended
		if t.Failed() {
			t.Logf("worker %s:\n%s", w.name, tail(w.stderr.String(), 3000))
		}
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); strings.TrimSpace(line) != workerListens {
		t.Fatalf("worker %s says %q, %v", w.name, line, err)
	}
	return w
}

// workerDSN is what a worker opens its database with.
func (p testDB) workerDSN() string {
	switch {
	case !p.postgres():
		return p.dsn
	case strings.Contains(p.dsn, "?"):
		return p.dsn + "&binary_parameters=yes"
	}
	return p.dsn + "?binary_parameters=yes"
}

func tail(s string, n int) string {
	if len(s) > n {
		s = "…" + s[len(s)-n:]
	}
	return s
}

func (w *process) signal(s os.Signal) {
	w.t.Helper()
	if err := w.cmd.Process.Signal(s); err != nil {
		w.t.Errorf("worker %s: %v: %v", w.name, s, err)
	}
	if s != os.Signal(syscall.SIGSTOP) {
		return
	}
	threads := fmt.Sprintf("/proc/%d/task/*/stat", w.cmd.Process.Pid)
	eventually(w.t, "the worker "+w.name+" stands still", func() bool {
		stats, err := filepath.Glob(threads)
		return err == nil && len(stats) > 0 && !slices.ContainsFunc(stats, func(path string) bool {
			stat, err := os.ReadFile(path)
			return err == nil && !strings.Contains(string(stat), ") T ")
		})
	})
}

func (w *process) kill() {
	w.t.Helper()
	w.signal(syscall.SIGKILL)
	_ = w.wait() // "signal: killed"
}

// died reports that the worker has killed itself.
func (w *process) died() bool {
	select {
	case <-w.ended:
		return true
	default:
		return false
	}
}

// end stops the worker cleanly; it must then leave nothing behind.
func (w *process) end() {
	w.t.Helper()
	w.signal(syscall.SIGTERM)
	ended := make(chan error, 1)
	go func() { ended <- w.wait() }()
	select {
	case err := <-ended:
		if err != nil {
			w.t.Errorf("worker %s: %v", w.name, err)
		}
	case <-time.After(maxWait):
		w.t.Errorf("worker %s does not end", w.name)
	}
}
