package main

import (
	"context"
	"database/sql"
	"net"
	"path/filepath"
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
	ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait/2)
	defer cancel()
	run := func(code int, args ...string) string {
		t.Helper()
		cmd, output := command(ctx, env, args...)
		_ = cmd.Run() // the exit code tells
		if got := cmd.ProcessState.ExitCode(); got != code {
			t.Fatalf("%v: exit code %d, want %d; output: %s", args, got, code, output)
		}
		return output.String()
	}
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
	if _, err := tx.ExecContext(t.Context(), where.Expand(`lock table {{outbox_history}}, {{outbox}}, {{audit}}, {{dead_letters}}, {{parked}}, {{dead_letter_jobs}}, {{pauses}}, {{idempotency}} in access exclusive mode`)); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{
		"history list", "history show 1", "outbox list", "outbox show 1", "audit", "dlq", "dlq groups", "dlq show 1", "retrying", "jobs", "jobs show 1",
		"dlq replay --all --dry-run", "history resend --from 1h --dry-run", "jobs watch 1", "outbox", "history", "pause list", "keys", "keys list --state completed", "keys show 0a0000000000",
	} {
		begin := time.Now()
		out := run(1, append(strings.Fields(command), "--read-timeout", "500ms")...)
		if took := time.Since(begin); took > 10*time.Second || !strings.Contains(out, "--read-timeout") {
			t.Errorf("%s took %v: %s", command, took, out)
		}
	}
}

// So it does where the server is silent from the first.
func TestReads_EndWhereTheServerIsSilent(t *testing.T) {
	t.Parallel()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close() //nolint:errcheck // nothing was sent
	run := runner(t, []string{"ONCEMILL_DATABASE=postgres://a:b@" + server.Addr().String() + "/x?sslmode=disable"})
	for _, command := range []string{"history list", "history resend --from 1h --dry-run", "dlq replay --all --dry-run", "keys", "workers"} {
		if out := run(1, append(strings.Fields(command), "--read-timeout", "500ms")...); !strings.Contains(out, "--read-timeout") {
			t.Errorf("%s: %s", command, out)
		}
	}
}

// So does an act, which has not begun then.
func TestActs_EndWhereTheServerIsSilent(t *testing.T) {
	t.Parallel()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close() //nolint:errcheck // nothing was sent
	env := []string{"ONCEMILL_DATABASE=postgres://a:b@" + server.Addr().String() + "/x?sslmode=disable"}
	ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait/2)
	defer cancel()
	for _, args := range []string{
		"keys settle 0a0000000000 --failed --reason r", "keys release 0a0000000000 --reason r", "pause topic orders --reason r", "resume topic orders",
		"retry --all", "release lane 3 --reason r", "dlq discard 1 --reason r", "dlq replay 1", "jobs cancel 1 --reason r", "history resend --from 1h",
		"repair-sequence", "migrate", "migrate down --set outbox --yes",
	} {
		cmd, output := command(ctx, env, append(strings.Fields(args), "--read-timeout", "500ms")...)
		_ = cmd.Run() // the exit code tells
		if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(output.String(), "--read-timeout") {
			t.Fatalf("%s: exit code %d: %s", args, code, output)
		}
	}
}

// A list without lines is an empty list in JSON, for scripts that go through it.
func TestLists_AreEmptyArraysInJSON(t *testing.T) {
	t.Parallel()
	run := runner(t, []string{"ONCEMILL_DATABASE=sqlite:" + filepath.Join(t.TempDir(), "shop.db")})
	run(0, "migrate")
	for _, command := range []string{"audit", "dlq", "dlq groups", "history", "history list", "inbox", "inbox list", "jobs", "jobs list", "outbox", "outbox list", "pause list", "retrying", "workers"} {
		if out := run(0, append(strings.Fields(command), "--json")...); out != "[]\n" {
			t.Errorf("%s: %s", command, out)
		}
	}
	if out := run(0, "keys", "--json"); out != "{\"Keys\":[]}\n" {
		t.Errorf("keys: %s", out)
	}
}
