package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// process is a part of the shop that runs as a process: this executable with a job. Its
// standard output has a line for each thing that the parent has to know, its log goes to a
// file, and it stops when its standard input ends.
type process struct {
	name  string
	roles []string
	ends  []end // how its lives end; after the last end it lives on

	log   string // the file
	cmd   *exec.Cmd
	stdin io.Closer
	said  chan string
	ended chan struct{} // closed when the process has ended
	err   error         // how it ended; read after ended is closed
}

// end is how a life of a process ends: by SIGKILL, at a stage or at a time.
type end struct {
	stage string  // where the process pauses to be killed; "" for anywhere
	after float64 // share of the orders whose messages pass the stage before, in this life

	taken  float64 // share of the orders that the API has taken before
	booked float64 // share of the orders that the inventory has booked before
}

const (
	startTimeout = 2 * time.Minute
	stopTimeout  = time.Minute
	linesPerLife = 2 // ready, paused
)

// start starts the process and returns its address, if it has one, when it is ready.
func (p *process) start(ctx context.Context, j job) (address string, err error) {
	if err := p.spawn(j); err != nil {
		return "", fmt.Errorf("start %s: %w", p.name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return p.hear(ctx, "ready")
}

func (p *process) spawn(j job) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	text, err := json.Marshal(j)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }() // the child has its own copy
	cmd := exec.Command(self)                              // not CommandContext: this file decides who ends it and how
	cmd.Env, cmd.Stderr = append(os.Environ(), jobVariable+"="+string(text)), log
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd, p.stdin = cmd, stdin
	p.said, p.ended = make(chan string, linesPerLife), make(chan struct{})
	go p.listen(stdout) // kill and stop wait for its end
	return nil
}

func (p *process) listen(stdout io.Reader) {
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		p.said <- lines.Text()
	}
	p.err = p.cmd.Wait()
	close(p.ended)
}

// hear waits until the process prints word and returns the rest of the line.
func (p *process) hear(ctx context.Context, word string) (string, error) {
	select {
	case line := <-p.said:
		rest, ok := strings.CutPrefix(line, word+" ")
		if !ok {
			return "", fmt.Errorf("%s printed %q instead of %s", p.name, line, word)
		}
		return rest, nil
	case <-p.ended:
		return "", p.unexpected()
	case <-ctx.Done():
		return "", fmt.Errorf("wait until %s is %s: %w; see %s", p.name, word, ctx.Err(), p.log)
	}
}

// alive returns an error if the process has ended.
func (p *process) alive() error {
	select {
	case <-p.ended:
		return p.unexpected()
	default:
		return nil
	}
}

func (p *process) unexpected() error {
	return fmt.Errorf("%s ended by itself: %w; see %s", p.name, p.err, p.log)
}

// kill sends SIGKILL and waits until the process has ended. It does nothing if it has ended
// already.
func (p *process) kill() {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Kill() // its only error means that the process has ended
	<-p.ended
}

// stop asks the process to end and reports how it did.
func (p *process) stop() error {
	_ = p.stdin.Close() // fails only if the process has ended
	select {
	case <-p.ended:
		if p.err != nil {
			return fmt.Errorf("%s did not end cleanly: %w; see %s", p.name, p.err, p.log)
		}
		return nil
	case <-time.After(stopTimeout):
		p.kill()
		return fmt.Errorf("%s did not end within %s; see %s", p.name, stopTimeout, p.log)
	}
}
