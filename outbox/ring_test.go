package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

const idsPerPartition = 1 << 16

// ring is a PostgreSQL whose default isolation breaks a naive truncation.
func ring(t *testing.T) *fixture {
	t.Helper()
	p := onPostgres(t, "binary_parameters=yes", "default_transaction_isolation=repeatable read")
	p.use(t, p.db, func(cfg *outbox.Config) {
		cfg.History = outbox.NoHistory
		cfg.Truncate = outbox.TruncateAlways // other tests' servers may have standbys
	})
	return p
}

// spread makes each row of more than 800 bytes take a page, so that few dead rows are
// as many bytes as it takes to make a truncation worth it.
func (p *fixture) spread(t *testing.T) {
	t.Helper()
	for i := range 4 {
		p.exec(t, fmt.Sprintf(`alter table {{outbox_%d}} set (fillfactor = 10)`, i))
	}
}

// enter makes the next id the first of the given turn: turn 0 is partition 0 for
// the first time, turn 5 partition 1 for the second.
func (p *fixture) enter(t *testing.T, turn int64) {
	t.Helper()
	if turn == 0 {
		p.exec(t, `select setval('{{outbox_id}}', 1, false)`)
		return
	}
	p.exec(t, `select setval('{{outbox_id}}', $1, false)`, turn*idsPerPartition)
}

// leaveDead leaves more than 8 MiB of dead rows in the partition of a turn, if each takes a
// page.
func (p *fixture) leaveDead(t *testing.T, turn int64) {
	t.Helper()
	p.exec(t, `alter table {{outbox_`+fmt.Sprint(turn%4)+`}} set (autovacuum_enabled = off)`)
	p.enter(t, turn)
	p.spread(t)
	p.exec(t, `insert into {{outbox}} (lane, topic, message_id, payload)
		select i % 32, 'orders', i::text, convert_to(repeat('x', 1500), 'UTF8') from generate_series(1, 1100) i`)
	p.exec(t, `delete from {{outbox}}`)
	if n := p.size(t, turn); n < 8<<20 {
		t.Fatalf("only %d bytes are dead: the test shows nothing", n)
	}
}

// size returns the bytes of the partition of a turn.
func (p *fixture) size(t *testing.T, turn int64) int {
	t.Helper()
	return p.count(t, fmt.Sprintf(`select pg_relation_size('{{outbox_%d}}')`, turn%4))
}

// expectTruncated lets the upkeep try until it has truncated that many partitions, or
// meets no lock: vacuum, which the server starts when it likes, locks partitions too.
func (p *fixture) expectTruncated(t *testing.T, want int) {
	t.Helper()
	truncated := 0
	eventually(t, "the upkeep truncates or meets no lock", func() bool {
		done := p.maintain(t)
		truncated += done.Truncated
		return truncated >= want || done.Blocked == 0
	})
	if truncated != want {
		t.Errorf("%d partitions truncated, want %d", truncated, want)
	}
}

func TestRing_IDsGoRoundThePartitions(t *testing.T) {
	t.Parallel()
	p := ring(t)
	for turn := range int64(6) {
		p.enter(t, turn)
		before := p.count(t, fmt.Sprintf(`select count(*) from {{outbox_%d}}`, turn%4))
		p.publish(t, newMessage(fmt.Sprint("first of ", turn), ""))
		p.exec(t, `select setval('{{outbox_id}}', $1, true)`, (turn+1)*idsPerPartition-2)
		p.publish(t, newMessage(fmt.Sprint("last of ", turn), ""))
		if n := p.count(t, fmt.Sprintf(`select count(*) from {{outbox_%d}}`, turn%4)); n != before+2 {
			t.Errorf("turn %d: %d rows in its partition, %d before", turn, n, before)
		}
	}
	if n := len(p.read(t)); n != 12 {
		t.Errorf("%d rows", n)
	}
}

func TestRing_TruncatesDeadPartitionsThatAreNotBeingWritten(t *testing.T) {
	t.Parallel()
	p := ring(t)
	for turn := range int64(4) {
		p.leaveDead(t, turn)
	}
	p.expectTruncated(t, 3)
	for turn := range int64(3) {
		if n := p.size(t, turn); n != 0 {
			t.Errorf("partition %d has %d bytes", turn, n)
		}
	}
	if p.size(t, 3) == 0 {
		t.Error("the partition being written was truncated")
	}
	p.enter(t, 4)
	p.publish(t, newMessage("in turn 4", ""))
	p.expectTruncated(t, 1) // now that of turn 3
	p.expectTruncated(t, 0)
	expectIDs(t, p.read(t), "in turn 4")
}

func TestRing_LeavesPartitionsThatHoldARow(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.leaveDead(t, 1)
	p.publish(t, newMessage("owed", ""))
	p.enter(t, 2)
	p.expectTruncated(t, 0)
	expectIDs(t, p.read(t), "owed")
	p.remove(t, p.read(t)[0].Ref)
	p.expectTruncated(t, 1)
}

func TestRing_LeavesSmallPartitionsAlone(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.publish(t, messages("m", 100)...)
	p.remove(t, refs(p.read(t))...)
	p.enter(t, 2)
	p.tap.sent()
	p.expectTruncated(t, 0)
	for _, s := range p.tap.sent() {
		if strings.HasPrefix(s.text, "lock") || strings.HasPrefix(s.text, "truncate") {
			t.Errorf("sent %s", s.text)
		}
	}
}

func TestRing_PassesOverAPartitionWithAnOpenWriter(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.leaveDead(t, 0)
	p.leaveDead(t, 1)
	tx, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	expectNoError(t, p.box.Publisher(tx).Publish("orders", newMessage("late", "")))
	p.enter(t, 2)
	start := time.Now()
	p.expectTruncated(t, 1) // partition 0 does not wait for partition 1
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	if p.size(t, 1) == 0 {
		t.Error("the writer's partition was truncated")
	}
	expectNoError(t, tx.Commit())
	p.expectTruncated(t, 0)
	expectIDs(t, p.read(t), "late")
}

// A row may be committed into the partition at any moment of the upkeep's
// transaction, as when the ring comes round while a machine sleeps.
func TestRing_NeverDestroysACommittedRow(t *testing.T) {
	t.Parallel()
	moments := map[string]string{ // the statement of Maintain before which the row is committed
		"before the first look":    "select not exists",
		"between look and lock":    "lock table",
		"while the guard is asked": "",
	}
	for name, moment := range moments {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := ring(t)
			elsewhere := p.open(t)
			p.leaveDead(t, 1)
			p.enter(t, 3)
			committed := false
			commit := func() {
				if committed {
					return
				}
				committed = true
				p.tap.onStatement(nil)
				_, err := elsewhere.ExecContext(t.Context(), p.expand(t, `insert into {{outbox}} (id, lane, topic, message_id, payload) values ($1, 0, 'orders', 'committed', '')`), 5*idsPerPartition)
				expectNoError(t, err)
			}
			if moment != "" {
				p.tap.onStatement(func(text string) {
					if strings.HasPrefix(text, moment) {
						commit()
					}
				})
			}
			// The guard's statement takes the snapshot of a REPEATABLE READ transaction.
			guard := func(ctx context.Context, tx *sql.Tx) (bool, error) {
				backend(t, tx)
				if moment == "" {
					commit()
				}
				return true, nil
			}
			done, err := p.queue.Maintain(t.Context(), guard)
			if err != nil || done.Truncated != 0 || !committed {
				t.Errorf("%+v, %v, committed: %v", done, err, committed)
			}
			expectIDs(t, p.read(t), "committed")
		})
	}
}

// From its last look to its end no row comes: writers wait for the upkeep, which is short.
func TestRing_KeepsWritersOutAfterItsLastLook(t *testing.T) {
	t.Parallel()
	p := ring(t)
	elsewhere := p.open(t, "lock_timeout=50")
	p.leaveDead(t, 1)
	p.enter(t, 3)
	tried := false
	p.tap.onStatement(func(text string) {
		if tried || !strings.Contains(text, "in access exclusive mode") {
			return
		}
		tried = true
		_, err := elsewhere.ExecContext(t.Context(), p.expand(t, `insert into {{outbox}} (id, lane, topic, message_id, payload) values ($1, 0, 'orders', 'late', '')`), 5*idsPerPartition)
		if !sqlerr.TimedOut(err) {
			t.Errorf("a writer between look and truncation: %v", err)
		}
	})
	p.expectTruncated(t, 1)
	if !tried {
		t.Error("nothing was locked: the test shows nothing")
	}
}

// What the test above would find in a version that locks and looks, but in one
// transaction of the server's default isolation.
func TestRing_ANaiveTruncationDestroysACommittedRow(t *testing.T) {
	t.Parallel()
	for name, late := range map[string]sql.IsolationLevel{"default": sql.LevelDefault, "read committed": sql.LevelReadCommitted} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := ring(t)
			tx, err := p.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: late})
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback()
			empty := func() (empty bool) {
				expectNoError(t, tx.QueryRowContext(t.Context(), p.expand(t, `select not exists (select from {{outbox_1}})`)).Scan(&empty))
				return empty
			}
			backend(t, tx) // as the guard does
			p.enter(t, 1)
			p.publish(t, newMessage("committed", ""))
			_, err = tx.ExecContext(t.Context(), p.expand(t, `lock table {{outbox_1}} in access exclusive mode`))
			expectNoError(t, err)
			if empty() {
				_, err := tx.ExecContext(t.Context(), p.expand(t, `truncate {{outbox_1}}`))
				expectNoError(t, err)
			}
			expectNoError(t, tx.Commit())
			want := 1
			if late == sql.LevelDefault {
				want = 0 // destroyed
			}
			if n := len(p.read(t)); n != want {
				t.Errorf("%d rows are left, want %d: the tests of the ring show nothing", n, want)
			}
		})
	}
}

// A transaction that is open anywhere in the cluster keeps VACUUM from removing
// dead rows, but not the ring.
func TestRing_AHeldSnapshotDoesNotStopTruncation(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.exec(t, `create table report (id int)`)
	holder, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback()
	_, err = holder.ExecContext(t.Context(), `insert into report values (1)`) // a snapshot and a transaction id
	expectNoError(t, err)
	for turn := range int64(4) {
		p.leaveDead(t, turn)
	}
	p.exec(t, `vacuum {{outbox_0}}`)
	if p.size(t, 0) == 0 {
		t.Error("vacuum removed the rows: the test shows nothing")
	}
	p.enter(t, 4)
	p.publish(t, newMessage("next", ""))
	p.expectTruncated(t, 3) // all but the one being written
	for turn := int64(1); turn < 4; turn++ {
		if n := p.size(t, turn); n != 0 {
			t.Errorf("partition %d has %d bytes", turn, n)
		}
	}
	expectIDs(t, p.read(t), "next")
}

// A dump has ACCESS SHARE on everything. It is not waited for, and readers are
// not kept waiting behind a lock that is not granted.
func TestRing_ADumpIsPassedOver(t *testing.T) {
	t.Parallel()
	p := ring(t)
	for turn := range int64(3) {
		p.leaveDead(t, turn)
	}
	p.enter(t, 3)
	dump, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer dump.Rollback()
	_, err = dump.ExecContext(t.Context(), p.expand(t, `lock table {{outbox}} in access share mode`))
	expectNoError(t, err)
	start := time.Now()
	p.expectTruncated(t, 0)
	p.publish(t, newMessage("a", ""))
	expectIDs(t, p.read(t), "a")
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	expectNoError(t, dump.Rollback())
	p.expectTruncated(t, 3)
}

func TestMaintain_DoesNothingWithoutTheLease(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		refuse, asked := errors.New("refuse"), 0
		guards := map[string]func(context.Context, *sql.Tx) (bool, error){
			"not held": func(context.Context, *sql.Tx) (bool, error) { asked++; return false, nil },
			"error":    func(context.Context, *sql.Tx) (bool, error) { asked++; return false, refuse },
		}
		p.age(t)
		if !p.isSQLite() {
			p.leaveDead(t, 0)
			p.enter(t, 1)
		}
		before := p.count(t, `select count(*) from {{outbox_history}}`)
		for name, guard := range guards {
			done, err := p.queue.Maintain(t.Context(), guard)
			if done != (outboxstore.Maintained{}) {
				t.Errorf("%s: %+v", name, done)
			}
			if name == "error" {
				expectError(t, err, refuse)
			} else {
				expectNoError(t, err)
			}
		}
		if asked == 0 {
			t.Error("the guard was not asked: the test shows nothing")
		}
		if n := p.count(t, `select count(*) from {{outbox_history}}`); n != before {
			t.Errorf("%d rows in the history, were %d", n, before)
		}
		if !p.isSQLite() && p.size(t, 0) == 0 {
			t.Error("a partition was truncated")
		}
		if done := p.maintain(t); done == (outboxstore.Maintained{}) {
			t.Error("there was nothing to do: the test shows nothing")
		}
	})
}

// A process that freezes while it holds the lock for a truncation keeps others
// waiting for no longer than the server lets it idle.
func TestMaintain_AFrozenProcessIsEndedByTheServer(t *testing.T) {
	t.Parallel()
	p := ring(t)
	p.leaveDead(t, 0)
	p.enter(t, 1)
	elsewhere := p.open(t)
	box, err := outbox.New(elsewhere, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	frozen := make(chan struct{})
	p.tap.onStatement(func(text string) {
		if !strings.HasPrefix(text, "truncate") {
			return
		}
		p.tap.onStatement(nil)
		close(frozen)
		// Others work on all partitions while this is frozen.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := box.RunInTx(ctx, func(_ context.Context, tx *sql.Tx) error {
			return box.Publisher(tx).Publish("orders", newMessage("beside it", ""))
		})
		expectNoError(t, err)
		rows, err := outboxqueue.Of(box).Read(ctx, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 10, Bytes: 1 << 20})
		expectNoError(t, err)
		expectIDs(t, rows, "beside it")
	})
	if done, err := p.queue.Maintain(t.Context(), always); err == nil && done.Truncated > 0 {
		t.Error("the server did not end the transaction")
	}
	select {
	case <-frozen:
	default:
		t.Error("nothing was truncated: the test shows nothing")
	}
	p.expectTruncated(t, 1)
}
