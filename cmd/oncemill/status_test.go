package main

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestStatusCommand_ShowsWhatWaitsAndWhatIsWrong(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	env := []string{"ONCEMILL_DATABASE=sqlite:" + path}
	run := runner(t, env)
	run(2, "status") // there is no such file
	run(0, "migrate")
	if text := run(0, "status", "--check"); !strings.Contains(text, "Nothing is wrong") || !strings.Contains(text, "0 waiting") {
		t.Errorf("nothing waits: %s", text)
	}
	db := testserver.OpenSQLite(t, path)
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		t.Fatal(err)
	}
	err = box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		return box.Publish(ctx, tx, "orders", message.NewMessage("order-1", nil))
	})
	if err != nil {
		t.Fatal(err)
	}
	if text := run(1, "status", "--check"); !strings.Contains(text, "1 waiting, the oldest for") || !strings.Contains(text, "No relay is running") {
		t.Errorf("one waits: %s", text)
	}
	if text := run(0, "status", "--lanes"); !strings.Contains(text, "  lane ") {
		t.Errorf("with lanes: %s", text)
	}
	var got struct {
		Outbox   struct{ Depth struct{ N int } }
		Problems []string
	}
	if err := json.Unmarshal([]byte(run(0, "status", "--json")), &got); err != nil || got.Outbox.Depth.N != 1 || len(got.Problems) != 1 {
		t.Errorf("JSON: %+v, %v", got, err)
	}
	run(2, "status", "--every", "1ms")

	// Watching ends without harm.
	cmd, _ := command(t.Context(), env, "status", "--watch", "--every", "100ms", "--json")
	cmd.Stdout = nil
	lines, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for scanner, n := bufio.NewScanner(lines), 0; n < 3; n++ {
		if !scanner.Scan() {
			t.Fatal("it has ended")
		}
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("interrupted: %v", err)
	}
}
