package testserver

import (
	"database/sql"
	"net/url"
	"testing"
)

// PostgresServer is a PostgreSQL server for one test. Its methods may be called from any
// goroutine. A failure fails the test.
type PostgresServer struct{ private }

// PrivatePostgres creates a server for t and removes it when t ends. Each
// setting is "name=value" of postgresql.conf.
func PrivatePostgres(t testing.TB, settings ...string) *PostgresServer {
	t.Helper()
	return &PostgresServer{startPrivate(t, "postgres", settings)}
}

// Standby creates an asynchronous hot standby of s, and removes it when the test ends. Promote
// it with "select pg_promote()". Each setting is "name=value"; the others are those of s.
func (s *PostgresServer) Standby(settings ...string) *PostgresServer {
	s.t.Helper()
	return &PostgresServer{startPrivate(s.t, "postgres", append([]string{"--standby-of", s.dir}, settings...))}
}

// Dump writes the output of pg_dump, with options, to a file.
func (s *PostgresServer) Dump(file string, options ...string) {
	s.t.Helper()
	s.run(append([]string{"dump", s.dir, file}, options...)...)
}

// Load executes a file of SQL, for example one of Dump, with psql.
func (s *PostgresServer) Load(file string) {
	s.t.Helper()
	s.run("load", s.dir, file)
}

// DSN returns the URL of the server, without parameters that only one driver knows.
func (s *PostgresServer) DSN() string { return s.exports[envPostgres] }

// Open returns a pool that is closed when the test ends. Each parameter is
// "name=value" of the connection.
func (s *PostgresServer) Open(params ...string) *sql.DB {
	s.t.Helper()
	return open(s.t, forDriver(s.t, withParams(s.t, s.DSN(), append([]string{"binary_parameters=yes"}, params...)...)))
}

// OpenAs returns a pool of a role with the password "postgres" on a database. It is
// closed when the test ends.
func (s *PostgresServer) OpenAs(role, database string, params ...string) *sql.DB {
	s.t.Helper()
	u, err := url.Parse(s.DSN())
	if err != nil {
		s.t.Fatalf("testserver: the URL of the PostgreSQL cannot be parsed")
	}
	u.User, u.Path = url.UserPassword(role, "postgres"), "/"+database
	return open(s.t, forDriver(s.t, withParams(s.t, u.String(), append([]string{"binary_parameters=yes"}, params...)...)))
}

// Crash shuts the server down at once, without a checkpoint: the next start
// recovers from the log.
func (s *PostgresServer) Crash() {
	s.t.Helper()
	s.run("crash", s.dir)
}
