package demo

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Stages at which a parent can have a worker stand still, to kill it there.
const (
	// StageRelay is after the broker's confirmation, before the relay learns of
	// it: the message is on the wire and still owed.
	StageRelay = "relay"

	// StageConsumer is after the commit of the effect, before the
	// acknowledgement: the broker will deliver the message again.
	StageConsumer = "consumer"

	stages = 2 // that there are
)

// Worker is a started process's line to the parent that started it.
type Worker struct {
	conn net.Conn

	mu    sync.Mutex // guards armed, held and writes to conn
	armed map[string]bool
	held  map[string]bool
}

// Dial connects to the parent, whose address came by the command line.
func Dial(ctx context.Context, parent string) (*Worker, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", parent)
	if err != nil {
		return nil, fmt.Errorf("call the parent: %w", err)
	}
	return &Worker{conn: conn, armed: map[string]bool{}, held: map[string]bool{}}, nil
}

// Run runs work until it returns, ctx ends, or the parent hangs up, which is its
// word to stop.
func (w *Worker) Run(ctx context.Context, work func(context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer stop()
		return w.listen(ctx)
	})
	group.Go(func() error {
		defer stop()
		return work(ctx)
	})
	return group.Wait()
}

func (w *Worker) listen(ctx context.Context) error {
	hangUp := context.AfterFunc(ctx, func() { _ = w.conn.Close() }) // unblocks the Scan below
	defer hangUp()
	lines := bufio.NewScanner(w.conn)
	for lines.Scan() {
		stage, ok := strings.CutPrefix(lines.Text(), "hold ")
		if !ok {
			return fmt.Errorf("the parent said %q", lines.Text())
		}
		if err := w.arm(stage); err != nil {
			return err
		}
	}
	return nil
}

// Ready tells the parent that the process does its work, at address if it is one
// that can be called.
func (w *Worker) Ready(address string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.say("ready " + address)
}

func (w *Worker) arm(stage string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.armed[stage] = true
	return w.say("armed " + stage)
}

// say must be called with mu locked.
func (w *Worker) say(line string) error {
	if _, err := fmt.Fprintln(w.conn, line); err != nil {
		return fmt.Errorf("tell the parent: %w", err)
	}
	return nil
}

// stand reports whether the caller has to stand still at stage with message id.
// The first to do so is reported to the parent.
func (w *Worker) stand(stage, id string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.armed[stage] {
		return false
	}
	if !w.held[stage] {
		// A parent that has gone kills nobody; Run ends and so does the process.
		w.held[stage] = w.say("held "+id) == nil
	}
	return true
}
