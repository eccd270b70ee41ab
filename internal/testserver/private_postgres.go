package testserver

import (
	"database/sql"
	"testing"
)

// PostgresServer is a PostgreSQL that belongs to one test. Its methods may be
// called from any goroutine; a failure fails the test.
type PostgresServer struct{ private }

// PrivatePostgres makes a cluster for t and removes it when t ends. Each
// setting is "name=value" of postgresql.conf.
func PrivatePostgres(t testing.TB, settings ...string) *PostgresServer {
	t.Helper()
	return &PostgresServer{startPrivate(t, "postgres", settings)}
}

// DSN returns the URL of the server, without parameters that only lib/pq knows.
func (s *PostgresServer) DSN() string { return s.exports[envPostgres] }

// Open returns a pool (lib/pq) that is closed when the test ends. Each
// parameter is "name=value" of the connection.
func (s *PostgresServer) Open(params ...string) *sql.DB {
	s.t.Helper()
	return openPostgres(s.t, s.DSN(), params...)
}

// Crash shuts the server down at once, without a checkpoint: the next start
// recovers from the log.
func (s *PostgresServer) Crash() {
	s.t.Helper()
	s.run("crash", s.dir)
}
