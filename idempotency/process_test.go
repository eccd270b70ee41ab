package idempotency_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// serveVariable holds the settings of a server process, as JSON.
const serveVariable = "ONCEMILL_TEST_SERVE"

type serveSettings struct {
	Driver, DSN   string
	Database      oncemill.Config
	Transactional bool
	Isolation     sql.IsolationLevel
	Timeout       time.Duration
	Lease         time.Duration
	GroupSize     int
	UniqueName    string
	Address       string
}

// server is a process that serves a probe. It ends with its parent.
type server struct {
	t       *testing.T
	url     string
	address string
	cmd     *exec.Cmd
	stdin   io.Closer
	waiting sync.WaitGroup
	ended   chan struct{}
}

func startServer(t *testing.T, s serveSettings) *server {
	t.Helper()
	encoded, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &server{t: t, cmd: exec.Command(self), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), serveVariable+"="+string(encoded))
	p.cmd.Stderr = os.Stderr
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdin = stdin
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("the server did not start: %v", err)
	}
	p.address = strings.TrimSpace(line)
	p.url = "http://" + p.address
	p.waiting.Go(func() {
		_ = p.cmd.Wait()
		close(p.ended)
	})
	return p
}

// kill ends the process, whatever its state.
func (p *server) kill() {
	_ = p.cmd.Process.Kill()
	p.waiting.Wait()
	_ = p.stdin.Close()
}

func (p *server) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Error(err)
	}
}

// arm makes the next request that reaches the point pause or kill the process.
func (p *server) arm(signal syscall.Signal, point string) {
	p.t.Helper()
	response, err := http.Post(fmt.Sprintf("%s/arm?signal=%d&point=%s", p.url, signal, strings.ReplaceAll(point, " ", "+")), "", nil)
	if err != nil {
		p.t.Fatal(err)
	}
	_ = response.Body.Close()
}

// stopped waits until the process is paused.
func (p *server) awaitStopped() {
	p.t.Helper()
	eventually(p.t, "the process stands still", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
		return err == nil && strings.Contains(string(stat), ") T ")
	})
}

// serveProcess is the main function of the process.
func serveProcess() error {
	var s serveSettings
	if err := json.Unmarshal([]byte(os.Getenv(serveVariable)), &s); err != nil {
		return err
	}
	db, err := sql.Open(s.Driver, s.DSN)
	if err != nil {
		return err
	}
	db.SetMaxIdleConns(16)
	store, storeErr := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: s.Database, Prepare: true})
	box, boxErr := outbox.New(db, outbox.Config{Database: s.Database})
	cfg := probeConfig()
	cfg.Transactions.Isolation, cfg.Transactions.GroupSize = s.Isolation, s.GroupSize
	cfg.Failures.UniqueName = s.UniqueName
	if s.Timeout != 0 {
		cfg.Timeout, cfg.Failures.Lease = s.Timeout, s.Lease
	}
	engine, engineErr := idempotency.New(store, cfg)
	if err := errors.Join(storeErr, boxErr, engineErr); err != nil {
		return err
	}
	var bomb bomb
	engine.At(bomb.at)
	mux := http.NewServeMux()
	capabilities := capabilitiesOf(cfg, s.Transactional)
	capabilities.OneWriter = s.Database.Dialect == oncemill.SQLite
	mux.Handle("/", conformance.NewProbe(engine, pointedEffects{newSQLEffects(db, box), &bomb}, capabilities))
	mux.HandleFunc("POST /arm", func(_ http.ResponseWriter, r *http.Request) {
		point := r.FormValue("point")
		var n int64
		_, _ = fmt.Sscan(r.FormValue("signal"), &n)
		bomb.signal.Store(n)
		bomb.armed.Store(&point)
	})
	if s.Address == "" {
		s.Address = "127.0.0.1:0"
	}
	listener, err := net.Listen("tcp", s.Address)
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // ends with the parent
		os.Exit(0)
	}()
	return http.Serve(listener, mux) //nolint:gosec // it lives for a test
}

// bomb sends a signal to its process when a request reaches the armed point.
type bomb struct {
	armed  atomic.Pointer[string]
	signal atomic.Int64
}

func (b *bomb) at(point string) {
	at := b.armed.Load()
	if at == nil || *at != point || !b.armed.CompareAndSwap(at, nil) {
		return
	}
	// The signal needs a moment to reach this thread, too: whoever was stopped goes on
	// once the process has been told to, and whoever was killed never.
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, syscall.SIGCONT)
	_ = syscall.Kill(os.Getpid(), syscall.Signal(b.signal.Load()))
	<-continued
	signal.Stop(continued)
}

// pointedEffects add the point "inside the handler".
type pointedEffects struct {
	sqlEffects
	bomb *bomb
}

func (e pointedEffects) Add(ctx context.Context, name string) error {
	e.bomb.at("inside the handler")
	return e.sqlEffects.Add(ctx, name)
}

var eventually = testserver.Eventually
