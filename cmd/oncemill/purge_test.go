package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

func TestPurgeCommand_DeletesWhatHasExpired(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	env := []string{"ONCEMILL_DATABASE=sqlite:" + path}
	run := func(code int, args ...string) string {
		t.Helper()
		cmd, output := command(t.Context(), env, args...)
		_ = cmd.Run() // the exit code tells
		if got := cmd.ProcessState.ExitCode(); got != code {
			t.Fatalf("%v: exit code %d, want %d; output: %s", args, got, code, output)
		}
		return output.String()
	}
	run(0, "migrate")
	if text := run(0, "purge", "--inbox-retention", "1h"); text != "" {
		t.Errorf("nothing has expired, but: %s", text)
	}
	db := testserver.OpenSQLite(t, path)
	for _, text := range []string{
		`insert into oncemill_idempotency (key_hash, caller, fingerprint, state, owner, fence, endpoint, created_at, completed_at, lease_until, expires_at, forget_at)
			values (x'01', x'', x'', 2, x'', 1, 'POST /', 0, 1, 1, 1, 1)`,
		`insert into oncemill_inbox (consumer, message_id, received_at) values ('stock', 'old', 1), ('stock', 'new', cast(unixepoch('subsec') * 1000000 as integer))`,
		`insert into oncemill_dead_letters (state, source, consumer, topic, message_id, payload, reason, error, fingerprint, closed_at)
			values ('replayed', 'consumer', 'stock', 'orders', 'm', '', 'failed', '', 'f', 1)`,
	} {
		if _, err := db.ExecContext(t.Context(), text); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	text := run(0, "purge")
	for _, want := range []string{"1 idempotency keys", "1 closed dead letters"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in: %s", want, text)
		}
	}
	if strings.Contains(text, "stock") {
		t.Errorf("ids are gone although nobody has named their retention: %s", text)
	}
	if text := run(0, "purge", "--inbox-retention", "1h"); !strings.Contains(text, "1 ids and failure records of stock deleted") {
		t.Errorf("got: %s", text)
	}
	run(2, "purge", "--every", "1ms")
	run(2, "purge", "--inbox-retention", "1s")
	run(2, "purge", "--letter-retention", "1m")

	cmd, output := command(t.Context(), env, "purge", "--every", "1s")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil && cmd.ProcessState.Exited() { // it may not have got so far as to handle it
		t.Errorf("interrupted: %v: %s", err, output)
	}
}
