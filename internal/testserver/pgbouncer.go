package testserver

import (
	"net"
	"net/url"
	"sync"
)

// Pooler is a PgBouncer that belongs to one test.
type Pooler struct {
	private

	mu      sync.Mutex
	crashes int
}

// PgBouncer starts a PgBouncer in front of the server, in transaction mode. It is stopped when
// the test ends. Each setting is "name=value" of pgbouncer.ini.
func (s *PostgresServer) PgBouncer(settings ...string) *Pooler {
	s.t.Helper()
	return &Pooler{private: startPrivate(s.t, "pgbouncer", append([]string{"upstream=" + s.dir}, settings...))}
}

// DSN returns the URL of the pooler.
func (p *Pooler) DSN() string { return p.exports[envPgBouncer] }

// Crashes starts the pooler again if it has crashed, and returns the number of crashes.
// Debian 12's PgBouncer 1.18 may crash when a busy client cancels a statement (its issues 801
// and 822).
func (p *Pooler) Crashes() int {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	address, err := url.Parse(p.DSN())
	if err != nil {
		p.t.Fatal("testserver: the URL of the PgBouncer cannot be parsed")
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(p.t.Context(), "tcp", address.Host)
	if err == nil {
		_ = conn.Close() // the answer has been read
		return p.crashes
	}
	p.Start()
	p.crashes++
	return p.crashes
}
