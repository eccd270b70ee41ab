// Package testserver provides databases and brokers for tests: the shared PostgreSQL and
// RabbitMQ, with a schema or a virtual host for each test; a SQLite file; or a private server
// for tests that stop, kill, fill or reconfigure it.
//
//	pg := testserver.Postgres(t)
//	err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, outbox.Migrations)
//
// scripts/servers.sh starts missing servers, once per process. No test is skipped because a
// server is missing. Everything is removed when the test ends. Private servers are removed
// even if the process was killed.
package testserver
