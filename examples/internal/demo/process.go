package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// Process is a part of the example that runs as a process of its own: this
// executable with other arguments, and -parent with the address of its line.
type Process struct {
	Name string
	Args []string
	Env  []string // in addition to the parent's
	Log  string   // file that takes what it prints

	cmd   *exec.Cmd
	line  net.Conn
	ready chan string // each holds what the process has said, at most one of a stage
	armed chan string
	held  chan string
	ended chan struct{}
	err   error // how it ended; read after ended is closed

	running sync.WaitGroup // what Start started; Kill and Stop wait for it
}

const (
	startTimeout = 2 * time.Minute
	holdTimeout  = 2 * time.Minute
	stopTimeout  = 30 * time.Second
)

// Start starts the process and returns its address when it is ready.
func (p *Process) Start(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := p.spawn(ctx); err != nil {
		return "", fmt.Errorf("start %s: %w", p.Name, err)
	}
	select {
	case address := <-p.ready:
		return address, nil
	case <-p.ended:
		return "", fmt.Errorf("%s ended at its start: %w; see %s", p.Name, p.err, p.Log)
	case <-ctx.Done():
		p.Kill()
		return "", fmt.Errorf("%s is not ready after %s; see %s", p.Name, startTimeout, p.Log)
	}
}

func (p *Process) spawn(ctx context.Context) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }() // the child has its own copy
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close() //nolint:errcheck // it takes one caller only

	// Not CommandContext: who ends the process, and how, is this file's subject.
	p.cmd = exec.Command(self, append(p.Args, "-parent", listener.Addr().String())...) // our own executable
	p.cmd.Env = append(os.Environ(), p.Env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.ready, p.armed, p.held = make(chan string, 1), make(chan string, stages), make(chan string, stages)
	p.ended = make(chan struct{})
	p.running.Go(func() {
		p.err = p.cmd.Wait()
		_ = listener.Close() // unblocks the Accept below
		close(p.ended)
	})

	hangUp := context.AfterFunc(ctx, func() { _ = listener.Close() }) // unblocks it too
	defer hangUp()
	if p.line, err = listener.Accept(); err != nil {
		p.Kill()
		return errors.Join(err, p.err)
	}
	p.running.Go(func() { p.listen(p.line) })
	return nil
}

// listen ends when one side hangs up, which a process does at its end at the
// latest.
func (p *Process) listen(line net.Conn) {
	lines := bufio.NewScanner(line)
	for lines.Scan() {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		switch word {
		case "ready":
			p.ready <- rest
		case "armed":
			p.armed <- rest
		case "held":
			p.held <- rest
		}
	}
}

// Arm has the process stand still when it is at stage the next time. When it
// returns, the process knows.
func (p *Process) Arm(ctx context.Context, stage string) error {
	if _, err := fmt.Fprintln(p.line, "hold "+stage); err != nil {
		return fmt.Errorf("hold %s: %w", p.Name, err)
	}
	_, err := p.await(ctx, p.armed)
	return err
}

// Held waits until the process stands still and returns the id of the message
// with which it does.
func (p *Process) Held(ctx context.Context) (string, error) { return p.await(ctx, p.held) }

func (p *Process) await(ctx context.Context, word <-chan string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	select {
	case rest := <-word:
		return rest, nil
	case <-p.ended:
		return "", fmt.Errorf("%s ended by itself: %w; see %s", p.Name, p.err, p.Log)
	case <-ctx.Done():
		return "", fmt.Errorf("%s came to no stand within %s; see %s", p.Name, holdTimeout, p.Log)
	}
}

// Kill sends SIGKILL and waits for the end. A process that is not running is
// left alone.
func (p *Process) Kill() {
	if p.cmd == nil || p.cmd.Process == nil {
		return
	}
	_ = p.cmd.Process.Kill() // its only error says that the process has ended
	p.hangUp()
	p.running.Wait()
}

// Stop asks the process to end, by hanging up, and reports how it did.
func (p *Process) Stop() error {
	p.hangUp()
	deadline := time.NewTimer(stopTimeout)
	defer deadline.Stop()
	select {
	case <-p.ended:
		p.running.Wait()
		if p.err != nil {
			return fmt.Errorf("%s did not end cleanly: %w; see %s", p.Name, p.err, p.Log)
		}
		return nil
	case <-deadline.C:
		p.Kill()
		return fmt.Errorf("%s did not end within %s; see %s", p.Name, stopTimeout, p.Log)
	}
}

func (p *Process) hangUp() {
	if p.line != nil {
		_ = p.line.Close() // closing twice or after the other side is fine
	}
}
