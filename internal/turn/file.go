package turn

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"sync"
)

// ErrReplaced is returned when the open file is no longer the one at its path.
var ErrReplaced = errors.New("oncemill: the SQLite database's file was removed or replaced while it was open; stop all processes before restoring a backup, and restart this one")

// file is a database's file at its first use. SQLite continues to write to a file that
// was removed, and those commits are lost.
type file struct {
	mu    sync.Mutex  // guards the fields below
	known bool        // the fields below are set
	path  string      // empty if in memory or not visible to this process
	was   os.FileInfo // nil if path is empty
}

// CheckFile returns ErrReplaced if the database's file was removed or replaced.
func (t *Turns) CheckFile(ctx context.Context, conn *sql.Conn) error {
	f := &t.file
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.known {
		err := conn.QueryRowContext(ctx, `select file from pragma_database_list where name = 'main'`).Scan(&f.path)
		if err != nil {
			return fmt.Errorf("find the database's file: %w", err)
		}
		if f.was, err = os.Stat(f.path); err != nil {
			f.path = ""
		}
		f.known = true
	}
	if f.path == "" {
		return nil
	}
	// The inode of an open file is not reused.
	if is, err := os.Stat(f.path); errors.Is(err, os.ErrNotExist) || err == nil && !os.SameFile(f.was, is) {
		return fmt.Errorf("%w: %s", ErrReplaced, f.path)
	}
	return nil
}
