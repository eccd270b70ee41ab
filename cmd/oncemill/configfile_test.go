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
	run(0, nil, "dlq", "--config", file, "--database", "sqlite:"+other)

	write("database: sqlite:" + filepath.Join(dir, "absent.db") + "\ndlq:\n  database: sqlite:" + shop + "\n  limit: 5\n  state: [dead, held]\n")
	run(0, nil, "dlq", "--config", file)
	run(0, nil, "dlq", "list", "--config", file)
	run(2, nil, "status", "--config", file)

	for name, text := range map[string]string{
		"empty file":         "",
		"comments alone":     "# database: x\n",
		"empty document":     "---\n",
		"empty section":      "dlq:\n",
		"section of another": "relay: {lease: 15s}",
	} {
		write(text)
		if output := run(0, []string{"ONCEMILL_DATABASE=sqlite:" + shop}, "dlq", "--config", file); strings.Contains(output, "--config") {
			t.Errorf("%s: %s", name, output)
		}
	}

	const secret = "hunter2"
	for name, c := range map[string]struct{ text, want string }{
		"unknown flag":      {"databse: " + secret, "no flag or command is named databse"},
		"unknown command":   {"leters: {limit: 5}", "no flag or command is named leters"},
		"unknown in a part": {"dlq: {lease: " + secret + "}", "named dlq.lease"},
		"bad value":         {"dlq: {limit: " + secret + "}", "invalid value for limit (int)"},
		"no map":            {"- " + secret, "is not a YAML map"},
		"no YAML":           {"database: {" + secret, "is not a YAML map"},
		"config of its own": {"config: " + secret, "named config"},
		"empty value":       {"topic:\ndlq: {limit: 5}", "topic has no value"},
		"null":              {"dlq: {topic: ~}", "dlq.topic has no value"},
		"empty list":        {"dlq: {state: []}", "dlq.state has no value"},
		"empty in a list":   {"dlq: {state: [dead, ]}\ntopic: [~]", "topic has no value"},
		"map for a flag":    {"dlq: {topic: {a: " + secret + "}}", "dlq.topic is a flag"},
		"list in a list":    {"dlq: {state: [[" + secret + "]]}", "dlq.state is a flag"},
		"list for one":      {"dlq: {limit: [5, 6]}", "limit takes one value"},
		"value for command": {"dlq: " + secret, "dlq is a command"},
		"list for command":  {"dlq: [" + secret + "]", "dlq is a command"},
		"second document":   {"dlq: {limit: 5}\n---\ndlq: {limit: 6}\n", "more than one YAML document"},
		"broken second":     {"dlq: {limit: 5}\n---\n{" + secret, "more than one YAML document"},
		"twice":             {"dlq: {limit: 5}\ndlq: {topic: " + secret + "}", "twice"},
		"twice in a part":   {"dlq: {topic: a, topic: " + secret + "}", "twice"},
	} {
		write(c.text)
		output := run(2, []string{"ONCEMILL_DATABASE=sqlite:" + shop}, "dlq", "--config", file)
		if !strings.Contains(output, "--config") || !strings.Contains(output, c.want) || strings.Contains(output, secret) {
			t.Errorf("%s: want %q: %s", name, c.want, output)
		}
	}
	run(2, nil, "dlq", "--config", filepath.Join(dir, "absent.yaml"))
	if output := run(0, nil, "version"); !strings.HasPrefix(output, "oncemill ") || !strings.Contains(output, "go1.") {
		t.Errorf("version: %s", output)
	}
}

// YAML would make numbers and times of some values, and write them in another way.
func TestConfigFile_PassesValuesAsWritten(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]map[string]string{
		"topic: 0123":                        {"topic": "0123"},
		"topic: 1_000":                       {"topic": "1_000"},
		"topic: 2026-01-02":                  {"topic": "2026-01-02"},
		"topic: 1e3":                         {"topic": "1e3"},
		"topic: yes":                         {"topic": "yes"},
		`topic: "null"`:                      {"topic": "null"},
		`topic: ""`:                          {"topic": ""},
		"limit: 1_000":                       {"limit": "1000"},
		"dlq: {state: [dead, 0x10]}":         {"state": "[dead,0x10]"},
		"state: dead,held":                   {"state": "[dead,held]"},
		"topic: a\ndlq: {topic: 0b1}":        {"topic": "0b1"},
		"key: &k 007\ndlq: {topic: *k}":      {"key": "007", "topic": "007"},
		"key: a\ndlq: {list: {key: 1.50}}":   {"key": "1.50"},
		"probe:\ndlq: {list: , topic: 1:30}": {"topic": "1:30"},
	} {
		file := filepath.Join(t.TempDir(), "oncemill.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd, _, err := newRoot().Find([]string{"dlq", "list"})
		if err == nil {
			err = cmd.ParseFlags(nil)
		}
		if err == nil {
			err = fromFile(cmd, file)
		}
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		for name, value := range want {
			if f := cmd.Flag(name); !f.Changed || f.Value.String() != value {
				t.Errorf("%s: %s is %q, want %q", text, name, f.Value, value)
			}
		}
	}
}
