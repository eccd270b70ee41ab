//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Several processes append to one file, and some of them crash while they write. Every record that
// was written is a line.
func TestArchive_ATornLineOfAnotherProcessSpoilsNoRecord(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	day := time.Now().UTC()
	torn := func() {
		for _, day := range []time.Time{day, day.AddDate(0, 0, 1)} { // also if the day ends now
			file, err := os.OpenFile(filepath.Join(dir, day.Format("rows-2006-01-02")+".jsonl"), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
			if err != nil {
				t.Error(err)
				return
			}
			if err := lockFile(t.Context(), file); err != nil {
				t.Error(err)
			}
			if _, err := file.WriteString(`{"row":"to`); err != nil {
				t.Error(err)
			}
			_ = file.Close() // as by a crash
		}
	}
	type record struct {
		Row string `json:"row"`
	}
	const writers, each = 2, 100
	var writing, crashing sync.WaitGroup
	done := make(chan struct{})
	crashing.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				torn()
			}
		}
	})
	for w := range writers {
		writing.Go(func() {
			for i := range each {
				if err := write(t.Context(), archiveDir(dir), "rows", []record{{fmt.Sprint(w, " ", i)}, {fmt.Sprint(w, " ", i, " more")}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writing.Wait()
	close(done)
	crashing.Wait()

	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	read := map[string]bool{}
	for _, name := range files {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(content)) {
			var row record
			if json.Unmarshal([]byte(line), &row) == nil {
				read[row.Row] = true
			}
		}
	}
	if len(read) != 2*writers*each {
		t.Errorf("%d records can be read of %d", len(read), 2*writers*each)
	}
}

// A record waits for the line that another process is writing.
func TestArchive_WritesBehindTheLineOfAnotherProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	day := time.Now().UTC()
	var others []*os.File
	for _, day := range []time.Time{day, day.AddDate(0, 0, 1)} { // also if the day ends now
		file, err := os.OpenFile(filepath.Join(dir, day.Format("rows-2006-01-02")+".jsonl"), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if err := lockFile(t.Context(), file); err != nil {
			t.Fatal(err)
		}
		others = append(others, file)
	}
	written := make(chan error, 1)
	go func() { written <- write(t.Context(), archiveDir(dir), "rows", []string{"a record"}) }()
	select {
	case err := <-written:
		t.Fatalf("written beside another process: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	for _, file := range others {
		if _, err := file.WriteString("another\n"); err != nil {
			t.Fatal(err)
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(others[0].Name())
	if err != nil || string(content) != "another\n\"a record\"\n" && string(content) != "another\n" {
		t.Errorf("the file has %q, %v", content, err)
	}
}

// A frozen process that has the file does not hang a purge for ever.
func TestArchive_WaitsForAnotherProcessUntilItsContextEnds(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "file")
	var files [2]*os.File
	for i := range files {
		var err error
		if files[i], err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
			t.Fatal(err)
		}
		defer files[i].Close()
	}
	if err := lockFile(t.Context(), files[0]); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := lockFile(ctx, files[1]); err == nil {
		t.Error("it is locked twice")
	}
	if err := files[0].Close(); err != nil {
		t.Fatal(err)
	}
	if err := lockFile(t.Context(), files[1]); err != nil {
		t.Error(err)
	}
}
