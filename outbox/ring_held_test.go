package outbox_test

import (
	"bytes"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// pgDump returns the path of the pg_dump that belongs to the server, or one that is
// installed.
func (p *fixture) pgDump(t *testing.T) string {
	t.Helper()
	var dir string
	if err := p.db.QueryRowContext(t.Context(), `select setting from pg_config where name = 'BINDIR'`).Scan(&dir); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "pg_dump")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	path, err := exec.LookPath("pg_dump")
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// A dump takes ACCESS SHARE on everything at its start and keeps it to its end.
// This one is a real pg_dump, which does not get on because nobody takes what it
// writes. Meanwhile the outbox works, upkeep included, and the dump is whole.
func TestRing_WorksBesideARealDump(t *testing.T) {
	t.Parallel()
	p := ring(t)
	for turn := range int64(3) {
		p.leaveDead(t, turn)
	}
	p.enter(t, 3)
	large := make([]byte, 1<<20) // more than a pipe holds
	before := newMessage("before the dump", "")
	before.Payload = large
	p.publish(t, before)

	dump := exec.Command(p.pgDump(t), "--data-only", "--schema="+p.cfg.Database.Schema, plainURL(t, p.dsn))
	out, err := dump.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var complaints bytes.Buffer
	dump.Stderr = &complaints
	if err := dump.Start(); err != nil {
		t.Fatal(err)
	}
	defer dump.Process.Kill()
	eventually(t, "the dump holds its locks", func() bool {
		return p.count(t, `select count(distinct l.relation) from pg_locks l join pg_stat_activity a on a.pid = l.pid
			where a.application_name = 'pg_dump' and l.granted and l.relation in ('{{outbox_0}}'::regclass, '{{outbox_1}}'::regclass, '{{outbox_2}}'::regclass, '{{scheduled}}'::regclass)`) == 4
	})

	begin := time.Now()
	done := p.maintain(t)
	if done.Truncated != 0 || done.Blocked != 3 {
		t.Errorf("the upkeep did %+v", done)
	}
	held, err := p.queue.Held(t.Context())
	if err != nil || len(held.Blocked) == 0 {
		t.Fatalf("%+v, %v", held, err)
	}
	found := false
	for _, h := range held.Blocked {
		found = found || h.Application == "pg_dump" && h.PID > 0 && h.Age > 0 && h.Kind == "session"
	}
	if !found {
		t.Errorf("the dump is not among %+v", held.Blocked)
	}
	p.publish(t, newMessage("during the dump", ""))
	if n := len(p.read(t)); n != 2 {
		t.Errorf("%d rows", n)
	}
	p.remove(t, refs(p.read(t))...)
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("it took %v beside the dump", took)
	}

	text, err := io.ReadAll(out)
	if err != nil {
		t.Fatal(err)
	}
	if err := dump.Wait(); err != nil {
		t.Fatalf("%v: %s", err, complaints.String())
	}
	if !bytes.Contains(text, []byte("before the dump")) || bytes.Contains(text, []byte("during the dump")) {
		t.Error("the dump does not hold what was committed when it began")
	}
	eventually(t, "the ring is truncated", func() bool { return p.maintain(t).Blocked == 0 && p.size(t, 0)+p.size(t, 1)+p.size(t, 2) == 0 })
}

// plainURL removes what is not libpq's.
func plainURL(t *testing.T, dsn string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.RawQuery = "sslmode=" + u.Query().Get("sslmode")
	return u.String()
}

// An attempt for a lock makes readers wait behind it. While somebody holds a
// partition for long, attempts become rare.
func TestRing_AsksLessAndLessForALockThatIsHeld(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.leaveDead(t, 0)
	p.enter(t, 1)
	tx, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	_, err = tx.ExecContext(t.Context(), p.expand(t, `lock table {{outbox_0}} in access share mode`))
	expectNoError(t, err)
	attempts, rounds := 0, 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); rounds++ {
		p.tap.sent()
		if done := p.maintain(t); done.Blocked != 1 {
			t.Fatalf("the upkeep did %+v", done)
		}
		for _, s := range p.tap.sent() {
			if strings.HasSuffix(s.text, "access exclusive mode") {
				attempts++
			}
		}
	}
	// One second holds some eight attempts of 10 to 160 ms. After that each waits as
	// long as it has lasted already.
	if attempts < 3 || attempts > 12 || rounds < 2*attempts {
		t.Errorf("%d attempts in %d rounds", attempts, rounds)
	}
	expectNoError(t, tx.Rollback())
	eventually(t, "the partition is truncated", func() bool { return p.maintain(t).Truncated == 1 })
	if held, err := p.queue.Held(t.Context()); err != nil || len(held.Blocked) != 0 {
		t.Errorf("%+v, %v", held, err)
	}
}

func TestHeld_NamesTheOldestSnapshotAndWhoBlocks(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t, "max_prepared_transactions=5")
	p := newFixture(t, &pq.Driver{}, server.DSN(), outbox.Config{Database: oncemill.Config{Dialect: oncemill.PostgreSQL}})
	p.url = func(params ...string) string { return server.DSN() + strings.Join(params, "") }
	p.use(t, p.db, func(cfg *outbox.Config) { cfg.History = outbox.NoHistory })
	held := func() outboxstore.Held {
		t.Helper()
		h, err := p.queue.Held(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	eventually(t, "nobody holds anything", func() bool { h := held(); return h.Oldest == nil && h.Blocked == nil })

	other := p.open(t, "&application_name=reporting")
	tx, err := other.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	pid := backend(t, tx)
	_, err = tx.ExecContext(t.Context(), `create table report (id int)`)
	expectNoError(t, err)
	h := held()
	if h.Oldest == nil || h.Oldest.Application != "reporting" || h.Oldest.PID != pid || h.Oldest.State != "idle in transaction" || h.Oldest.Age <= 0 {
		t.Errorf("%+v", h.Oldest)
	}
	if h.Blocked != nil {
		t.Errorf("blocked by %+v", h.Blocked)
	}
	expectNoError(t, tx.Rollback())

	p.leaveDead(t, 0)
	p.enter(t, 1)
	conn, err := p.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, text := range []string{`begin`, p.expand(t, `lock table {{outbox_0}} in row exclusive mode`), `create table left_behind (id int)`, `prepare transaction 'forgotten'`} {
		if _, err := conn.ExecContext(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	if done := p.maintain(t); done.Blocked != 1 {
		t.Errorf("the upkeep did %+v", done)
	}
	h = held()
	for _, found := range append(h.Blocked, *h.Oldest) {
		if found.Kind != "prepared transaction" || found.Application != "forgotten" || found.PID != 0 || found.Age <= 0 {
			t.Errorf("%+v", found)
		}
	}
	if len(h.Blocked) != 1 {
		t.Errorf("blocked by %+v", h.Blocked)
	}
	p.exec(t, `rollback prepared 'forgotten'`)
}

// More than four partitions' ids are owed: ids have lapped the ring, and each
// partition holds rows of two turns. Nothing is truncated, lost or reordered.
func TestRing_ABacklogThatLapsTheRingComesWhole(t *testing.T) {
	t.Parallel()
	p := ring(t)
	fill := func(first, last, payload int) { // enough bytes for a truncation
		p.exec(t, `insert into {{outbox}} (lane, topic, message_id, key, payload)
			select i % 32, 'orders', i::text, 'key ' || i % 32, convert_to(repeat('x', $1::int), 'UTF8') from generate_series($2::int, $3::int) i`, payload, first, last)
	}
	n, lapped := 4*idsPerPartition+20_000, 20_000
	if testserver.Long() {
		fill(1, n, 100)
	} else { // the ids jump to the next partition after a thousand rows, each of which takes a page
		const each = 1200
		n, lapped = 5*each, each
		p.spread(t)
		for turn := range 5 {
			p.enter(t, int64(turn))
			fill(turn*each+1, (turn+1)*each, 1000)
		}
	}
	if turns := p.count(t, `select count(distinct id / $1) from {{outbox_0}}`, idsPerPartition); turns != 2 {
		t.Errorf("rows of %d turns in partition 0: the ring is not lapped", turns)
	}
	p.expectTruncated(t, 0)
	got, latest := 0, map[string]int{}
	for {
		rows := p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 1000, Bytes: 1 << 30})
		if len(rows) == 0 {
			break
		}
		for _, r := range rows {
			var number int
			if _, err := fmt.Sscan(r.MessageID, &number); err != nil {
				t.Fatal(err)
			}
			if before, ok := latest[r.Key]; ok && number != before+32 {
				t.Fatalf("%d comes after %d", number, before)
			}
			latest[r.Key] = number
		}
		got += len(rows)
		p.remove(t, refs(rows)...)
		if done := p.maintain(t); done.Truncated > 0 && got < lapped {
			t.Errorf("%+v with %d of %d rows delivered", done, got, n)
		}
	}
	if got != n {
		t.Errorf("%d rows of %d", got, n)
	}
	eventually(t, "all but the last partition are truncated", func() bool {
		p.maintain(t)
		return p.size(t, 1)+p.size(t, 2)+p.size(t, 3) == 0
	})
}
