package turn

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"sync"
)

// ErrReplaced says that the file that is open is not the one that has its name.
var ErrReplaced = errors.New("oncemill: the SQLite database's file was removed or replaced while it was open; stop all processes before restoring a backup, and restart this one")

// file is the file of a database as it was when it was first used. SQLite goes on with
// a file that has been removed, and what is committed there is lost.
type file struct {
	mu    sync.Mutex  // guards what follows
	known bool        // what follows
	path  string      // empty: in memory, or nowhere that we can see
	was   os.FileInfo // nil with an empty path
}

// CheckFile returns ErrReplaced if the database's file is not what it was.
func (t *Turns) CheckFile(ctx context.Context, conn *sql.Conn) error {
	f := &t.file
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.known {
		err := conn.QueryRowContext(ctx, `select file from pragma_database_list where name = 'main'`).Scan(&f.path)
		if err != nil {
			return fmt.Errorf("ask for the database's file: %w", err)
		}
		if f.was, err = os.Stat(f.path); err != nil {
			f.path = ""
		}
		f.known = true
	}
	if f.path == "" {
		return nil
	}
	// An open file's inode is not given to another one.
	if is, err := os.Stat(f.path); errors.Is(err, os.ErrNotExist) || err == nil && !os.SameFile(f.was, is) {
		return fmt.Errorf("%w: %s", ErrReplaced, f.path)
	}
	return nil
}
