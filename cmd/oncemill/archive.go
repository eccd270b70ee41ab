package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// archiveDir is a directory for what is deleted from the database; empty: there is none.
type archiveDir string

// check returns an error for a directory that does not exist.
func (d archiveDir) check() error {
	if d == "" {
		return nil
	}
	info, err := os.Stat(string(d))
	if err == nil && !info.IsDir() {
		err = errors.New("it is not a directory")
	}
	if err != nil {
		return &usageError{fmt.Errorf("--archive-dir %s: %w", string(d), err)}
	}
	return nil
}

// write appends rows to the file of a kind and of this day, a line of JSON each, and returns
// when they are on the disk. Several processes may do so, and each may crash while it writes: a
// line that was cut short is ended first. The lock keeps others from writing in between; closing
// the file, or a crash, releases it.
func write[Row any](ctx context.Context, d archiveDir, kind string, rows []Row) (err error) {
	var lines bytes.Buffer
	encoder := json.NewEncoder(&lines)
	for i := range rows {
		if err := encoder.Encode(&rows[i]); err != nil {
			return fmt.Errorf("encode for the archive: %w", err)
		}
	}
	path := filepath.Join(string(d), kind+time.Now().UTC().Format("-2006-01-02")+".jsonl")
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600) //nolint:gosec // the operator names the directory
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := lockFile(ctx, file); err != nil {
		return fmt.Errorf("lock %s: %w", path, err)
	}
	broken, err := cutShort(file)
	if err != nil {
		return fmt.Errorf("read the end of %s: %w", path, err)
	}
	text := lines.Bytes()
	if broken {
		text = append([]byte("\n"), text...)
	}
	if _, err := file.Write(text); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	return syncDir(string(d)) // or a crash may lose the name of a new file
}

// cutShort reports whether a write before this one was cut short: the last line has no
// end.
func cutShort(file *os.File) (broken bool, err error) {
	info, err := file.Stat()
	if err != nil || info.Size() == 0 {
		return false, err
	}
	last := make([]byte, 1)
	if _, err := file.ReadAt(last, info.Size()-1); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	return last[0] != '\n', nil
}

func syncDir(path string) error {
	dir, err := os.Open(path) //nolint:gosec // the operator names it
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
