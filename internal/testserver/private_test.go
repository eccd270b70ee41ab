package testserver_test

import (
	"database/sql"
	"net/url"
	"path/filepath"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
)

func TestPrivatePostgres_KeepsCommitsOverCrashAndKill(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t, "wal_level=logical")
	db := server.Open()
	if got := queryText(t, db, "show wal_level"); got != "logical" {
		t.Errorf("wal_level is %s", got)
	}
	execute(t, db, "create table orders (id bigint)")
	for _, end := range []func(){server.Crash, server.Kill, server.Stop} {
		execute(t, db, "insert into orders values (1)")
		end()
		if err := db.PingContext(t.Context()); err == nil {
			t.Error("answers while it should be stopped")
		}
		server.Start()
	}
	if got := queryText(t, db, "select count(*)::text from orders"); got != "3" {
		t.Errorf("%s rows, want 3", got)
	}
}

func TestPrivatePostgres_HasAStandbyThatCanBePromoted(t *testing.T) {
	t.Parallel()
	primary := testserver.PrivatePostgres(t)
	db := primary.Open()
	execute(t, db, "create table orders (id bigint)")
	standby := primary.Standby("hot_standby_feedback=on")
	copied := standby.Open()
	if got := queryText(t, copied, "select pg_is_in_recovery()::text || current_setting('hot_standby_feedback')"); got != "trueon" {
		t.Errorf("the standby says %s", got)
	}
	execute(t, db, "insert into orders values (1)")
	for begin := time.Now(); queryText(t, copied, "select count(*)::text from orders") != "1"; {
		if time.Since(begin) > time.Minute {
			t.Fatal("the standby does not follow")
		}
	}
	primary.Kill()
	execute(t, copied, "select pg_promote()")
	execute(t, copied, "insert into orders values (2)")
	if got := queryText(t, copied, "select count(*)::text from orders"); got != "2" {
		t.Errorf("%s rows, want 2", got)
	}
}

func TestPrivatePostgres_IsDumpedAndLoaded(t *testing.T) {
	t.Parallel()
	server, file := testserver.PrivatePostgres(t), filepath.Join(t.TempDir(), "dump.sql")
	db := server.Open()
	execute(t, db, "create table orders (id bigint)")
	execute(t, db, "insert into orders values (1)")
	server.Dump(file, "--schema-only")
	execute(t, db, "drop table orders")
	server.Load(file)
	if got := queryText(t, db, "select count(*)::text from orders"); got != "0" {
		t.Errorf("%s rows, want none", got)
	}
}

// Other users of the machine reach the port.
func TestPrivatePostgres_RequiresThePassword(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	u, err := url.Parse(server.DSN())
	if err != nil {
		t.Fatal(err)
	}
	for name, user := range map[string]*url.Userinfo{"none": url.User("postgres"), "a wrong one": url.UserPassword("postgres", "x")} {
		u.User = user
		db, err := sql.Open("postgres", u.String())
		if err != nil {
			t.Fatal(err)
		}
		if err := db.PingContext(t.Context()); err == nil {
			t.Errorf("with %s: logged in as the superuser", name)
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}
}

// The pooler looks up a role in the server, and logs in with the client's SCRAM keys.
func TestPgBouncer_AcceptsRolesCreatedLater(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	pooler := server.PgBouncer()
	execute(t, server.Open(), "create role later login superuser password 'postgres'")
	for user, works := range map[*url.Userinfo]bool{
		url.UserPassword("postgres", "postgres"): true, url.UserPassword("later", "postgres"): true,
		url.UserPassword("later", "x"): false, url.User("postgres"): false,
	} {
		u, err := url.Parse(pooler.DSN())
		if err != nil {
			t.Fatal(err)
		}
		u.User = user
		db, err := sql.Open("postgres", u.String()+"&binary_parameters=yes")
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if err := db.PingContext(t.Context()); (err == nil) != works {
				t.Errorf("%s: %v", user, err)
			}
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}
}
