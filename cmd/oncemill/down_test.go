package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// onFile runs commands on a database in a file.
func onFile(t *testing.T, path string) func(code int, args ...string) string {
	return func(code int, args ...string) string {
		t.Helper()
		cmd, output := command(t.Context(), []string{"ONCEMILL_DATABASE=sqlite:" + path}, args...)
		_ = cmd.Run() // the exit code tells
		if got := cmd.ProcessState.ExitCode(); got != code {
			t.Fatalf("%v: exit code %d, want %d; output: %s", args, got, code, output)
		}
		return output.String()
	}
}

func TestMigrateDownCommand_RequiresYesAndLoseRows(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	run := onFile(t, path)
	run(0, "migrate")
	box, err := outbox.New(testserver.OpenSQLite(t, path), outbox.Config{})
	if err != nil {
		t.Fatal(err)
	}
	err = box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		m := message.NewMessage("later", nil)
		m.Metadata.Set(outbox.DeliverAfterMetadata, "1h")
		return box.Publisher(tx).Publish("orders", m)
	})
	if err != nil {
		t.Fatal(err)
	}
	run(2, "migrate", "down", "--yes")
	run(2, "migrate", "down", "--set", "bogus", "--yes")
	if out := run(2, "migrate", "down", "--set", "outbox"); !strings.Contains(out, "version 5") || !strings.Contains(out, "--yes") {
		t.Error(out)
	}
	run(0, "migrate", "down", "--set", "outbox", "--yes")
	run(0, "migrate", "down", "--set", "outbox", "--yes")
	run(0, "migrate", "down", "--set", "outbox", "--yes")
	if out := run(1, "migrate", "down", "--set", "outbox", "--yes"); !strings.Contains(out, "oncemill_scheduled") || !strings.Contains(out, "--lose-rows") {
		t.Error(out)
	}
	if out := run(0, "migrate", "down", "--set", "outbox", "--yes", "--lose-rows"); !strings.Contains(out, "now has version 1") {
		t.Error(out)
	}
	run(1, "migrate", "status")
	run(0, "migrate")
	run(0, "migrate", "status")
}

func TestCommand_CreatesSQLiteFilesWithMode0600(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	run := onFile(t, path)
	run(0, "migrate")
	db := testserver.OpenSQLite(t, path)
	if _, err := db.ExecContext(t.Context(), `delete from oncemill_outbox`); err != nil { // keeps the log open
		t.Fatal(err)
	}
	for _, name := range []string{path, path + "-wal"} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if err := os.Chmod(path, 0o640); err != nil { // somebody's choice
		t.Fatal(err)
	}
	run(0, "migrate", "status")
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", info, err)
	}
}

// Untrusted text is shown without control characters.
func TestDLQCommand_EscapesUntrustedText(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	run := onFile(t, path)
	run(0, "migrate")
	db := testserver.OpenSQLite(t, path)
	where, err := database.Resolve(db, oncemill.Config{})
	if err != nil {
		t.Fatal(err)
	}
	const evil = "a\x1b[31m\nb\u009b31m\u202ec\td"
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	err = dlqstore.Open(db, where).Add(t.Context(), tx, &dlqstore.Letter{
		Consumer: evil, Topic: evil, MessageID: evil, Key: evil, Reason: evil, Error: evil, Stack: evil,
		Metadata: message.Metadata{evil: evil}, Attempts: []dlqstore.Attempt{{Class: evil, Error: evil}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if out := run(0, "dlq"); !strings.Contains(out, "  -  ") {
		t.Errorf("a consumer's letter says whether the broker has it: %q", out)
	}
	if _, err := db.ExecContext(t.Context(), `update oncemill_dead_letters set maybe_delivered = 1`); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"dlq"}, {"dlq", "--json"}, {"dlq", "show", "1"}, {"dlq", "replay", "1", "--by", evil}} {
		out := run(0, args...)
		if strings.ContainsAny(strings.ReplaceAll(out, "\n", ""), "\x1b\u009b\u202e\t") {
			t.Errorf("%v prints %q", args, out)
		}
		if len(args) == 1 && (strings.Count(out, "\n") != 2 || !strings.Contains(out, "maybe")) {
			t.Errorf("the list is %q", out)
		}
	}
	var whole dlq.Letter
	if err := json.Unmarshal([]byte(run(0, "dlq", "show", "1")), &whole); err != nil || whole.Topic != evil || whole.Metadata[evil] != evil || !whole.MayHaveBeenDelivered {
		t.Errorf("got %+v, %v", whole, err)
	}
	if out := run(2, "dlq", "--state", evil); strings.ContainsAny(out, "\x1b\u009b\u202e") {
		t.Errorf("an error prints %q", out)
	}
}
