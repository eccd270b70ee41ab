package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/status"
)

// half is a sink that confirms one topic and finds another unavailable.
type half struct{}

func (half) Publish(topic string, _ ...*message.Message) error {
	switch topic {
	case "nowhere":
		return relay.Unavailable(errors.New("no queue is bound\x1b[2J"))
	case "picky":
		return relay.Refused(errors.New("not this one\x1b[2J"))
	}
	return nil
}

func (half) Close() error { return nil }

// A delivered message is found by topic, key, id and time, and shown with its way; a waiting one
// and one that is tried again are found where they are.
func TestHistoryCommands_FindMessagesWhereverTheyAre(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	run := runner(t, []string{"ONCEMILL_DATABASE=sqlite:" + path})
	for _, command := range [][]string{{"history", "list"}, {"history", "show", "1"}, {"outbox", "list"}, {"outbox", "show", "1"}, {"retrying"}, {"workers"}, {"inbox"}, {"history", "resend", "--from", "1h"}} {
		run(2, command...)
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("%v created the file of a database: %v", command, err)
		}
	}
	run(0, "migrate")
	db := testserver.OpenSQLite(t, path)
	box, err := outbox.New(db, outbox.Config{History: 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	publish := func(topic, key, id, payload string) {
		t.Helper()
		m := message.NewMessage(id, []byte(payload))
		m.Metadata.Set("name", "value\x1b[2J")
		if key != "" {
			m.Metadata.Set(outbox.KeyMetadata, key)
		}
		err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error { return box.Publish(ctx, tx, topic, m) })
		if err != nil {
			t.Fatal(err)
		}
	}
	publish("orders", "k1", "json", `{"a":{"b":"\u001b[2J"}}`)
	publish("orders", "", "binary", "\x00\x01\xff")
	publish("nowhere", "", "aside", "x")
	publish("picky", "k3", "refused", "x")
	publish("picky", "k3", "behind", "x")
	if out := run(0, "outbox", "list", "--topic", "nowhere"); !strings.Contains(out, "  aside ") || strings.Contains(out, "binary") {
		t.Errorf("the outbox: %s", out)
	}
	if out := run(0, "outbox", "show", "1"); !strings.Contains(out, "not yet") || !strings.Contains(out, `"b": "`) || strings.Contains(out, "\x1b") {
		t.Errorf("a waiting message: %q", out)
	}
	worker, err := relay.New(box, relay.FromPublisher(half{}), relay.Config{Name: "one", Retry: relay.Retry{Initial: time.Hour}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- worker.Run(ctx) }()
	defer func() {
		stop()
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	}()
	testserver.Eventually(t, "two are delivered", func() bool { return strings.Count(run(0, "history", "list"), "orders") == 2 })
	testserver.Eventually(t, "one is refused, with one behind", func() bool {
		var waiting []status.Retrying
		err := json.Unmarshal([]byte(run(0, "retrying", "--key", "k3", "--json")), &waiting)
		return err != nil || len(waiting) == 1 && waiting[0].Behind.N == 1
	})
	if out := run(0, "retrying", "--topic", "picky"); !strings.Contains(out, "refused ") || !strings.Contains(out, `not this one\x1b`) || strings.Contains(out, "\x1b") || strings.Contains(out, " aside ") {
		t.Errorf("retrying: %q", out)
	}
	if out := run(0, "workers"); !strings.Contains(out, "one ") || !strings.Contains(out, "working") || !strings.Contains(out, "(devel)") {
		t.Errorf("workers: %s", out)
	}

	var rows []historyLine
	for search, want := range map[string]int{"--key k1": 1, "--message-id binary": 1, "--topic bills": 0, "--since 1h": 2, "--until 1h": 0, "--limit 1": 1} {
		out := run(0, append([]string{"history", "list", "--json"}, strings.Fields(search)...)...)
		if err := json.Unmarshal([]byte(out), &rows); err != nil || len(rows) != want {
			t.Errorf("%s: %d rows, want %d, %v", search, len(rows), want, err)
		}
		if strings.Contains(out, "ayload") {
			t.Errorf("a list has payloads: %s", out)
		}
	}
	if err := json.Unmarshal([]byte(run(0, "history", "list", "--json", "--limit", "1")), &rows); err != nil || len(rows) != 1 {
		t.Fatal(err)
	}
	first := rows[0].ID
	next := run(0, "history", "list", "--after", fmt.Sprintf("%d,%s", first, rows[0].ConfirmedAt.Format(time.RFC3339Nano)))
	if strings.Count(next, "orders") != 1 {
		t.Errorf("the next page: %s", next)
	}
	if err := json.Unmarshal([]byte(run(0, "history", "list", "--json", "--message-id", "json")), &rows); err != nil || len(rows) != 1 {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), `insert into oncemill_inbox (consumer, message_id) values ('billing', 'json')`); err != nil {
		t.Fatal(err)
	}
	out := run(0, "history", "show", fmt.Sprint(rows[0].ID))
	for _, part := range []string{"message         json", "confirmed       20", "by billing", `value\x1b[2J`, "{\n  \"a\": {\n    \"b\""} {
		if !strings.Contains(out, part) {
			t.Errorf("it has no %q: %s", part, out)
		}
	}
	if strings.Contains(out, "\x1b") {
		t.Errorf("a stranger's text reaches the terminal: %q", out)
	}
	if err := json.Unmarshal([]byte(run(0, "history", "list", "--json", "--message-id", "binary")), &rows); err != nil || len(rows) != 1 {
		t.Fatal(err)
	}
	if out := run(0, "history", "show", fmt.Sprint(rows[0].ID)); !strings.Contains(out, "00 01 ff") {
		t.Errorf("a binary payload: %s", out)
	}
	var m shown
	if err := json.Unmarshal([]byte(run(0, "history", "show", fmt.Sprint(rows[0].ID), "--json")), &m); err != nil || string(m.Payload) != "\x00\x01\xff" {
		t.Errorf("%+v, %v", m, err)
	}
	if out := run(0, "inbox"); !strings.Contains(out, "billing   1 ") {
		t.Errorf("the inbox: %s", out)
	}
	if out := run(1, "history", "show", "99999"); !strings.Contains(out, "past its retention") {
		t.Error(out)
	}
	run(2, "history", "show", "json")
	run(2, "history", "list", "--after", "17")
	run(2, "history", "lost")
	run(2, "help", "history", "lost")
	run(2, "retrying", "--limit", "5000")
	if out := run(0, "history", "resend", "--from", "1h", "--dry-run"); !strings.Contains(out, "2 messages would be sent again") {
		t.Error(out)
	}
}
