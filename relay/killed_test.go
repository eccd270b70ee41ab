package relay_test

import (
	"database/sql/driver"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
)

// killMyself ends this process as kill -9 does.
func killMyself() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // until the signal is here
}

// crashPoint is a place in the life of a worker process at which it dies: at a
// statement that contains all of Parts.
type crashPoint struct {
	Name  string
	Parts []string
	When  moment
}

type moment string

const (
	before    moment = "before"    // it is sent
	executed  moment = "executed"  // when it has been; outside a transaction that is committed
	committed moment = "committed" // when the transaction is that it was sent in
)

func (p crashPoint) String() string { return p.Name + " " + string(p.When) }

// around is for a tap.
func (p crashPoint) around(c *tapConn, text string, _ []driver.NamedValue) (after func() error) {
	matches := true
	for _, part := range p.Parts {
		matches = matches && strings.Contains(text, part)
	}
	switch {
	case matches && p.When == before:
		killMyself()
	case matches && p.When == committed:
		c.matched = true
	case matches, text == "commit" && c.matched:
		return func() error { killMyself(); return nil }
	}
	return nil
}

// letLeasesExpire is the passing of time after the death of a worker.
func (p testDB) letLeasesExpire(t testing.TB, worker string) {
	t.Helper()
	ago := `now() - interval '1 second'`
	if !p.postgres() {
		ago = `cast(unixepoch('subsec') * 1000000 as integer) - 1000000`
	}
	// In this order: one who is seen for longer than its lease lives on.
	p.execute(t, `update {{relay_workers}} set seen_until = `+ago+` where name = $1`, worker)
	p.execute(t, `update {{relay_leases}} set lease_until = `+ago+` where owner in (select owner from {{relay_workers}} where name = $1)`, worker)
}

// leasesOf counts the lanes of a worker that nobody has taken over.
func (p testDB) leasesOf(t testing.TB, worker string) int {
	t.Helper()
	return p.count(t, `select count(*) from {{relay_leases}} l join {{relay_workers}} w on w.owner = l.owner where w.name = $1`, worker)
}

// toggle makes the sink lose its broker, or find it again, at each SIGUSR1.
func (s *remoteSink) toggle() (end func()) {
	signals, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		defer close(done)
		for range signals {
			s.away.Store(!s.away.Load())
		}
	}()
	return func() {
		signal.Stop(signals)
		close(signals)
		<-done
	}
}

func (s *remoteSink) Ready() bool { return !s.away.Load() }
