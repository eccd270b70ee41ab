package testserver_test

import (
	"testing"

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
