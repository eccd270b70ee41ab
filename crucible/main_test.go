package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A run adds to the histories that it finds: those of another run would be judged with its own.
func TestKeep_RefusesADirectoryWithHistories(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "relay-1.history"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop() // or it would start servers
	if err := start(ctx, options{keep: dir, seed: 1}); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("the error is %v", err)
	}
}
