package main

import (
	"encoding/json"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// shopOf returns the path of a SQLite file with a consumer's dead letter, whose id is 1, and
// a relay's, whose id is 2.
func shopOf(t *testing.T) (path string, run func(code int, args ...string) string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "shop.db")
	run = runner(t, []string{"ONCEMILL_DATABASE=sqlite:" + path})
	run(0, "migrate")
	db := testserver.OpenSQLite(t, path)
	if _, err := db.ExecContext(t.Context(), `
		insert into oncemill_dead_letters (source, consumer, lane, row_id, created_at, topic, message_id, payload, metadata, reason, error, fingerprint) values
			('consumer', 'stock', null, null, null, 'orders', 'm', cast('EUR' as blob), '{"currency":"EUR","lang":"de"}', 'failed', 'no' || char(27) || '[31m', 'f'),
			('relay', '', 3, 7, 1, 'orders', 'n', cast('x' as blob), '', 'refused', 'no', 'g')`); err != nil {
		t.Fatal(err)
	}
	return path, run
}

func TestDLQCommand_EditsUndoesAndNotes(t *testing.T) {
	t.Parallel()
	_, run := shopOf(t)
	payload := filepath.Join(t.TempDir(), "payload")
	if err := os.WriteFile(payload, []byte("USD"), 0o600); err != nil {
		t.Fatal(err)
	}
	run(0, "dlq", "discard", "1", "--reason", "test", "--by", "ada")
	if out := run(2, "dlq", "undo", "1"); !strings.Contains(out, "--reason is required to undo") {
		t.Error(out)
	}
	if out := run(0, "dlq", "undo", "1", "--reason", "a mistake", "--by", "bob"); out != "1 of 1 were restored\n" {
		t.Error(out)
	}
	if out := run(1, "dlq", "undo", "1", "9", "--reason", "a mistake"); !strings.Contains(out, "0 of 2") || !strings.Contains(out, "its state is dead") || !strings.Contains(out, "not found") {
		t.Error(out)
	}
	run(0, "dlq", "note", "1", "asked \x1b[31mtheir support", "--by", "cyd")
	run(1, "dlq", "note", "9", "x")
	for _, args := range [][]string{{"note", "1"}, {"note", "1", " "}, {"edit", "1", "--payload", payload}, {"edit", "1", "--reason", "x"}, {"edit", "1", "--reason", "x", "--payload", payload + "x"}, {"edit", "1", "--reason", "x", "--set", "x"}} {
		run(2, append([]string{"dlq"}, args...)...)
	}
	if out := run(1, "dlq", "edit", "2", "--payload", payload, "--reason", "x"); !strings.Contains(out, "cannot be edited: a relay wrote it") {
		t.Error(out)
	}
	if out := run(1, "dlq", "edit", "1", "--set", "oncemill_token=x", "--reason", "x"); !strings.Contains(out, "reserved") {
		t.Error(out)
	}
	run(0, "dlq", "edit", "1", "--payload", payload, "--set", "currency=USD", "--unset", "lang", "--reason", "wrong", "--by", "eve")
	shown := run(0, "dlq", "show", "1")
	var whole struct {
		dlq.Letter
		Notes []dlq.Note
	}
	if err := json.Unmarshal([]byte(shown), &whole); err != nil || whole.State != dlq.StateReplaying || string(whole.Payload) != "EUR" || string(whole.Edited.Payload) != "USD" || len(whole.Edited.Metadata) != 1 ||
		whole.Edited.Metadata["currency"] != "USD" || whole.Edited.Act.By != "eve" || len(whole.Notes) != 1 || whole.Notes[0].By != "cyd" || strings.Contains(shown, "\x1b") {
		t.Errorf("%v: %s", err, shown)
	}

	var entries []audit.Entry
	if err := json.Unmarshal([]byte(run(0, "audit", "--json", "--oldest")), &entries); err != nil {
		t.Fatal(err)
	}
	var acts []string
	for _, e := range entries {
		acts = append(acts, e.By+" "+e.Action+" "+e.Subject)
	}
	want := "ada dead_letter.discard dead_letter 1, bob dead_letter.restore dead_letter 1, cyd dead_letter.note dead_letter 1, eve dead_letter.replay_edited dead_letter 1"
	if got := strings.Join(acts, ", "); got != want {
		t.Errorf("audited %s", got)
	}
	for _, args := range [][]string{{"--by", "bob"}, {"--action", "dead_letter.restore"}, {"--since", "1h", "--by", "bob"}} {
		if out := run(0, append([]string{"audit"}, args...)...); strings.Count(out, "\n") != 2 || !strings.Contains(out, "a mistake") {
			t.Errorf("%v: %s", args, out)
		}
	}
	if out := run(0, "audit", "--subject", "dead_letter 1"); strings.Count(out, "\n") != 5 || strings.Contains(out, "\x1b") {
		t.Error(out)
	}
	if out := run(0, "audit", "--until", "1h"); strings.Count(out, "\n") != 1 {
		t.Error(out)
	}
	run(2, "audit", "--since", "yesterday")
	if out := run(2, "audit", "--limit", "5000"); !strings.Contains(out, "--limit 5000") {
		t.Error(out)
	}
}

// Reserved names stay, so to remove one is an error and not a success without an effect.
func TestChanged_RemovesNoReservedName(t *testing.T) {
	t.Parallel()
	own := message.Metadata{"oncemill_key": "k", "lang": "de"}
	for _, name := range []string{"oncemill_key", "other"} {
		if got, err := changed(own, nil, []string{name}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	if got, err := changed(own, []string{"a=b=c"}, []string{"lang"}); err != nil || !maps.Equal(got, message.Metadata{"oncemill_key": "k", "a": "b=c"}) || len(own) != 2 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestDLQCommand_ExportsAndImports(t *testing.T) {
	t.Parallel()
	_, run := shopOf(t)
	_, other := shopOf(t)
	file := filepath.Join(t.TempDir(), "letters.jsonl")
	if out := run(0, "dlq", "export", "--output", file); !strings.Contains(out, "2 dead letters exported") {
		t.Error(out)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	run(2, "dlq", "export", "--output", file) // replaces none
	if out := run(0, "dlq", "export", "--consumer", "stock", "--since", "1h", "--state", "dead"); strings.Count(out, `"v":1`) != 1 || strings.Contains(out, "\x1b") {
		t.Error(out)
	}
	run(2, "dlq", "import", file)
	run(2, "dlq", "import", "--reason", "x")
	run(2, "dlq", "import", file+"x", "--reason", "x")
	if out := run(0, "dlq", "import", file, "--reason", "again"); !strings.Contains(out, "0 dead letters imported, 2 were there, 0 lines with errors") {
		t.Error(out)
	}
	if out := other(1, "dlq", "import", file, "--reason", "moved"); !strings.Contains(out, "1 dead letters imported, 0 were there, 1 lines with errors") || !strings.Contains(out, "line 2: an open dead letter of a relay") {
		t.Error(out)
	}
	if out := other(0, "audit", "--action", "dead_letter.import"); !strings.Contains(out, "was dead letter 1, message m") {
		t.Error(out)
	}
}

// What never ends is read until the command is interrupted, whether it is named or the input.
func TestDLQCommand_WhatItReadsCanBeInterrupted(t *testing.T) {
	t.Parallel()
	path, _ := shopOf(t)
	for name, args := range map[string][]string{
		"an import of a pipe":    {"dlq", "import", "/dev/stdin"},
		"a payload from a pipe":  {"dlq", "edit", "2", "--payload", "/dev/stdin"},
		"a payload on the input": {"dlq", "edit", "2", "--payload", "-"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd, output := command(t.Context(), []string{"ONCEMILL_DATABASE=sqlite:" + path}, append(args, "--reason", "x")...)
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer stdin.Close()
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			if _, err := stdin.Write(make([]byte, 1<<20)); err != nil { // more than a pipe holds: it reads
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			select {
			case <-ended:
			case <-time.After(30 * time.Second):
				t.Fatal("it goes on")
			}
			if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(output.String(), "interrupt signal received") {
				t.Errorf("exit code %d: %s", code, output)
			}
		})
	}
}

// A server that accepts connections and never answers keeps no command that is interrupted.
func TestDLQCommand_ASilentServerCanBeInterrupted(t *testing.T) {
	t.Parallel()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	env := []string{"ONCEMILL_DATABASE=postgres://a:b@" + server.Addr().String() + "/x?sslmode=disable"}
	for _, args := range [][]string{{"dlq"}, {"dlq", "discard", "1", "2", "--reason", "x"}, {"audit"}} {
		cmd, output := command(t.Context(), env, args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		conn, err := server.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); err != nil { // it waits for the answer now
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Fatalf("%v goes on", args)
		}
		if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(output.String(), "the database did not answer") {
			t.Errorf("%v: exit code %d: %s", args, code, output)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

// An import that waits for its input ends when it is interrupted.
func TestDLQCommand_AnImportCanBeInterrupted(t *testing.T) {
	t.Parallel()
	path, _ := shopOf(t)
	cmd, output := command(t.Context(), []string{"ONCEMILL_DATABASE=sqlite:" + path}, "dlq", "import", "-", "--reason", "x")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := `{"v":1,"state":"dead","source":"consumer","consumer":"mail","topic":"t","message_id":"x","payload":"","died_at":"2026-01-01T00:00:00Z","reason":"failed","error":"","tries":1}` + "\n"
	if _, err := stdin.Write([]byte(line)); err != nil {
		t.Fatal(err)
	}
	db := testserver.OpenSQLite(t, path)
	testserver.Eventually(t, "the line is imported", func() bool {
		var n int
		if err := db.QueryRowContext(t.Context(), `select count(*) from oncemill_dead_letters where consumer = 'mail'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 1
	})
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("it goes on")
	}
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(output.String(), "1 dead letters imported") {
		t.Errorf("exit code %d: %s", code, output)
	}
}

func TestTable_FitsTheTerminal(t *testing.T) {
	t.Parallel()
	table := newTable("ID", "TOPIC", "ERROR")
	table.row(1, strings.Repeat("é", 30), "it failed\n\x1b[31m: "+strings.Repeat("x", 60))
	table.row(2, "short", "")
	for _, terminal := range []int{0, 200, 80, 40, 26, 5} {
		text := table.text(terminal)
		longest := 0
		for line := range strings.Lines(text) {
			longest = max(longest, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")))
		}
		switch {
		case terminal >= 26 && longest > terminal:
			t.Errorf("a line has %d characters in a terminal of %d:\n%s", longest, terminal, text)
		case strings.Count(text, "\n") != 3 || strings.Contains(text, "\x1b") || !strings.HasPrefix(text, "ID  TO"):
			t.Errorf("%q", text)
		case (terminal == 0 || terminal == 200) != (longest > 80):
			t.Errorf("%d: a line has %d characters", terminal, longest)
		}
	}
}

// Who reads a list learns that it is not the whole one.
func TestDLQCommand_SaysThatThereAreMore(t *testing.T) {
	t.Parallel()
	_, run := shopOf(t)
	for limit, more := range map[string]bool{"1": true, "2": false, "1000": false} {
		for _, form := range []string{"--oldest", "--json"} {
			if out := run(0, "dlq", form, "--limit", limit); strings.Contains(out, "There are more") != more {
				t.Errorf("--limit %s %s: %s", limit, form, out)
			}
		}
	}
	if out := run(0, "dlq", "--topic", "none"); strings.Contains(out, "more") {
		t.Error(out)
	}
}
