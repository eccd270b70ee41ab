package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// picky is a sink that refuses some messages.
type picky struct {
	mu    sync.Mutex
	likes map[string]bool // guarded by mu
	got   []string        // guarded by mu
}

func (p *picky) Publish(_ string, messages ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range messages {
		if !p.likes[m.UUID] {
			return relay.Refused(errors.New("not to my liking\n\x1b[31m"))
		}
		p.got = append(p.got, m.UUID)
	}
	return nil
}

func (p *picky) Close() error { return nil }

func TestDLQCommand_ShowsReplaysAndDiscards(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	env := []string{"ONCEMILL_DATABASE=sqlite:" + path}
	run := runner(t, env)
	run(0, "migrate")
	db := testserver.OpenSQLite(t, path)
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		t.Fatal(err)
	}
	err = box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		return box.Publisher(tx).Publish("orders", message.NewMessage("a", []byte("tea")), message.NewMessage("b", nil))
	})
	if err != nil {
		t.Fatal(err)
	}
	broker := &picky{}
	worker, err := relay.New(box, relay.FromPublisher(broker), relay.Config{Retry: relay.Retry{MaxAttempts: 1}})
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
	await := func(what string, args ...string) {
		t.Helper()
		testserver.Eventually(t, fmt.Sprintf("%v prints %q", args, what), func() bool { return strings.Contains(run(0, args...), what) })
	}
	await("  a ", "dlq")
	await("  b ", "dlq", "--topic", "orders")
	if list := run(0, "dlq"); strings.Contains(list, "\x1b") || !strings.Contains(list, `not to my liking\n\x1b[31m`) {
		t.Errorf("the list shows what strangers wrote: %q", list)
	}
	if groups := run(0, "dlq", "groups"); !strings.Contains(groups, "2      relay  refused") || strings.Contains(groups, "\x1b") {
		t.Errorf("groups: %q", groups)
	}
	var groups []dlq.Group
	if err := json.Unmarshal([]byte(run(0, "dlq", "groups", "--json")), &groups); err != nil || len(groups) != 1 || groups[0].Count != 2 {
		t.Fatalf("%+v, %v", groups, err)
	}
	if list := run(0, "dlq", "--fingerprint", groups[0].Fingerprint); !strings.Contains(list, "  a ") || !strings.Contains(list, "  b ") {
		t.Errorf("the letters of a group: %s", list)
	}
	var page []dlq.Letter
	if err := json.Unmarshal([]byte(run(0, "dlq", "--json", "--message-id", "a")), &page); err != nil || len(page) != 1 {
		t.Fatalf("%d letters, %v", len(page), err)
	}
	id := fmt.Sprint(page[0].ID)
	var whole dlq.Letter
	if err := json.Unmarshal([]byte(run(0, "dlq", "show", id)), &whole); err != nil || string(whole.Payload) != "tea" || len(whole.Attempts) != 1 {
		t.Errorf("%+v, %v", whole, err)
	}

	broker.mu.Lock()
	broker.likes = map[string]bool{"a": true}
	broker.mu.Unlock()
	if out := run(0, "dlq", "replay", id, "--reason", "mended"); !strings.Contains(out, "1 of 1") {
		t.Error(out)
	}
	await("  replayed ", "dlq", "--state", "replayed", "--message-id", "a")
	if out := run(1, "dlq", "replay", id); !strings.Contains(out, "0 of 1") {
		t.Errorf("replayed twice: %s", out)
	}
	if err := json.Unmarshal([]byte(run(0, "dlq", "--json", "--message-id", "b")), &page); err != nil || len(page) != 1 {
		t.Fatalf("%d letters, %v", len(page), err)
	}
	id = fmt.Sprint(page[0].ID)
	if out := run(2, "dlq", "discard", id); !strings.Contains(out, "--reason is required") {
		t.Error(out)
	}
	for _, verb := range []string{"replay", "discard"} {
		if out := run(2, "dlq", verb); !strings.Contains(out, "give the ids of dead letters") {
			t.Error(out)
		}
	}
	run(2, "dlq", "--state", "bogus")
	if out := run(2, "dlq", "--reason-class", "bogus"); !strings.Contains(out, "no-message-id") {
		t.Error(out)
	}
	run(0, "dlq", "--reason-class", page[0].Reason)
	run(2, "dlq", "--limit", "5000")
	run(0, "dlq", "discard", id, "--reason", "test")
	await("  discarded ", "dlq", "--state", "discarded")
	testserver.Eventually(t, "it is delivered", func() bool {
		broker.mu.Lock()
		defer broker.mu.Unlock()
		got := strings.Join(broker.got, " ")
		if got != "" && got != "a" {
			t.Fatalf("delivered: %q", got)
		}
		return got == "a"
	})
}
