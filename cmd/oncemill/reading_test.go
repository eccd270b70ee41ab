package main

import (
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A command that only reads ends when its time is over, whatever others have locked.
func TestReads_EndAfterTheirTimeout(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	env := []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema}
	run := runner(t, env)
	run(0, "migrate")
	run(2, "retrying", "--read-timeout", "-1s")
	where, err := database.Resolve(pg.DB, pg.Config)
	if err != nil {
		t.Fatal(err)
	}
	tx, err := pg.DB.BeginTx(t.Context(), &sql.TxOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() //nolint:errcheck // it changed nothing
	if _, err := tx.ExecContext(t.Context(), where.Expand(`lock table {{outbox_history}}, {{outbox}}, {{audit}}, {{dead_letters}}, {{parked}} in access exclusive mode`)); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"history list", "history show 1", "outbox list", "outbox show 1", "audit", "dlq", "dlq groups", "dlq show 1", "retrying"} {
		begin := time.Now()
		out := run(1, append(strings.Fields(command), "--read-timeout", "500ms")...)
		if took := time.Since(begin); took > 10*time.Second || !strings.Contains(out, "--read-timeout") {
			t.Errorf("%s took %v: %s", command, took, out)
		}
	}
}
