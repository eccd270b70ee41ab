package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// A flag without a value, such as --consumer "$CONSUMER" where nothing has set the variable,
// selects nothing: a command that took it for no filter would act on everything.
func TestCommands_AFlagWithoutAValueIsWrongUsage(t *testing.T) {
	t.Parallel()
	env := []string{"ONCEMILL_DATABASE=sqlite:" + filepath.Join(t.TempDir(), "shop.db")}
	run := runner(t, env)
	run(0, "migrate")
	refused := func(name string, args ...string) {
		t.Helper()
		if out := run(2, append(args, "--"+name, "")...); !strings.Contains(out, "--"+name+" is empty") {
			t.Errorf("%v: %s", args, out)
		}
	}
	for _, name := range filterNames {
		refused(name, "dlq", "replay", "--detach", "--reason", "x")
		refused(name, "dlq", "export")
	}
	for _, name := range []string{"topic", "key"} {
		refused(name, "history", "resend", "--from", "1h")
	}
	refused("key", "retry", "--topic", "orders")
	refused("payload", "dlq", "edit", "1", "--set", "currency=USD", "--reason", "x")
	refused("archive-dir", "purge")
	unset := runner(t, append([]string{"ONCEMILL_CONSUMER=", "ONCEMILL_ARCHIVE_DIR="}, env...))
	unset(2, "dlq", "replay", "--detach", "--reason", "x")
	unset(2, "purge")
	if out := run(0, "jobs", "--json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("jobs were started: %s", out)
	}
}
