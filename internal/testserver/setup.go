package testserver

import (
	"database/sql"
	"database/sql/driver"
	"hash/fnv"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/lib/pq"
)

// The suites of this module run with lib/pq, without a pooler and without a limit of
// connections. internal/e2e runs them again in other setups, given by these variables.
const (
	envDriver    = "ONCEMILL_TEST_DRIVER"         // pgx, which internal/e2e links in
	envPgBouncer = "ONCEMILL_TEST_PGBOUNCER"      // URL of a PgBouncer in front of ONCEMILL_TEST_POSTGRES
	envMaxConns  = "ONCEMILL_TEST_MAX_OPEN_CONNS" // of each pool that the library gets
)

// DriverName returns the name of the database/sql driver for PostgreSQL.
func DriverName() string {
	if name := os.Getenv(envDriver); name != "" {
		return name
	}
	return "postgres"
}

// Driver returns the database/sql driver for PostgreSQL.
func Driver() driver.Driver {
	db, err := sql.Open(DriverName(), "")
	if err != nil {
		panic(err) // a driver that is not linked in
	}
	defer db.Close() //nolint:errcheck // no connection was opened
	return db.Driver()
}

func behindPgBouncer() bool { return os.Getenv(envPgBouncer) != "" }

// MaxOpenConns is the limit of connections of the library's pools in this setup; 0: no limit.
func MaxOpenConns() int {
	most, err := strconv.Atoi(os.Getenv(envMaxConns))
	if err != nil {
		return 0
	}
	return most
}

// Pool returns the pool that a test gives to the library: db, or in a setup with a limit of
// connections a limited pool from open. The test itself needs more connections.
func Pool(db *sql.DB, open func() *sql.DB) *sql.DB {
	if MaxOpenConns() == 0 {
		return db
	}
	limited := open()
	limited.SetMaxOpenConns(MaxOpenConns())
	return limited
}

// forDriver converts a URL with lib/pq's parameters for the driver in use. Through a pooler a
// statement must be one round trip, which lib/pq and pgx each have a parameter for.
func forDriver(t testing.TB, dsn string) string {
	t.Helper()
	pooled := behindPgBouncer()
	switch {
	case DriverName() != "pgx" && pooled:
		return withParams(t, dsn, "binary_parameters=yes")
	case DriverName() != "pgx":
		return dsn
	}
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatalf("testserver: the URL of the PostgreSQL cannot be parsed")
	}
	query := u.Query()
	query.Del("binary_parameters")
	if pooled {
		query.Set("default_query_exec_mode", "exec")
	}
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20")
	return u.String()
}

// passed are the parameters that PgBouncer accepts, or that the driver does not send.
var passed = []string{"application_name", "timezone", "binary_parameters"}

// dsn returns the URL of the server with the schema of the test and parameters. PgBouncer
// passes on few of them, so there each set of the others becomes a role.
func (pg PG) dsn(t testing.TB, params ...string) string {
	t.Helper()
	params = append([]string{"search_path=" + pg.Schema, "application_name=oncemill_test"}, params...)
	pooler := os.Getenv(envPgBouncer)
	if pooler == "" {
		return withParams(t, pg.server, params...)
	}
	var settings []string
	params = slices.DeleteFunc(params, func(param string) bool {
		name, _, _ := strings.Cut(param, "=")
		if slices.Contains(passed, name) {
			return false
		}
		settings = append(settings, param)
		return true
	})
	u, err := url.Parse(pooler)
	if err != nil {
		t.Fatalf("testserver: the URL of the PgBouncer cannot be parsed")
	}
	u.User = url.UserPassword(pg.role(t, settings), "postgres")
	return withParams(t, u.String(), params...)
}

// dropRoles removes the roles of a dropped schema, and the pooler's connections for them.
const dropRoles = `do $$ declare name text; begin
	for name in select rolname from pg_roles where starts_with(rolname, 'SCHEMA_') loop
		perform pg_terminate_backend(pid) from pg_stat_activity where usename = name;
		execute 'drop role ' || name;
	end loop;
end $$`

// role creates the role with these settings if it does not exist.
func (pg PG) role(t testing.TB, settings []string) string {
	t.Helper()
	hash := fnv.New32a()
	hash.Write([]byte(strings.Join(settings, "\n")))
	name := pg.Schema + "_" + strconv.FormatUint(uint64(hash.Sum32()), 36)
	text := "do $$ begin create role " + name + " superuser login password 'postgres';"
	for _, setting := range settings {
		parameter, value, _ := strings.Cut(setting, "=")
		text += " alter role " + name + " set " + parameter + " to " + pq.QuoteLiteral(value) + ";"
	}
	text += " exception when duplicate_object then null; end $$"
	if err := upkeep.exec(t.Context(), pg.server, text); err != nil {
		t.Fatalf("testserver: %v", err)
	}
	return name
}
