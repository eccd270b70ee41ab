// Package testserver gives a test the databases and brokers that it needs: the
// shared PostgreSQL and RabbitMQ with a schema or a virtual host of the test's
// own, an SQLite file, or a private server for tests that stop, kill, fill or
// reconfigure one.
//
//	pg := testserver.Postgres(t)
//	err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, outbox.Migrations)
//
// A server that is missing is started by scripts/servers.sh, once per process;
// a test is never skipped because of one. Everything that a test was given is
// removed when the test ends, also when its process was killed in the case of
// private servers.
package testserver
