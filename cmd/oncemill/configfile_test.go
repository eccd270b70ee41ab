package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A flag overrides its variable, which overrides the file; a command's part of the file overrides
// the rest.
func TestConfigFile_SetsFlags(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	shop, other, file := filepath.Join(dir, "shop.db"), filepath.Join(dir, "other.db"), filepath.Join(dir, "oncemill.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run := func(code int, env []string, args ...string) string {
		t.Helper()
		cmd, output := command(t.Context(), env, args...)
		_ = cmd.Run() // the exit code tells
		if got := cmd.ProcessState.ExitCode(); got != code {
			t.Fatalf("%v: exit code %d, want %d; output: %s", args, got, code, output)
		}
		return output.String()
	}
	exists := func(path string, want bool) {
		t.Helper()
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
	write("database: sqlite:" + shop + "\nlog-format: json\n")
	run(0, nil, "migrate", "--config", file)
	exists(shop, true)
	run(0, []string{"ONCEMILL_CONFIG=" + file, "ONCEMILL_DATABASE=sqlite:" + other}, "migrate")
	exists(other, true)
	run(0, nil, "letters", "--config", file, "--database", "sqlite:"+other)

	write("database: sqlite:" + filepath.Join(dir, "absent.db") + "\nletters:\n  database: sqlite:" + shop + "\n  limit: 5\n  state: [dead, held]\n")
	run(0, nil, "letters", "--config", file)
	run(0, nil, "letters", "list", "--config", file)
	run(2, nil, "status", "--config", file)

	const secret = "hunter2"
	for name, text := range map[string]string{
		"unknown flag":      "databse: " + secret,
		"unknown command":   "leters: {limit: 5}",
		"unknown in a part": "letters: {lease: " + secret + "}",
		"bad value":         "database: sqlite:" + shop + "\nletters: {limit: " + secret + "}",
		"no map":            "- " + secret,
		"config of its own": "config: " + secret,
	} {
		write(text)
		if output := run(2, nil, "letters", "--config", file); !strings.Contains(output, "--config") || strings.Contains(output, secret) {
			t.Errorf("%s: %s", name, output)
		}
	}
	run(2, nil, "letters", "--config", filepath.Join(dir, "absent.yaml"))
	if output := run(0, nil, "version"); !strings.HasPrefix(output, "oncemill ") || !strings.Contains(output, "go1.") {
		t.Errorf("version: %s", output)
	}
}
