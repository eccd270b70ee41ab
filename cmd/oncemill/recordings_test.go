//go:build linux

package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// recordings are the commands that docs/terminal shows, in this order: a replay changes what
// follows. A replay job with its progress belongs behind dlq-replay.
var recordings = []struct {
	name  string
	args  string
	code  int
	watch bool // it is interrupted after the first screen
}{
	{name: "status-watch", args: "status --watch", watch: true},
	{name: "workers", args: "workers"},
	{name: "retrying", args: "retrying"},
	{name: "dlq-groups", args: "dlq groups"},
	{name: "dlq-replay", args: "dlq replay 1 2 --reason queue_created --by ada"},
	{name: "doctor", args: "doctor", code: -1}, // its findings are about the server
}

// terminal runs a command in a terminal of so many columns, and returns what it prints.
func terminal(t *testing.T, columns int, env []string, watch bool, args ...string) (output string, code int) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close() //nolint:errcheck // nothing was written to it
	fd := int(master.Fd())
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: uint16(columns)}) //nolint:gosec // 80 or 120
	}
	if err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd, _ := command(t.Context(), env, args...)
	cmd.Stdout, cmd.Stderr = slave, slave
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := slave.Close(); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for piece := make([]byte, 4096); ; {
		n, err := master.Read(piece)
		out.Write(piece[:n])
		if watch && strings.HasSuffix(out.String(), "\r\n") {
			watch = false
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
		}
		if err != nil { // EIO: the command has ended
			if !errors.Is(err, syscall.EIO) && !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			break
		}
	}
	_ = cmd.Wait() // the exit code tells
	return out.String(), cmd.ProcessState.ExitCode()
}

var (
	escapes   = regexp.MustCompile(`\x1b\[[0-9;]*[A-Za-z]`)
	stamps    = regexp.MustCompile(`20\d\d-\d\d-[0-9T:.Z-]*`)
	minutes   = regexp.MustCompile(`\b30m[2-5]\ds`) // nobody is gone for hours and still listed
	stampLike = "2026-03-01T10:00:00Z"
)

// normalized is a recording without what differs each time.
func normalized(text, schema string) string {
	text = escapes.ReplaceAllString(strings.ReplaceAll(text, "\r\n", "\n"), "")
	text = strings.ReplaceAll(text, schema, "oncemill")
	text = minutes.ReplaceAllString(text, "30m20s")
	return stamps.ReplaceAllStringFunc(text, func(s string) string { return stampLike[:min(len(s), len(stampLike))] })
}

// What the documentation shows is what the commands print, and it fits the terminal.
func TestRecordings_FitTheirTerminals(t *testing.T) {
	t.Parallel()
	for _, columns := range []int{80, 120} {
		pg := testserver.Postgres(t)
		env := []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema}
		runner(t, env)(0, "migrate")
		recordedShop(t, pg.DB, pg)
		for _, r := range recordings {
			out, code := terminal(t, columns, env, r.watch, strings.Fields(r.args)...)
			if code != r.code && r.code >= 0 {
				t.Errorf("%s: exit code %d: %s", r.args, code, out)
			}
			out = normalized(out, pg.Config.Schema)
			fits(t, r.name, out, columns)
			path := filepath.Join("..", "..", "docs", "terminal", fmt.Sprintf("%s.%d.txt", r.name, columns))
			text := "$ oncemill " + r.args + "\n" + out
			if os.Getenv(recordEnv) != "" {
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			kept, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			fits(t, path, string(kept), columns)
			if r.name != "doctor" && string(kept) != text {
				t.Errorf("%s is not what the command prints now; run make recordings:\n%s\nnow:\n%s", path, kept, text)
			}
		}
	}
}

// fits fails unless each line has at most so many columns, and nothing that a terminal acts on.
func fits(t *testing.T, name, text string, columns int) {
	t.Helper()
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if n := utf8.RuneCountInString(line); n > columns {
			t.Errorf("%s: a line has %d columns, more than %d: %q", name, n, columns, line)
		}
		if strings.ContainsFunc(line, func(r rune) bool { return !unicode.IsGraphic(r) }) {
			t.Errorf("%s: not plain text: %q", name, line)
		}
	}
}

// recordedShop fills the tables, always alike. Ages are large, so that the seconds of a test do not
// show.
func recordedShop(t *testing.T, db *sql.DB, pg testserver.PG) {
	t.Helper()
	where, err := database.Resolve(db, pg.Config)
	if err != nil {
		t.Fatal(err)
	}
	exec := func(ctx context.Context, statement string) {
		t.Helper()
		if _, err := db.ExecContext(ctx, where.Expand(statement)); err != nil {
			t.Fatal(err)
		}
	}
	ctx := t.Context()
	exec(ctx, `
insert into {{outbox}} (lane, topic, message_id, key, payload, created_at)
select i % 32, 'orders', 'order-' || i, 'customer-' || i % 40, '{}', clock_timestamp() - interval '5 hours'
from generate_series(1, 1200) i`)
	exec(ctx, `
insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, parked_at, attempts, next_at, errors)
select i, 100000 + i, case when i < 3 then 'invoices' else 'reply.' || i end, 'invoice-' || i, 'customer-' || i, '{}', '', clock_timestamp() - interval '7 hours',
	clock_timestamp() - interval '7 hours', case when i < 3 then 2 else 0 end, clock_timestamp() - interval '1 second' * i,
	jsonb_build_array(jsonb_build_object('at', 0, 'class', 'unroutable', 'text', 'sink unavailable: message unroutable: no queue is bound to exchange "reply.' || i || '"'))
from generate_series(1, 6) i`)
	exec(ctx, `
insert into {{parked}} (lane, id, topic, message_id, key, payload, metadata, created_at, parked_at)
select 3, 200000 + i, 'reply.3', 'invoice-3-' || i, 'customer-3', '{}', '', clock_timestamp() - interval '7 hours', clock_timestamp() - interval '7 hours'
from generate_series(1, 12) i`)
	exec(ctx, `
insert into {{relay_workers}} (owner, name, started_at, seen_until, seen_at, ready, stopping, host, version, problem)
values ('4TQ2XW', 'relay-a', clock_timestamp() - interval '50 hours', clock_timestamp() - interval '30 minutes 20 seconds', clock_timestamp() - interval '30 minutes 20 seconds', true, false, 'app-1', 'v0.9.0', ''),
	('ZK81MD', 'relay-b', clock_timestamp() - interval '3 hours', clock_timestamp() - interval '30 minutes 20 seconds', clock_timestamp() - interval '30 minutes 20 seconds', false, false, 'app-2', 'v0.9.0', 'the sink does not reach its broker')`)
	exec(ctx, `
insert into {{dead_letters}} (state, held, source, consumer, topic, message_id, key, payload, created_at, died_at, reason, error, attempts, fingerprint)
select 'dead', false, 'consumer', 'billing', 'orders', 'paid-' || i, 'customer-' || i, '{}', clock_timestamp() - interval '9 hours', clock_timestamp() - interval '8 hours',
	'failed', 'handler: insert into invoices: pq: duplicate key value violates unique constraint "invoices_number_key"', 5, '5b1c0f2a9d3e4f60'
from generate_series(1, 40) i`)
	exec(ctx, `
insert into {{dead_letters}} (state, held, source, consumer, topic, message_id, key, payload, created_at, died_at, reason, error, attempts, fingerprint)
select 'dead', false, 'consumer', 'shipping', 'orders', 'ship-' || i, 'customer-' || i, '{}', clock_timestamp() - interval '9 hours', clock_timestamp() - interval '6 hours',
	'permanent', 'no address', 1, '9c77e1b2a4d05836'
from generate_series(1, 7) i`)
	exec(ctx, `drop index {{inbox_received}}`) // what the doctor finds
	exec(ctx, `alter sequence {{outbox_id}} cache 10`)
}
