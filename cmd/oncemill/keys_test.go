package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/internal/testserver"
)

// keysOf returns the runner for a SQLite file with keys of two callers: 0a..00 is
// interrupted and has a hostile route, 0b..00 is running, 0c..00 is completed.
func keysOf(t *testing.T) (path string, run func(code int, args ...string) string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "shop.db")
	run = runner(t, []string{"ONCEMILL_DATABASE=sqlite:" + path})
	run(0, "migrate")
	db := testserver.OpenSQLite(t, path)
	const now = `cast(unixepoch('subsec') * 1000000 as integer)`
	zeros := strings.Repeat("00", 31)
	if _, err := db.ExecContext(t.Context(), `
		insert into oncemill_idempotency (key_hash, caller, fingerprint, state, owner, fence, endpoint, created_at, completed_at, lease_until, expires_at, forget_at, status, response) values
			(x'0a`+zeros+`', x'01`+zeros[:30]+`', x'', 1, zeroblob(16), 1, 'POST /' || char(27) || '[31m', `+now+` - 60000000, null, 1, `+now+` + 3600000000, `+now+` + 3600000000, null, null),
			(x'0b`+zeros+`', x'01`+zeros[:30]+`', x'', 1, zeroblob(16), 1, 'POST /orders', `+now+`, null, `+now+` + 600000000, `+now+` + 3600000000, `+now+` + 3600000000, null, null),
			(x'0c`+zeros+`', x'02`+zeros[:30]+`', x'', 2, zeroblob(16), 1, 'POST /orders', `+now+`, `+now+`, 1, `+now+` + 3600000000, `+now+` + 3600000000, 201, cast(x'00' || x'00000007' || '{"s":1}' || 'secret body' as blob))`); err != nil {
		t.Fatal(err)
	}
	return path, run
}

func TestKeysCommand_ListsShowsSettlesAndReleases(t *testing.T) {
	t.Parallel()
	path, run := keysOf(t)
	zeros := strings.Repeat("00", 31)
	list := run(0, "keys")
	if !strings.Contains(list, "0a0000000000  interrupted") || !strings.Contains(list, "0b0000000000  running") || strings.Contains(list, "0c") || strings.Contains(list, "\x1b") {
		t.Error(list)
	}
	if out := run(0, "keys", "list", "--state", "completed,interrupted", "--route", "POST /orders"); !strings.Contains(out, "0c0000000000") || strings.Contains(out, "0a00") || strings.Contains(out, "0b0000000000") {
		t.Error(out)
	}
	if out := run(0, "keys", "--caller", "02"+zeros[:30], "--state", "completed"); strings.Count(out, "\n") != 2 {
		t.Error(out)
	}
	if out := run(0, "keys", "--until", "30s"); !strings.Contains(out, "0a0000000000") || strings.Contains(out, "0b0000000000") {
		t.Error(out)
	}
	var page struct {
		Keys []struct{ ID string }
		Next string
	}
	out := run(0, "keys", "--json", "--limit", "1", "--state", "completed,running,interrupted")
	if err := json.Unmarshal([]byte(out), &page); err != nil || len(page.Keys) != 1 || page.Next != "0a"+zeros || strings.Contains(out, "\x1b") {
		t.Errorf("%v: %s", err, out)
	}
	if out := run(0, "keys", "--after", page.Next, "--limit", "1", "--state", "completed,running"); !strings.Contains(out, "0b0000000000") || !strings.Contains(out, "--after 0b"+zeros) {
		t.Error(out)
	}
	if out := run(0, "keys", "show", "0c0000000000"); !strings.Contains(out, `"Status": 201`) || strings.Contains(out, "Answer") {
		t.Error(out)
	}
	if out := run(0, "keys", "show", "0c0000000000", "--answer"); !strings.Contains(out, `"Body": "c2VjcmV0IGJvZHk="`) {
		t.Error(out)
	}
	run(1, "keys", "show", "0d0000000000")

	for _, args := range [][]string{
		{"settle", "0a0000000000", "--status", "201"},
		{"settle", "0a0000000000", "--reason", "x"},
		{"settle", "--reason", "x", "--status", "201"},
		{"settle", "0a0000000000", "--failed", "--status", "201", "--reason", "x"},
		{"settle", "0a0000000000", "--status", "201", "--header", "x", "--reason", "x"},
		{"settle", "0a0000000000", "--status", "201", "--reason", "x", "--retention", "1ms"},
		{"settle", "0a0000000000", "--status", "201", "--reason", "x", "--refuse-for", "-1s"},
		{"settle", "0a0000000000", "--status", "201", "--reason", "x", "--encryption-key", "k"},
		{"settle", "0a0000000000", "--status", "201", "--reason", "x", "--body", path + "absent"},
		{"release", "0a0000000000", "--yes"},
		{"erase", "--yes", "--reason", "x"},
		{"erase", "--yes", "--reason", "x", "--caller", "12"},
		{"--caller", "12"},
		{"--caller", zeros[:32], "--tenant", "x"},
		{"--after", "12"},
		{"--limit", "1001"},
		{"--state", "bogus"},
		{"bogus"},
	} {
		run(2, append([]string{"keys"}, args...)...)
	}
	if out := run(1, "keys", "settle", "0b0000000000", "--status", "201", "--reason", "x"); !strings.Contains(out, "the key is running") {
		t.Error(out)
	}
	if out := run(1, "keys", "release", "0b0000000000", "--yes", "--reason", "x"); !strings.Contains(out, "the key is running") {
		t.Error(out)
	}
	if out := run(1, "keys", "settle", "0a0000000000", "--status", "20", "--reason", "x"); !strings.Contains(out, "must be 200 to 599") {
		t.Error(out)
	}
	if out := run(1, "keys", "release", "0a0000000000", "--reason", "x"); !strings.Contains(out, "not confirmed; nothing was done") { // standard input is empty
		t.Error(out)
	}
	body := filepath.Join(t.TempDir(), "body")
	if err := os.WriteFile(body, []byte("made"), 0o600); err != nil {
		t.Fatal(err)
	}
	run(0, "keys", "settle", "0a0000000000", "--status", "201", "--header", "Location: /orders/7", "--body", body, "--reason", "charge 88", "--by", "ada")
	if out := run(0, "keys", "show", "0a"+zeros, "--answer"); !strings.Contains(out, `"Phase": "completed"`) || !strings.Contains(out, `"/orders/7"`) || !strings.Contains(out, "bWFkZQ==") {
		t.Error(out)
	}
	if out := run(1, "keys", "settle", "0a0000000000", "--failed", "--reason", "x"); !strings.Contains(out, "no unknown outcome") {
		t.Error(out)
	}
	run(0, "keys", "release", "0a0000000000", "--yes", "--reason", "test", "--by", "bob")
	if out := run(1, "keys", "erase", "--caller", "01"+zeros[:30], "--yes", "--reason", "request 117"); !strings.Contains(out, "0 keys erased, 1 left") {
		t.Error(out)
	}
	if out := run(0, "keys", "erase", "--caller", "02"+zeros[:30], "--yes", "--reason", "request 118"); !strings.Contains(out, "1 keys erased, 0 left") {
		t.Error(out)
	}
	var entries []audit.Entry
	if err := json.Unmarshal([]byte(run(0, "audit", "--json", "--oldest")), &entries); err != nil {
		t.Fatal(err)
	}
	var actions []string
	for _, e := range entries {
		actions = append(actions, e.By+" "+strings.TrimPrefix(e.Action, "idempotency_"))
		if strings.Contains(e.Details+e.Subject, "made") || strings.Contains(e.Subject, "02"+zeros[:30]) {
			t.Errorf("%+v", e)
		}
	}
	if len(actions) != 5 || actions[0] != "ada key.settle" || actions[1] != "bob key.release" || !strings.HasSuffix(actions[4], "scope.erase") {
		t.Errorf("%q", actions)
	}
	if out := run(1, "keys", "erase", "--caller", "02"+zeros[:30], "--yes", "--reason", "request 118"); !strings.Contains(out, "nothing is stored of this caller") {
		t.Error(out)
	}
}

// The words have to be typed as they are asked for.
func TestKeysCommand_ReleasesWhenTheWordsAreTyped(t *testing.T) {
	t.Parallel()
	path, run := keysOf(t)
	for _, c := range []struct {
		typed string
		code  int
	}{{"yes\n", 1}, {strings.Repeat("run again ", 1000) + "\n", 1}, {"run again\n", 0}} {
		cmd, output := command(t.Context(), []string{"ONCEMILL_DATABASE=sqlite:" + path}, "keys", "release", "0a0000000000", "--reason", "no charge")
		cmd.Stdin = strings.NewReader(c.typed)
		_ = cmd.Run() // the exit code tells
		if got := cmd.ProcessState.ExitCode(); got != c.code || strings.Contains(output.String(), "\x1b") || !strings.Contains(output.String(), "may happen twice") {
			t.Errorf("%.20q: exit code %d: %s", c.typed, got, output)
		}
	}
	run(1, "keys", "show", "0a0000000000")
}

// A list that does not have all says so.
func TestKeysCommand_SaysThatThereAreMore(t *testing.T) {
	t.Parallel()
	_, run := keysOf(t)
	if out := run(0, "keys", "--limit", "1"); !strings.Contains(out, "0a0000000000") || !strings.Contains(out, "There are more: ") {
		t.Error(out)
	}
	if out := run(0, "keys", "--limit", "1", "--json"); !strings.Contains(out, `"Cut":true`) {
		t.Error(out)
	}
	if out := run(0, "keys", "--limit", "2"); strings.Contains(out, "There are more") {
		t.Error(out)
	}
}

// The answer "failed" would be a success for the callers of a command, whose result it is not.
func TestKeysCommand_SettlesACommandWithItsResultOnly(t *testing.T) {
	t.Parallel()
	path, run := keysOf(t)
	if _, err := testserver.OpenSQLite(t, path).ExecContext(t.Context(), `update oncemill_idempotency set endpoint = 'command close'`); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"--failed"}, {"--status", "422"}} {
		if out := run(1, append([]string{"keys", "settle", "0a0000000000", "--reason", "x"}, args...)...); !strings.Contains(out, "must be below 400 for a command") {
			t.Errorf("%q: %s", args, out)
		}
	}
	result := filepath.Join(t.TempDir(), "result")
	if err := os.WriteFile(result, []byte(`{"id":7}`), 0o600); err != nil {
		t.Fatal(err)
	}
	run(0, "keys", "settle", "0a0000000000", "--reason", "x", "--body", result, "--retention", "1s", "--refuse-for", "1h")
	time.Sleep(time.Second)
	if out := run(0, "keys", "--state", "expired"); !strings.Contains(out, "0a0000000000") {
		t.Errorf("it may run again: %s", out)
	}
	run(0, "purge")
	if out := run(0, "keys", "--state", "expired"); !strings.Contains(out, "0a0000000000") {
		t.Errorf("it may run again: %s", out)
	}
}

// What waits for input ends when it is interrupted, and has done nothing.
func TestKeysCommand_WhatItReadsCanBeInterrupted(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"a body":         {"settle", "0a0000000000", "--status", "200", "--body", "/dev/stdin"},
		"a secret":       {"erase", "--tenant", "x", "--secret-file", "-"},
		"a confirmation": {"release", "0a0000000000"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path, run := keysOf(t)
			cmd, output := command(t.Context(), []string{"ONCEMILL_DATABASE=sqlite:" + path}, append(append([]string{"keys"}, args...), "--reason", "x")...)
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer stdin.Close()
			cmd.Stdout, cmd.Stderr = nil, nil
			stderr, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if name == "a confirmation" {
				if _, err := stderr.Read(make([]byte, 1)); err != nil { // it asks
					t.Fatal(err)
				}
			} else if _, err := stdin.Write(make([]byte, 1<<20)); err != nil { // more than a pipe holds: it reads
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() {
				_, err := output.ReadFrom(stderr)
				ended <- errors.Join(err, cmd.Wait())
			}()
			select {
			case <-ended:
			case <-time.After(30 * time.Second):
				t.Fatal("it goes on")
			}
			if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(output.String(), "interrupt signal received") {
				t.Errorf("exit code %d: %s", code, output)
			}
			if out := run(0, "keys", "show", "0a0000000000"); !strings.Contains(out, `"Phase": "interrupted"`) {
				t.Error(out)
			}
		})
	}
}
