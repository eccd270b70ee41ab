package verify

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/sleep"
)

// process is this executable as a worker, started again whenever it ends.
type process struct {
	job     job
	args    []string // that make the executable a worker
	log     string   // the file
	outcome func(command, problem string)

	mu      sync.Mutex
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	ready   bool   // this life works
	once    bool   // a life has worked
	hurt    bool   // this life was ended by a fault
	address string // of a service
	failed  int    // lives that ended by themselves, or could not stop cleanly
}

const (
	stopTimeout = 40 * time.Second
	restartWait = 200 * time.Millisecond

	// falseStarts is how many lives in a row may end by themselves before they work.
	falseStarts = 3
)

// supervise keeps the process running until ctx ends, and then stops it.
func (p *process) supervise(ctx context.Context) error {
	for starts := 0; ; {
		ended, err := p.start()
		if err != nil {
			return fmt.Errorf("start %s: %w", p.job.Name, err)
		}
		select {
		case err = <-ended:
		case <-ctx.Done():
			p.stop(ended)
			return nil
		}
		p.mu.Lock()
		worked, hurt := p.ready, p.hurt
		if !hurt {
			p.failed++
		}
		p.ready, p.address = false, ""
		p.mu.Unlock()
		if starts++; worked || hurt {
			starts = 0
		}
		if starts == falseStarts {
			return fmt.Errorf("%s does not start (%w): %s", p.job.Name, err, p.lastWords())
		}
		if !sleep.For(ctx, restartWait) {
			return nil
		}
	}
}

func (p *process) start() (<-chan error, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	task, err := json.Marshal(p.job) // not in an argument, which others could read: it has passwords
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()                    //nolint:errcheck // the process has its own copy
	cmd := exec.Command(self, p.args...) //nolint:gosec // this program; supervise decides who ends it and how
	cmd.Stderr = log
	stdin, inErr := cmd.StdinPipe()
	stdout, outErr := cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p.cmd, p.stdin, p.hurt = cmd, stdin, false
	_, _ = stdin.Write(append(task, '\n')) // an error means that it has ended
	ended := make(chan error, 1)
	go func() { // ends with the process
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			p.hear(lines.Text())
		}
		ended <- cmd.Wait()
	}()
	return ended, nil
}

// hear takes a line that the process has written.
func (p *process) hear(line string) {
	var address, command, problem string
	if n, _ := fmt.Sscanf(line, "ready %s", &address); n == 1 {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.ready, p.once, p.address = true, true, address
		return
	}
	if n, _ := fmt.Sscanf(line, "done %q", &command); n == 1 {
		p.outcome(command, "")
	} else if n, _ := fmt.Sscanf(line, "failed %q %q", &command, &problem); n == 2 {
		p.outcome(command, problem)
	}
}

// stop asks the process to end, and waits.
func (p *process) stop(ended <-chan error) {
	p.tell(commandStop)
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	var err error
	select {
	case err = <-ended:
	case <-timer.C:
		p.mu.Lock()
		handle := p.cmd.Process
		p.mu.Unlock()
		_ = handle.Kill() // an error means that it has ended
		err = <-ended
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil && !p.hurt {
		p.failed++
	}
}

// tell gives a command to the process.
func (p *process) tell(command string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = io.WriteString(p.stdin, command+"\n") // an error means that it has ended
}

// signal sends a signal to this life of the process, and returns a function that sends another
// to the same life. ends says that it ends the life.
func (p *process) signal(s os.Signal, ends bool) (later func(os.Signal), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hurt = p.hurt || ends
	handle := p.cmd.Process
	err = handle.Signal(s)
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	return func(s os.Signal) { _ = handle.Signal(s) }, err // an error means that it has ended
}

func (p *process) isReady() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ready
}

func (p *process) hasWorked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.once
}

func (p *process) at() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.address
}

func (p *process) failures() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

// lastWords returns the last line of the log.
func (p *process) lastWords() (last string) {
	file, err := os.Open(p.log)
	if err != nil {
		return err.Error()
	}
	defer file.Close() //nolint:errcheck // it was only read
	for lines := bufio.NewScanner(file); lines.Scan(); {
		last = lines.Text()
	}
	return last
}
