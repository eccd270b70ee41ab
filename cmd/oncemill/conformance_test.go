package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// The commands kill a real probe, start it again, and expire its answers.
func TestConformanceCommand_RunsItsHooks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	lite, pid := filepath.Join(dir, "probe.db"), filepath.Join(dir, "pid")
	listen, err := testserver.FreeAddress(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	address := "http://" + listen
	// The inner shell becomes the probe; the outer one ends.
	start := fmt.Sprintf(`sh -c 'echo $$ > %s; export %s=1; exec "%s" probe --database sqlite:%s --listen %s' > %s/log 2>&1 &`,
		pid, commandEnv, os.Args[0], lite, listen, dir)
	kill := fmt.Sprintf(`kill -9 $(cat %s)`, pid)
	if err := shell(t.Context(), start).Run(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		var n int
		if text, err := os.ReadFile(pid); err == nil {
			if _, err := fmt.Sscan(string(text), &n); err == nil {
				_ = syscall.Kill(n, syscall.SIGKILL)
			}
		}
	})
	testserver.Eventually(t, "the probe answers", func() bool {
		response, err := http.Get(address + "/capabilities")
		if err == nil {
			_ = response.Body.Close()
		}
		return err == nil
	})
	cmd, output := command(t.Context(), nil, "conformance", "--url", address, "--run", "whose process is killed", "--kill-command", kill, "--start-command", start)
	if err := cmd.Run(); err != nil || !strings.Contains(output.String(), "1 passed, 0 failed, 0 skipped") {
		t.Fatalf("%v: %s", err, output)
	}
	cmd, output = command(t.Context(), nil, "conformance", "--url", address, "--run", "an expired key", "--expire-command", `echo "$CONFORMANCE_URL" > `+dir+`/expired; exit 7`)
	if err := cmd.Run(); err == nil || !strings.Contains(output.String(), "hook Expire: exit status 7") {
		t.Fatalf("%v: %s", err, output)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "expired")); err != nil || strings.TrimSpace(string(text)) != address {
		t.Errorf("the hook got the URL %q, %v", text, err)
	}
}

// The command tests a service that it knows by one operation.
func TestConformanceCommand_TestsAnOperation(t *testing.T) {
	t.Parallel()
	engine, err := idempotency.New(&idempotency.MemoryStore{}, idempotency.Config{
		Scope: func(r *http.Request) (idempotency.Scope, error) {
			return idempotency.Scope{Tenant: r.PathValue("tenant"), Principal: r.Header.Get("X-User")}, nil
		},
		Keys: idempotency.KeyConfig{Optional: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	placed := filepath.Join(t.TempDir(), "orders")
	var writing sync.Mutex
	mux := http.NewServeMux()
	mux.Handle("PUT /{tenant}/orders", engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var order struct {
			ID string `json:"id"`
		}
		writing.Lock()
		defer writing.Unlock()
		file, err := os.OpenFile(placed, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil || json.NewDecoder(r.Body).Decode(&order) != nil || order.ID == "" {
			http.Error(w, "no order", http.StatusBadRequest)
			return
		}
		_, writeErr := fmt.Fprintln(file, order.ID)
		if file.Close() != nil || writeErr != nil {
			t.Error("the order is not written")
		}
		w.WriteHeader(http.StatusCreated)
	})))
	server := httptest.NewServer(mux)
	defer server.Close()
	dir := t.TempDir()
	body, other := filepath.Join(dir, "body"), filepath.Join(dir, "other")
	for file, text := range map[string]string{body: `{"id": "{{unique}}"}`, other: `{"id": "{{unique}}", "note": "{{uuid}}"}`} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{
		"conformance", "--url", server.URL, "--path", "/a/orders", "--method", "PUT", "--body", body, "--other", other, "--optional-key",
		"--header", "X-User: 1", "--tenant", "/b/orders", "--user", "X-User: 2", "--other-path", "/a/orders?express=1",
		"--effects-command", `grep -cx "$CONFORMANCE_UNIQUE" ` + placed + ` || true`,
	}
	cmd, output := command(t.Context(), nil, args...)
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	for _, name := range []string{"two tenants share no key", "two users share no key", "another path or query is another request", "without a key every request runs", "another body is refused"} {
		if !strings.Contains(output.String(), "ok    "+name) {
			t.Errorf("%q has not passed: %s", name, output)
		}
	}
	cmd, output = command(t.Context(), nil, append(args, "--run", "an answer is replayed", "--effects-command", "echo 2")...)
	if err := cmd.Run(); err == nil || !strings.Contains(output.String(), "2 effects, want 1") {
		t.Errorf("the effects are not counted: %v: %s", err, output)
	}
}
