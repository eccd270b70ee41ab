package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/oncemill/oncemill/crucible/work"
	"github.com/oncemill/oncemill/internal/testserver"
)

// process is this executable, or an older build of it, with a job, started again whenever it ends.
type process struct {
	job  work.Job
	path string // of the executable
	ways ways
	log  string // the file
	note func(name string, err error)

	mu    sync.Mutex
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lives int
	ready chan struct{} // closed when this life works
}

// supervise keeps the process running until ctx ends, and then stops it.
func (p *process) supervise(ctx context.Context) error {
	for {
		ended, err := p.start()
		if err != nil {
			return fmt.Errorf("start %s: %w", p.job.Name, err)
		}
		select {
		case err := <-ended:
			p.note(p.job.Name, err)
			select {
			case <-time.After(200 * time.Millisecond):
			case <-ctx.Done():
				return nil
			}
		case <-ctx.Done():
			return p.stop(ended)
		}
	}
}

func (p *process) start() (<-chan error, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lives++
	p.job.Life = p.lives
	text, err := json.Marshal(p.job)
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	// The servers come first, as if they had machines of their own: where all compete for two cores,
	// RabbitMQ confirms nothing for seconds, and nothing else can move either. (Where Linux shares
	// the CPU among sessions, this puts the proxies first, and prefer RabbitMQ.)
	// Not CommandContext: supervise decides who ends it and how.
	cmd := exec.Command("nice", "-n", "10", p.path)
	cmd.Env, cmd.Stderr = append(os.Environ(), work.Variable+"="+string(text)), log
	if p.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	ready := make(chan struct{})
	cmd.Stdout = &readiness{ready: ready}
	if err := errors.Join(cmd.Start(), log.Close()); err != nil { // the child has its own copy
		return nil, err
	}
	p.cmd, p.ready = cmd, ready
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // ends with the process
	return ended, nil
}

// readiness closes ready when the process has printed a line.
type readiness struct {
	ready chan struct{}
	once  sync.Once
}

func (r *readiness) Write(b []byte) (int, error) {
	if bytes.IndexByte(b, '\n') >= 0 {
		r.once.Do(func() { close(r.ready) })
	}
	return len(b), nil
}

const stopTimeout = 40 * time.Second

// stop asks the process to end.
func (p *process) stop(ended <-chan error) error {
	p.mu.Lock()
	cmd := p.cmd
	p.mu.Unlock()
	_ = cmd.Process.Signal(syscall.SIGCONT) // errors mean that it has ended
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-ended:
		if err != nil {
			return fmt.Errorf("%s did not end cleanly: %w", p.job.Name, err)
		}
		return nil
	case <-time.After(stopTimeout):
		_ = cmd.Process.Kill()
		return fmt.Errorf("%s did not end within %s: %w", p.job.Name, stopTimeout, <-ended)
	}
}

// signal sends a signal to this life of the process and returns a function that sends another
// to the same life.
func (p *process) signal(s syscall.Signal) (later func(syscall.Signal)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	handle := p.cmd.Process
	_ = handle.Signal(s) // an error means that it has ended
	return func(s syscall.Signal) { _ = handle.Signal(s) }
}

// arm makes this life of the process die when it reaches a moment of package crashpoint; ""
// spares it.
func (p *process) arm(moment string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = io.WriteString(p.stdin, moment+"\n") // an error means that it has ended
}

// awaitLife waits until a life after the one of number has become ready.
func (p *process) awaitLife(ctx context.Context, after int) error {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		p.mu.Lock()
		life, ready := p.lives, p.ready
		p.mu.Unlock()
		if life > after {
			select {
			case <-ready:
				return nil
			default:
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w", p.job.Name, ctx.Err())
		}
	}
}

// life returns the number of the current life.
func (p *process) life() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lives
}

// newProcesses returns the processes of a run, with their proxies.
func newProcesses(ctx context.Context, s *site, o options, dir string, note func(string, error)) (all map[string]*process, err error) {
	all = map[string]*process{}
	path := o.upgradeFrom
	if path == "" {
		if path, err = os.Executable(); err != nil {
			return all, err
		}
	}
	n := uint64(0)
	for _, role := range []string{work.RoleRelay, work.RoleLedger, work.RoleReceipts, work.RoleService, work.RoleProducer} {
		if role == work.RoleService && o.rival != "" {
			continue
		}
		for i := range 2 {
			n++
			p := &process{note: note, path: path}
			p.job = work.Job{
				Role: role, Name: fmt.Sprintf("%s-%d", role, i+1), Seed: o.seed<<8 + n, Dir: dir,
				Rate: o.rate / 2, Accounts: accounts, Lease: o.lease, Rival: o.rival, Driver: work.DriverPq,
			}
			if role == work.RoleService {
				if p.job.Listen, err = testserver.FreeAddress(ctx); err != nil {
					return all, err
				}
			}
			p.log = filepath.Join(dir, p.job.Name+".log")
			if p.ways, p.job.Postgres, p.job.AMQP, err = s.newWays(ctx); err != nil {
				return all, err
			}
			if s.brokers != nil { // each begins with another node
				addresses := s.brokers.urls(int(n))
				p.job.AMQP, p.job.MoreAMQP = addresses[0], addresses[1:]
			}
			if s.replicated != nil {
				proxy, several, err := s.replicated.urls()
				if err != nil {
					return all, err
				}
				// One of each role by lib/pq and the proxy, one by pgx and several addresses.
				p.job.Driver, p.job.Postgres = work.DriverPq, proxy
				if i > 0 {
					p.job.Driver, p.job.Postgres = work.DriverPgx, several
				}
			}
			all[p.job.Name] = p
		}
	}
	return all, nil
}
