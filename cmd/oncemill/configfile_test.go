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

	for name, text := range map[string]string{
		"empty file":         "",
		"comments alone":     "# database: x\n",
		"empty document":     "---\n",
		"empty section":      "letters:\n",
		"section of another": "relay: {lease: 15s}",
	} {
		write(text)
		if output := run(0, []string{"ONCEMILL_DATABASE=sqlite:" + shop}, "letters", "--config", file); strings.Contains(output, "--config") {
			t.Errorf("%s: %s", name, output)
		}
	}

	const secret = "hunter2"
	for name, c := range map[string]struct{ text, want string }{
		"unknown flag":      {"databse: " + secret, "no flag or command is named databse"},
		"unknown command":   {"leters: {limit: 5}", "no flag or command is named leters"},
		"unknown in a part": {"letters: {lease: " + secret + "}", "named letters.lease"},
		"bad value":         {"letters: {limit: " + secret + "}", "invalid value for limit (int)"},
		"no map":            {"- " + secret, "is not a YAML map"},
		"no YAML":           {"database: {" + secret, "is not a YAML map"},
		"config of its own": {"config: " + secret, "named config"},
		"empty value":       {"topic:\nletters: {limit: 5}", "topic has no value"},
		"null":              {"letters: {topic: ~}", "letters.topic has no value"},
		"empty list":        {"letters: {state: []}", "letters.state has no value"},
		"empty in a list":   {"letters: {state: [dead, ]}\ntopic: [~]", "topic has no value"},
		"map for a flag":    {"letters: {topic: {a: " + secret + "}}", "letters.topic is a flag"},
		"list in a list":    {"letters: {state: [[" + secret + "]]}", "letters.state is a flag"},
		"list for one":      {"letters: {limit: [5, 6]}", "limit takes one value"},
		"value for command": {"letters: " + secret, "letters is a command"},
		"list for command":  {"letters: [" + secret + "]", "letters is a command"},
		"second document":   {"letters: {limit: 5}\n---\nletters: {limit: 6}\n", "more than one YAML document"},
		"broken second":     {"letters: {limit: 5}\n---\n{" + secret, "more than one YAML document"},
		"twice":             {"letters: {limit: 5}\nletters: {topic: " + secret + "}", "twice"},
		"twice in a part":   {"letters: {topic: a, topic: " + secret + "}", "twice"},
	} {
		write(c.text)
		output := run(2, []string{"ONCEMILL_DATABASE=sqlite:" + shop}, "letters", "--config", file)
		if !strings.Contains(output, "--config") || !strings.Contains(output, c.want) || strings.Contains(output, secret) {
			t.Errorf("%s: want %q: %s", name, c.want, output)
		}
	}
	run(2, nil, "letters", "--config", filepath.Join(dir, "absent.yaml"))
	if output := run(0, nil, "version"); !strings.HasPrefix(output, "oncemill ") || !strings.Contains(output, "go1.") {
		t.Errorf("version: %s", output)
	}
}

// YAML would make numbers and times of some values, and write them in another way.
func TestConfigFile_PassesValuesAsWritten(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]map[string]string{
		"topic: 0123":                            {"topic": "0123"},
		"topic: 1_000":                           {"topic": "1_000"},
		"topic: 2026-01-02":                      {"topic": "2026-01-02"},
		"topic: 1e3":                             {"topic": "1e3"},
		"topic: yes":                             {"topic": "yes"},
		`topic: "null"`:                          {"topic": "null"},
		`topic: ""`:                              {"topic": ""},
		"limit: 1_000":                           {"limit": "1000"},
		"letters: {state: [dead, 0x10]}":         {"state": "[dead,0x10]"},
		"state: dead,held":                       {"state": "[dead,held]"},
		"topic: a\nletters: {topic: 0b1}":        {"topic": "0b1"},
		"key: &k 007\nletters: {topic: *k}":      {"key": "007", "topic": "007"},
		"key: a\nletters: {list: {key: 1.50}}":   {"key": "1.50"},
		"probe:\nletters: {list: , topic: 1:30}": {"topic": "1:30"},
	} {
		file := filepath.Join(t.TempDir(), "oncemill.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd, _, err := newRoot().Find([]string{"letters", "list"})
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
