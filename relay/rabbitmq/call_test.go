package rabbitmq

import (
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// A slow broker opens the channels of all lanes one after the other, and each lane waits for the
// sum. Nor may a call fail as soon as a broker that has blocked for long goes on.
func TestLink_CallsWaitAsLongAsChannelsAreOpened(t *testing.T) {
	t.Parallel()
	const limit, steps, step = 10 * time.Second, 5, 8 * time.Second
	for name, move := range map[string]func(*link){
		"channels are opened":    func(l *link) { l.openedAt.Store(time.Now().UnixNano()) },
		"the broker was blocked": func(l *link) { l.unblockedAt.Store(time.Now().UnixNano()) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				here, there := net.Pipe()
				defer there.Close() //nolint:errcheck // of a pipe
				l := &link{running: &running{settings: &settings{Config: Config{CallTimeout: limit}}}, net: newBatchConn(here, 0, func() {})}
				go l.net.flush()
				go func() {
					for range steps {
						time.Sleep(step)
						move(l)
					}
				}()
				begin := time.Now()
				err := l.within(func() error { // ends with the connection, without an answer
					_, err := here.Read(make([]byte, 1))
					return err
				})
				if took := time.Since(begin); took != steps*step+limit || !errors.Is(err, errCallTimeout) {
					t.Errorf("%v after %s, want a timeout after %s", err, took, steps*step+limit)
				}
			})
		})
	}
}
