package testserver

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
)

// private is a server for one test.
type private struct {
	*Instance

	t testing.TB
}

// startPrivate creates a server. It is removed when t ends or, if the process dies first, when
// the script runs again.
func startPrivate(t testing.TB, kind string, settings []string) private {
	t.Helper()
	p := private{t: t}
	t.Cleanup(func() { p.remove() })
	var err error
	p.Instance, err = NewInstance(t.Context(), kind, filepath.Join(serversDir(), "private", uniqueName(t)), settings...)
	if err != nil {
		t.Fatalf("testserver: %v", err)
	}
	return p
}

// serversDir is where the script keeps its instances.
func serversDir() string {
	if dir := os.Getenv("ONCEMILL_SERVERS_DIR"); dir != "" {
		return dir
	}
	return filepath.Join(os.TempDir(), "oncemill-servers")
}

// Start starts the server again after Stop, Crash or Kill and waits until it answers.
func (p private) Start() {
	p.t.Helper()
	p.run("start", p.kind, p.dir)
}

// Stop stops the server cleanly.
func (p private) Stop() {
	p.t.Helper()
	p.run("stop", p.dir)
}

// Kill ends the server with SIGKILL.
func (p private) Kill() {
	p.t.Helper()
	p.run("kill", p.dir)
}

// run fails the test if the script fails. It does not call FailNow, since fault injectors call
// it from other goroutines.
func (p private) run(args ...string) string {
	p.t.Helper()
	out, err := scriptOutput(context.WithoutCancel(p.t.Context()), args...)
	if err != nil {
		p.t.Errorf("testserver: %v", err)
	}
	return out
}

func (p private) remove() {
	if p.t.Failed() {
		p.t.Logf("end of the log of %s:\n%s", p.kind, tail(p.Log(), 4000))
	}
	if err := p.Remove(context.WithoutCancel(p.t.Context())); err != nil {
		p.t.Errorf("testserver: %v", err)
	}
}

// tail returns the last lines of a file, at most size bytes.
func tail(path string, size int) []byte {
	text, err := os.ReadFile(path)
	if err != nil {
		return []byte(err.Error())
	}
	if len(text) > size {
		text = text[len(text)-size:]
		text = text[bytes.IndexByte(text, '\n')+1:]
	}
	return text
}
