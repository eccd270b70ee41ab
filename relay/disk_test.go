package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
)

// The disk of the tables is full: nothing can be noted, and what needs no note is
// delivered. When there is room again, everything is.
func TestRelay_DeliversBesideAFullDisk(t *testing.T) {
	t.Parallel()
	p := onServer(t, testserver.PrivatePostgres(t))
	p.execute(t, `create tablespace small location '`+p.smallDisk(t)+`'`)
	p.execute(t, `alter table all in tablespace pg_default set tablespace small`)
	p.execute(t, `alter index all in tablespace pg_default set tablespace small`)
	p.execute(t, `create table ballast (filler text) with (autovacuum_enabled = off) tablespace small`)

	const history = 24 * time.Hour
	f, box := newVariety(p.beatsOf(t, "b")), p.boxOn(t, p.open(t), history)
	var gate sync.RWMutex
	handle := func(ctx context.Context, m *relay.Message) error {
		gate.RLock()
		defer gate.RUnlock()
		return f.handle(ctx, m)
	}
	for _, name := range []string{"a", "b"} {
		s := &sink{name: name, wire: f.wire, handle: handle}
		start(t, p.boxOn(t, p.open(t), history), s, relay.Config{Lease: silenceLease, Retry: quickly})
	}
	p.awaitShared(t)
	produce := func() {
		for range 8 {
			f.commit(t, box, f.rounds)
			f.rounds++
		}
	}
	produce()
	f.check(t, p)

	gate.Lock()
	produce()
	fill(t, p.db)
	begin := f.clock.Load()
	gate.Unlock()
	prompt := slices.DeleteFunc(slices.Clone(f.expected), func(m *message.Message) bool {
		return strings.HasPrefix(m.UUID, "flaky") || strings.HasPrefix(m.UUID, "behind")
	})
	until(t, "two leases, or their delivery", func() bool { return f.missing(prompt) == 0 || f.clock.Load() > begin+2*15 }, f.clock.Load)
	if n := f.missing(prompt); n > 0 {
		t.Errorf("%d messages of %d are not delivered two leases later", n, len(prompt))
	}
	t.Logf("delivered after %.1f leases", leases(f.clock.Load()-begin))
	p.awaitShared(t)
	t.Logf("%d messages wait for a note", f.missing(f.expected)) // some found room in pages that were there
	if _, err := p.db.ExecContext(t.Context(), oneMore, 1); !isDiskFull(err) {
		t.Errorf("the disk is not full: %v", err)
	}
	p.execute(t, `drop table ballast`)
	f.check(t, p)
}

// smallDisk mounts a small file system that the server of the database can write to.
func (p testDB) smallDisk(t *testing.T) (dir string) {
	t.Helper()
	var data string
	if err := p.db.QueryRowContext(t.Context(), `show data_directory`).Scan(&data); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(data)
	if err != nil {
		t.Fatal(err)
	}
	root, err := os.MkdirTemp("", "oncemill-disk") //nolint:usetesting // the server's user must come in
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(root) })
	if out, err := exec.CommandContext(t.Context(), "mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", root).CombinedOutput(); err != nil { //nolint:gosec // a directory of our own
		if os.Geteuid() == 0 {
			t.Fatalf("mount: %v: %s", err, out)
		}
		t.Skip("only root may mount a file system")
	}
	t.Cleanup(func() { _ = syscall.Unmount(root, syscall.MNT_DETACH) })
	if err := os.Chmod(root, 0o755); err != nil { //nolint:gosec // the same
		t.Fatal(err)
	}
	dir = filepath.Join(root, "small")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	owner := info.Sys().(*syscall.Stat_t)
	if err := os.Chown(dir, int(owner.Uid), int(owner.Gid)); err != nil {
		t.Fatal(err)
	}
	return dir
}

const oneMore = `insert into ballast select repeat('x', 1000) from generate_series(1, $1)`

func isDiskFull(err error) bool {
	var state interface{ SQLState() string }
	return errors.As(err, &state) && state.SQLState() == "53100"
}

// fill writes to the table named ballast until not one row more has room.
func fill(t *testing.T, db *sql.DB) {
	t.Helper()
	for rows := 4096; rows > 0; {
		switch _, err := db.ExecContext(t.Context(), oneMore, rows); {
		case isDiskFull(err):
			rows /= 2
		case err != nil:
			t.Fatal(err)
		}
	}
}
