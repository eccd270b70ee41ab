package rabbitmq

import (
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A slow broker opens the channels of all lanes one after the other, and each lane waits for the
// sum. So do declarations that a TopologyBuilder serializes. Nor may a call fail as soon as a broker
// that has blocked for long goes on.
func TestLink_CallsWaitAsLongAsOthersAreGranted(t *testing.T) {
	t.Parallel()
	const limit, steps, step = 10 * time.Second, 5, 8 * time.Second
	granted := func(l *link) { _ = l.within(1, func() error { return nil }) }
	for name, c := range map[string]struct {
		move  func(*link)
		among int
		want  time.Duration
	}{
		"others are granted": {granted, steps, steps*step + limit},
		"more than can wait": {granted, 2, 3*step + 2*time.Second},
		"others are refused": {func(l *link) { _ = l.within(1, func() error { return amqp.ErrClosed }) }, steps, limit},
		"both, one after the other": {func(l *link) {
			if l.unblockedAt.Load() == 0 {
				l.unblockedAt.Store(time.Now().UnixNano())
			}
			granted(l)
		}, 2, 4*step + 2*time.Second},
		"the broker was blocked": {func(l *link) { l.unblockedAt.Store(time.Now().UnixNano()) }, 1, steps*step + limit},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				here, there := net.Pipe()
				defer there.Close() //nolint:errcheck // of a pipe
				l := &link{running: &running{settings: &settings{Config: Config{CallTimeout: limit}}}, net: newBatchConn(here, 0, func() {})}
				go l.net.flush()
				moved := make(chan struct{})
				go func() {
					defer close(moved)
					for range steps {
						time.Sleep(step)
						c.move(l)
					}
				}()
				defer func() { <-moved }()
				begin := time.Now()
				err := l.within(c.among, func() error { // ends with the connection, without an answer
					_, err := here.Read(make([]byte, 1))
					return err
				})
				if took := time.Since(begin); took != c.want || !errors.Is(err, errCallTimeout) {
					t.Errorf("%v after %s, want a timeout after %s", err, took, c.want)
				}
			})
		})
	}
}
