package outbox_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// day returns the day that is n days from now, by the database's clock.
func (p *fixture) day(t *testing.T, n int) time.Time {
	t.Helper()
	var now time.Time
	if err := p.db.QueryRowContext(t.Context(), `select clock_timestamp()`).Scan(&now); err != nil {
		t.Fatal(err)
	}
	return now.UTC().Truncate(24*time.Hour).AddDate(0, 0, n)
}

func dayTable(day time.Time) string { return "{{outbox_history_" + day.Format("20060102") + "}}" }

// addDay makes the partition of a day of the history and puts a row into it.
func (p *fixture) addDay(t *testing.T, n int) {
	t.Helper()
	day := p.day(t, n)
	p.exec(t, fmt.Sprintf(`create table %s partition of {{outbox_history}} for values from ('%s 00:00:00+00') to ('%s 00:00:00+00')`,
		dayTable(day), day.Format(time.DateOnly), day.AddDate(0, 0, 1).Format(time.DateOnly)))
	p.remember(t, fmt.Sprint("day ", n), day.Add(12*time.Hour))
}

// remember writes a row into the history.
func (p *fixture) remember(t *testing.T, id string, at time.Time) {
	t.Helper()
	var when any = at
	if p.isSQLite() {
		when = at.UnixMicro()
	}
	p.exec(t, `insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
		values (1, 1, 'orders', $1, '', $2, $2, $3, $3)`, id, []byte{}, when)
}

// age puts something into the history that is past its time.
func (p *fixture) age(t *testing.T) {
	t.Helper()
	if p.isSQLite() {
		p.remember(t, "old", time.Now().Add(-100*24*time.Hour))
		return
	}
	p.addDay(t, -100)
	p.exec(t, `drop table `+dayTable(p.day(t, 3)))
}

func (p *fixture) remembered(t *testing.T) string {
	t.Helper()
	return strings.Join(testserver.Texts(t, p.db, p.expand(t, `select message_id from {{outbox_history}} order by relayed_at`)), ", ")
}

func TestHistory_DaysAreMadeAhead(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		for n := range 4 {
			p.exec(t, `drop table `+dayTable(p.day(t, n)))
		}
		if done := p.maintain(t); done.Made != 4 {
			t.Errorf("%d days were made, want today and three ahead", done.Made)
		}
		if done := p.maintain(t); done != (outboxstore.Maintained{}) {
			t.Errorf("the second round did %+v", done)
		}
		// A day is one of UTC, whatever the session's time zone.
		for n := range 4 {
			day := p.day(t, n)
			p.remember(t, "first", day)
			p.remember(t, "last", day.AddDate(0, 0, 1).Add(-time.Microsecond))
			if got := p.count(t, `select count(*) from `+dayTable(day)); got != 2 {
				t.Errorf("day %d holds %d rows", n, got)
			}
		}
		// Each has the indexes that serve the search by id and by time.
		if n := p.count(t, `select count(*) from pg_index i join pg_inherits h on h.inhrelid = i.indrelid where h.inhparent = '{{outbox_history}}'::regclass and i.indisvalid`); n != 8 {
			t.Errorf("%d indexes", n)
		}
	})
}

// A step that fails each time, here that of the ring, must not keep the others from being
// done: without partitions of the days ahead the history would end.
func TestMaintain_AFailedStepSkipsNoOther(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		for n := range 4 {
			p.exec(t, `drop table `+dayTable(p.day(t, n)))
		}
		p.exec(t, `alter table {{outbox_0}} rename to elsewhere`)
		done, err := outboxqueue.Of(p.box).Maintain(t.Context(), always)
		if err == nil || done.Made != 4 {
			t.Errorf("%d days were made, error %v; want 4 days, and what is wrong with the ring", done.Made, err)
		}
	})
}

func onEachPostgres(t *testing.T, test func(t *testing.T, p *fixture)) {
	t.Helper()
	t.Parallel()
	for _, name := range testserver.OneOf(t, "postgresql", "postgresql_other_defaults") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, databases[name](t))
		})
	}
}

// The default of 24 h keeps today and yesterday whole; the day before is emptied
// at once, and older ones go.
func TestHistory_ExpiredDaysAreEmptiedThenDropped(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		for n := -1; n >= -5; n-- {
			p.addDay(t, n)
		}
		p.remember(t, "today", p.day(t, 0))
		p.exec(t, `create table {{outbox_history_aside}} partition of {{outbox_history}} for values from ('2001-01-01') to ('2001-01-02')`)
		if done := p.maintain(t); done.Retired != 4 {
			t.Errorf("%d days were retired, want 4", done.Retired)
		}
		if got := p.remembered(t); got != "today, day -1" && got != "day -1, today" {
			t.Errorf("remembered: %s", got)
		}
		for n, want := range map[int]int{-1: 1, -2: 1, -3: 0, -4: 0, -5: 0} {
			if got := p.count(t, `select count(*) from pg_class where oid = to_regclass($1)`, p.expand(t, dayTable(p.day(t, n)))); got != want {
				t.Errorf("day %d: %d tables", n, got)
			}
		}
		if n := p.count(t, `select count(*) from pg_class where oid = to_regclass($1)`, p.expand(t, `{{outbox_history_aside}}`)); n != 1 {
			t.Error("a partition that is not one of ours was dropped")
		}
		if done := p.maintain(t); done != (outboxstore.Maintained{}) {
			t.Errorf("the second round did %+v", done)
		}
	})
}

func TestHistory_LongerRetentionKeepsMoreDays(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.History = 72 * time.Hour })
		for n := -1; n >= -6; n-- {
			p.addDay(t, n)
		}
		if done := p.maintain(t); done.Retired != 3 {
			t.Errorf("%d days were retired, want 3", done.Retired)
		}
		if got := p.remembered(t); got != "day -3, day -2, day -1" {
			t.Errorf("remembered: %s", got)
		}
	})
}

func TestHistory_AReaderOfAnExpiredDayIsNotWaitedFor(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.addDay(t, -2)
		p.addDay(t, -9)
		tx, err := p.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		_, err = tx.ExecContext(t.Context(), p.expand(t, `lock table {{outbox_history}} in access share mode`))
		expectNoError(t, err)
		start := time.Now()
		if done := p.maintain(t); done.Retired != 0 {
			t.Errorf("%d days were retired", done.Retired)
		}
		if took := time.Since(start); took > 5*time.Second {
			t.Errorf("it took %v", took)
		}
		expectNoError(t, tx.Rollback())
		retired := int64(0)
		testserver.Eventually(t, "2 days are retired", func() bool { // the server's own tasks may lock one for a moment
			retired += p.maintain(t).Retired
			return retired >= 2
		})
	})
}

// A transaction ends when others wait for their turn to write, and the next one asks for
// the lease again.
func TestHistory_OnSQLiteExpiredRowsAreDeletedInPieces(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	const expired = 100_000
	p.exec(t, fmt.Sprintf(`with recursive n (i) as (select 1 union all select i + 1 from n where i < %d)
		insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
		select i, 1, 'orders', 'old', '', x'', x'', 0, i from n`, expired-1))
	p.remember(t, "just expired", time.Now().Add(-25*time.Hour))
	p.remember(t, "kept", time.Now().Add(-23*time.Hour))

	waiting, stop := context.WithCancel(t.Context())
	var publishing sync.WaitGroup
	publishing.Go(func() {
		for n := 0; waiting.Err() == nil; n++ {
			p.publish(t, newMessage(fmt.Sprint(n), ""))
		}
	})
	var left []int
	leases := 2
	guard := func(ctx context.Context, tx *sql.Tx) (bool, error) {
		var n int
		err := tx.QueryRowContext(ctx, p.expand(t, `select count(*) from {{outbox_history}}`)).Scan(&n)
		left = append(left, n)
		leases--
		return leases >= 0, err
	}
	first, err := p.queue.Maintain(t.Context(), guard)
	if len(left) != 3 || left[0] != expired+1 || left[1] >= left[0] || left[2] >= left[1] || int(first.Retired) != left[0]-left[2] {
		t.Errorf("with a lease for two transactions: %d rows, %v; before each: %v", first.Retired, err, left)
	}
	leases = expired
	rest, err := p.queue.Maintain(t.Context(), guard)
	if first.Retired+rest.Retired != expired {
		t.Errorf("%d and %d rows, %v", first.Retired, rest.Retired, err)
	}
	stop()
	publishing.Wait()
	if got := p.remembered(t); got != "kept" {
		t.Errorf("remembered: %s", got)
	}
}

func TestMaintain_BySeveralAtOnceIsSafe(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		if !p.isSQLite() {
			for turn := range int64(3) {
				p.leaveDead(t, turn)
			}
			p.enter(t, 3)
			for n := range 4 {
				p.exec(t, `drop table `+dayTable(p.day(t, n)))
			}
			for n := -1; n >= -12; n-- {
				p.addDay(t, n)
			}
		}
		p.publish(t, newMessage("owed", ""))
		var workers sync.WaitGroup
		for range 4 {
			workers.Go(func() {
				for range 5 {
					_, err := p.queue.Maintain(t.Context(), always)
					expectNoError(t, err)
				}
			})
		}
		workers.Wait()
		p.maintain(t) // with nobody in the way
		if done := p.maintain(t); done != (outboxstore.Maintained{}) {
			t.Errorf("left to be done: %+v", done)
		}
		if got := p.remembered(t); !p.isSQLite() && got != "day -1" {
			t.Errorf("remembered: %s", got)
		}
		expectIDs(t, p.read(t), "owed")
	})
}

// The history serves search and audit; whatever is wrong with it, what was
// confirmed leaves the outbox, and what was not kept is counted.
func TestHistory_NeverStopsDelivery(t *testing.T) {
	breaks := map[string]func(t *testing.T, p *fixture){
		"its table is gone": func(t *testing.T, p *fixture) { p.exec(t, `drop table {{outbox_history}}`) },
		"it refuses every row": func(t *testing.T, p *fixture) {
			if p.isSQLite() {
				p.exec(t, `create trigger refuse before insert on {{outbox_history}} begin select raise(abort, 'refused'); end`)
				return
			}
			p.exec(t, `alter table {{outbox_history}} add constraint refuse check (id < 0) not valid`)
		},
		"it lacks the day": func(t *testing.T, p *fixture) {
			if p.isSQLite() {
				p.exec(t, `alter table {{outbox_history}} drop column metadata`)
				return
			}
			for n := range 4 {
				p.exec(t, `drop table `+dayTable(p.day(t, n)))
			}
		},
	}
	onEachDatabase(t, func(t *testing.T, base *fixture) {
		for name, destroy := range breaks {
			t.Run(name, func(t *testing.T) {
				p := base
				if name != "it refuses every row" {
					p = databases[strings.Split(t.Name(), "/")[1]](t)
				}
				var log syncBuffer
				p.use(t, p.db, func(cfg *outbox.Config) { cfg.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
				p.publish(t, messages("m", 10)...)
				rows := p.read(t)
				p.remove(t, rows[0].Ref)
				if log.String() != "" {
					t.Errorf("logged %q", log.String())
				}
				destroy(t, p)
				removal, err := p.queue.Remove(t.Context(), refs(rows))
				if err != nil || removal.Missed != 9 {
					t.Errorf("%d were missed, %v; want the 9 that were removed", removal.Missed, err)
				}
				expectIDs(t, p.read(t))
				if text := log.String(); !strings.Contains(text, "level=ERROR") || !strings.Contains(text, "history") || !strings.Contains(text, "rows=9") {
					t.Errorf("logged %q", text)
				}
				removal, err = p.queue.Remove(t.Context(), refs(rows))
				if err != nil || removal.Missed != 0 {
					t.Errorf("%d were missed, %v; nothing was left to remove", removal.Missed, err)
				}
			})
		}
	})
}

// A role without the rights is a broken history, too.
func TestHistory_RevokedRightsDoNotStopDelivery(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	role := "role_" + p.cfg.Database.Schema
	p.exec(t, `create role `+role)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		for _, text := range []string{`drop owned by ` + role, `drop role ` + role} {
			if _, err := p.db.ExecContext(ctx, text); err != nil {
				t.Error(err)
			}
		}
	})
	p.exec(t, `grant usage on schema {{schema}} to `+role)
	p.exec(t, `grant select, delete on {{outbox}} to `+role)
	p.exec(t, `grant select on {{outbox_history}} to `+role)
	p.publish(t, messages("m", 5)...)
	rows := p.read(t)
	p.cfg.Logger = slog.New(slog.DiscardHandler)
	box, err := outbox.New(p.open(t, "role="+role), p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	removal, err := outboxqueue.Of(box).Remove(t.Context(), refs(rows))
	if err != nil || removal.Missed != 5 {
		t.Errorf("%d were missed, %v", removal.Missed, err)
	}
	expectIDs(t, p.read(t))
}

// A connection that breaks says nothing about the history: nothing is removed
// without it, and the caller tries again.
func TestHistory_ABrokenConnectionIsNotABrokenHistory(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, messages("m", 5)...)
		rows := p.read(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := p.queue.Remove(ctx, refs(rows)); err == nil {
			t.Error("removed under a context that has ended")
		}
		if !p.isSQLite() {
			p.exec(t, `create function cut() returns trigger language plpgsql as $$ begin perform pg_terminate_backend(pg_backend_pid()); return new; end $$`)
			p.exec(t, `create trigger cut before insert on {{outbox_history}} for each row execute function cut()`)
			if removal, err := p.queue.Remove(t.Context(), refs(rows)); err == nil || removal.Missed != 0 {
				t.Errorf("%d were missed, %v", removal.Missed, err)
			}
			p.exec(t, `drop trigger cut on {{outbox_history}}`)
		}
		if n := len(p.read(t)); n != 5 {
			t.Errorf("%d rows are left", n)
		}
		p.remove(t, refs(rows)...)
		if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 5 {
			t.Errorf("%d rows in the history", n)
		}
	})
}

// syncBuffer is a log that may be written and read at once.
type syncBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// Large rows are freed a few at a time: each is as many pages as it has.
func TestHistory_OnSQLiteLargeRowsAreDeletedAFewAtATime(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	const expired = 10
	p.exec(t, fmt.Sprintf(`with recursive n (i) as (select 1 union all select i + 1 from n where i < %d)
		insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
		select i, 1, 'orders', 'old', '', zeroblob(%d), x'', 0, i from n`, expired, 1<<20))
	p.tap.sent()
	done, err := p.queue.Maintain(t.Context(), func(context.Context, *sql.Tx) (bool, error) { return true, nil })
	expectNoError(t, err)
	deletions := 0
	for _, s := range p.tap.sent() {
		if strings.Contains(s.text, p.expand(t, `delete from {{outbox_history}}`)) {
			deletions++
		}
	}
	if done.Retired != expired || deletions < 3 {
		t.Errorf("%d rows in %d statements", done.Retired, deletions)
	}
}
