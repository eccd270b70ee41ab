package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// An act that finds nothing to act on fails, so that a script notices a wrong name, window or secret.
func TestCommands_AnActThatFindsNothingFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "shop.db")
	run := runner(t, []string{"ONCEMILL_DATABASE=sqlite:" + path})
	run(0, "migrate")
	secret, empty := filepath.Join(dir, "secret"), filepath.Join(dir, "empty")
	for name, content := range map[string]string{secret: strings.Repeat("another", 10), empty: ""} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for command, want := range map[string]string{
		"keys erase --yes --tenant acme --principal 4711 --secret-file " + secret: "nothing is stored of this caller",
		"keys settle 0a0000000000 --failed":                                       "no such key",
		"keys release 0a0000000000 --yes":                                         "no such key",
		"dlq replay 17":                                                           "17: not found",
		"dlq discard 17":                                                          "17: not found",
		"dlq undo 17":                                                             "17: not found",
		"dlq edit 17 --payload " + empty:                                          "17: not found",
		"dlq import " + empty:                                                     "the file has no dead letters",
		"jobs pause 17":                                                           "not found",
		"jobs resume 17":                                                          "not found",
		"jobs cancel 17":                                                          "not found",
		"resume topic orders":                                                     "is not paused",
		"history resend --from 1h":                                                "nothing was sent again",
	} {
		args := strings.Fields(command)
		if args[1] != "resend" {
			args = append(args, "--reason", "x")
		}
		if out := run(1, args...); !strings.Contains(out, want) {
			t.Errorf("%s: %s", command, out)
		}
	}
	if out := run(1, "dlq", "note", "17", "a note"); !strings.Contains(out, "not found") {
		t.Errorf("a note: %s", out)
	}
	if out := run(0, "history", "resend", "--from", "1h", "--dry-run"); !strings.Contains(out, "0 messages") {
		t.Errorf("a dry run: %s", out)
	}
}

// A job that finds no dead letters fails where somebody follows it.
func TestReplayCommand_AJobWithoutDeadLettersFails(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	env := []string{"ONCEMILL_DATABASE=sqlite:" + path}
	runner(t, env)(0, "migrate")
	jobs, err := dlq.NewRunner(testserver.OpenSQLite(t, path), dlq.RunnerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	testserver.Run(t, jobs.Run)
	if out := runner(t, env)(1, "dlq", "replay", "--topic", "ordres", "--reason", "x"); !strings.Contains(out, "no dead letter matches") {
		t.Error(out)
	}
}
