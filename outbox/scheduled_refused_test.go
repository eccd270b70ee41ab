package outbox_test

import (
	"cmp"
	"database/sql"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// refuses has the outbox take no message whose id begins with bad. So many of them are
// known one by one.
func (p *fixture) refuses(t *testing.T, known int) {
	t.Helper()
	p.slowInsert(t, `new.message_id like 'bad%'`, `raise exception 'not so' using errcode = 'check_violation'`)
	p.cfg.Logger = slog.New(slog.DiscardHandler)
	p.use(t, p.db, nil)
	p.queue.KnowRefused(known)
}

// More messages cannot be moved than are known one by one: others go on, those of their
// keys wait, and all are moved once they can be.
func TestMoveDue_ManyThatAreRefusedHoldUpTheirKeysAlone(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		const known, refused = 20, 50
		p.slowInsert(t, `new.message_id like 'bad%'`, `raise exception 'not so' using errcode = 'check_violation'`)
		var log syncBuffer
		p.cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		p.use(t, p.db, nil)
		p.queue.KnowRefused(known)
		p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
			select now() - interval '1 hour' + i * interval '1 second', 12, 'orders', kind || i, 'k' || i || extra, ''
			from generate_series(1, $1::int) i, (values ('bad', ''), ('behind', ''), ('other', 'x')) v (kind, extra)`, refused)
		calls := 0
		for ; p.scheduled(t) > 2*refused && calls < refused/2; calls++ {
			p.moveWithin(t, usualLimit)
		}
		if rows := p.read(t); len(rows) != refused || slices.ContainsFunc(rows, func(r outboxstore.Row) bool { return !strings.HasPrefix(r.MessageID, "other") }) {
			t.Fatalf("%d calls moved %v", calls, ids(rows))
		}
		if n := strings.Count(log.String(), "cannot be moved"); n > refused/2 {
			t.Errorf("%d lines were logged", n)
		}
		p.exec(t, `drop trigger slow_insert on {{outbox}}`)
		p.queue.TryRefusedNow()
		for calls = 0; p.scheduled(t) > 0 && calls < 20*refused; calls++ {
			p.moveWithin(t, usualLimit)
		}
		at := map[string]int64{}
		for _, r := range p.read(t) {
			at[r.MessageID] = r.ID
		}
		for i := range refused {
			if bad, behind := at[fmt.Sprint("bad", i+1)], at[fmt.Sprint("behind", i+1)]; bad == 0 || behind < bad {
				t.Errorf("bad%d came at %d, and what is behind it at %d", i+1, bad, behind)
			}
		}
		p.exec(t, `drop function slow_insert`)
	})
}

// What waits for a message that was put aside keeps nobody busy.
func TestMoveDue_LooksForNothingBehindOneThatIsRefused(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.slowInsert(t, `new.message_id like 'bad%'`, `raise exception 'not so' using errcode = 'check_violation'`)
		p.cfg.Logger = slog.New(slog.DiscardHandler)
		p.use(t, p.db, nil)
		past := p.now(t).Add(-time.Hour)
		p.publish(t, at("bad", "k", past), at("behind", "k", past.Add(time.Second)))
		var moved outboxstore.Moved
		for calls := 0; calls < 20 && (moved.Failed || moved.Next <= 50*time.Millisecond); calls++ {
			moved = p.moveWithin(t, usualLimit)
		}
		if p.scheduled(t) != 2 || moved.Next <= 50*time.Millisecond {
			t.Errorf("%d wait, and the next look is in %v", p.scheduled(t), moved.Next)
		}
	})
}

// More keys wait for such messages than a look passes over, small ones and large ones, and
// among what is left to rounds: others go on, now and while a round goes on.
func TestMoveDue_ManyThatWaitForRefusedOnesHoldUpNobody(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		known := testserver.Rounds(3, 20)
		refused, waiting := testserver.Rounds(40, 300), testserver.Rounds(700, 6000) // more than are looked at at a time
		p.refuses(t, known)
		p.queue.PassOver(known)
		schedule := func(id, key string, minute, n, bytes int) {
			p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
				select now() - interval '2 hours' + $3::int * interval '1 minute' + i * interval '1 millisecond', 12, 'orders', $1::text || i, $2::text || 1 + (i - 1) % $6::int, decode(repeat('00', $5::int), 'hex')
				from generate_series(1, $4::int) i`, id, key, minute, n, bytes, refused)
		}
		schedule("bad", "k", 0, refused, 1)
		schedule("small", "k", 1, waiting, 1)
		schedule("bad again", "again", 2, refused, 1)
		schedule("large", "k", 3, known+4, 9<<20)
		schedule("small again", "again", 4, waiting, 1)
		stuck := 2*(refused+waiting) + known + 4
		others := 0
		moveOthers := func(when string) {
			t.Helper()
			schedule(fmt.Sprint("other ", when), "other", 5, 50, 1)
			schedule(fmt.Sprint("large other ", when), "large other", 5, 2, 9<<20)
			others += 52
			calls := 0
			for ; p.scheduled(t) > stuck && calls < refused; calls++ {
				p.moveWithin(t, usualLimit)
			}
			if n := p.scheduled(t); n != stuck || len(p.read(t)) != others {
				t.Fatalf("%s: after %d calls %d wait, and %d of %d others were moved", when, calls, n-stuck, len(p.read(t)), others)
			}
		}
		moveOthers("at first")
		p.queue.TryRefusedNow()
		moveOthers("in a round")
		moveAll := func(what string, rest int) {
			t.Helper()
			calls := 0
			for ; p.scheduled(t) > rest && calls < 3*refused; calls++ {
				if calls%(3*known) == 0 {
					p.queue.TryRefusedNow()
				}
				p.moveWithin(t, usualLimit)
			}
			if n := p.scheduled(t); n != rest {
				t.Fatalf("%s: after %d calls %d are left, want %d", what, calls, n, rest)
			}
		}
		p.exec(t, `alter table {{outbox}} disable trigger slow_insert`)
		p.exec(t, `create trigger refuse before insert on {{outbox}} for each row when (new.message_id ~ '^bad[0-9]') execute function slow_insert()`)
		moveAll("those that others are still refused before", refused+waiting+known+4)
		p.exec(t, `drop trigger refuse on {{outbox}}`)
		moveAll("all", 0)
		at := map[string]int64{}
		for _, r := range p.read(t) {
			at[r.MessageID] = r.ID
		}
		for _, then := range []struct {
			first, last string
			n           int
		}{{"bad", "small", refused}, {"small", "large", known + 4}, {"bad again", "small again", refused}} {
			for i := range then.n {
				if first, last := at[fmt.Sprint(then.first, i+1)], at[fmt.Sprint(then.last, i+1)]; first == 0 || last < first {
					t.Fatalf("%s%d came at %d, and %s of its key at %d", then.first, i+1, first, then.last, last)
				}
			}
		}
		p.exec(t, `drop function slow_insert cascade`)
	})
}

// Whatever a trigger says, whether it says so at once or at the commit.
func TestMoveDue_ARefusalOfAnyKindHoldsUpItsKeyAlone(t *testing.T) {
	t.Parallel()
	for i, state := range []string{"check_violation", "45000", "insufficient_privilege", "38000", "0A000", "F0001", "42883", "55000", "08001", "58030"} {
		kinds := []string{`create trigger`, `create constraint trigger`}
		if !testserver.Long() {
			kinds = kinds[i%2:][:1]
		}
		for _, kind := range kinds {
			t.Run(state+" "+kind, func(t *testing.T) {
				t.Parallel()
				p := onPostgres(t)
				p.slowInsert(t, `new.message_id like 'bad%'`, fmt.Sprintf(`raise exception 'not so' using errcode = '%s'`, state))
				if kind != `create trigger` {
					p.exec(t, `drop trigger slow_insert on {{outbox}}`)
					p.exec(t, kind+` slow_insert after insert on {{outbox}} deferrable initially deferred for each row execute function slow_insert()`)
				}
				p.cfg.Logger = slog.New(slog.DiscardHandler)
				p.use(t, p.db, nil)
				past := p.now(t).Add(-time.Hour)
				p.publish(t, at("bad", "k", past), at("behind", "k", past), at("good", "other", past.Add(time.Second)))
				for range 3 {
					p.moveWithin(t, usualLimit)
				}
				expectIDs(t, p.read(t), "good")
			})
		}
	}
}

// A trigger waits for a row that an open transaction holds.
func TestMoveDue_OneThatWaitsForALockHoldsUpItsKeyAlone(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.exec(t, `create table counters (n int)`)
		p.exec(t, `insert into counters values (0)`)
		p.slowInsert(t, `new.message_id like 'bad%'`, `update counters set n = n + 1`)
		p.cfg.Logger = slog.New(slog.DiscardHandler)
		p.use(t, p.db, nil)
		past := p.now(t).Add(-time.Hour)
		p.publish(t, at("bad", "k", past), at("good", "other", past.Add(time.Second)))
		p.inTx(t, func(tx *sql.Tx) {
			_, err := tx.ExecContext(t.Context(), `update counters set n = n + 1`)
			expectNoError(t, err)
			for range 3 {
				p.moveWithin(t, usualLimit)
			}
			expectIDs(t, p.read(t), "good")
		})
		p.queue.TryRefusedNow()
		p.moveWithin(t, usualLimit)
		if n := p.scheduled(t); n != 0 {
			t.Errorf("%d wait when the lock is free", n)
		}
		p.exec(t, `drop table counters`)
		p.exec(t, `drop function slow_insert cascade`)
	})
}

// A round tries all that there is time for, however many bytes.
func TestMoveDue_ARoundPassesNothingOver(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		const known, refused, large = 5, 20, 300
		p.refuses(t, known)
		p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
			select now() - interval '1 hour' + i * interval '1 second', 12, 'orders', 'bad' || i, 'bad' || i, '' from generate_series(1, $1::int) i`, refused)
		p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
			select now() - interval '50 minutes' + i * interval '1 second', 12, 'orders', 'bad for now' || i, 'now' || i, decode(repeat('00', 100000), 'hex') from generate_series(1, $1::int) i`, large)
		settle := func() {
			for calls := 0; p.moveWithin(t, usualLimit).Failed; calls++ {
				if calls > 200 {
					t.Fatal("it does not settle")
				}
			}
		}
		settle()
		p.exec(t, `drop trigger slow_insert on {{outbox}}`)
		p.exec(t, `create trigger refuse before insert on {{outbox}} for each row when (new.message_id ~ '^bad[0-9]') execute function slow_insert()`)
		p.queue.TryRefusedNow()
		settle()
		if n := p.scheduled(t); n != refused {
			t.Errorf("%d wait after a round, want %d", n, refused)
		}
		p.exec(t, `drop function slow_insert cascade`)
	})
}

// What is due goes on while a round moves what was left to it.
func TestMoveDue_ARoundKeepsNobodyWaiting(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		const known, refused, behind = 2, 3, 2000
		p.refuses(t, known)
		schedule := func(id, key string, hours, n int) {
			p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
				select now() - $3::int * interval '1 hour' + i * interval '1 second', 12, 'orders', $1::text || i, $2::text || 1 + i % 3, '' from generate_series(1, $4::int) i`, id, key, hours, n)
		}
		schedule("bad", "k", 4, refused)
		schedule("behind", "k", 3, behind)
		schedule("bad later", "z", 1, refused)
		for range 12 {
			p.moveWithin(t, usualLimit)
		}
		p.exec(t, `drop trigger slow_insert on {{outbox}}`)
		p.queue.TryRefusedNow()
		p.publish(t, at("new", "new", p.now(t).Add(-time.Second)))
		isNew := func(r outboxstore.Row) bool { return r.MessageID == "new" }
		for p.scheduled(t) > 0 && !slices.ContainsFunc(p.read(t), isNew) {
			p.moveWithin(t, usualLimit)
		}
		if n := p.scheduled(t); n < behind/2 {
			t.Errorf("the new one came when %d others were left", n)
		}
		p.exec(t, `drop function slow_insert cascade`)
	})
}

// The call that has the time which a large message has asked for is the large message's.
func TestMoveDue_ALargeMessageHasTheTimeItAskedFor(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.slowInsert(t, `new.message_id like 'bad%'`, `raise exception 'not so' using errcode = 'check_violation'`)
		p.cfg.Logger = slog.New(slog.DiscardHandler)
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.MaxPayload = 64 << 20 })
		past := p.now(t).Add(-time.Hour)
		large := at("large", "k", past)
		large.Payload = make([]byte, 50<<20)
		p.publish(t, at("bad", "b", past.Add(-time.Second)), large)
		limit := usualLimit
		for calls := 0; p.scheduled(t) > 1; calls++ {
			if calls == 10 {
				t.Fatal("the large message was not moved")
			}
			p.publish(t, at(fmt.Sprint("small", calls), "s", past.Add(time.Minute)))
			p.queue.TryRefusedNow() // there are so many that one is always due
			limit = cmp.Or(p.moveWithin(t, limit).Limit, usualLimit)
		}
	})
}

// Large messages whose keys wait are passed over in ever larger steps, not one by one.
func TestMoveDue_PassesLargeOnesThatWaitInFewLooks(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		const known, waiting = 1, 24
		p.refuses(t, known)
		schedule := func(id, key string, hours, n, bytes int) {
			p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
				select now() - $3::int * interval '1 hour' + i * interval '1 second', 12, 'orders', $1::text || i, $2::text || i, decode(repeat('00', $5::int), 'hex') from generate_series(1, $4::int) i`, id, key, hours, n, bytes)
		}
		schedule("bad", "k", 4, waiting, 1)
		schedule("large", "k", 3, waiting, 9<<20)
		schedule("good", "good", 2, 1, 9<<20)
		looks := 0
		for calls := 0; p.scheduled(t) > 2*waiting; calls++ {
			if calls == 100 {
				t.Fatal("the good one was not moved")
			}
			p.tap.sent()
			p.moveWithin(t, usualLimit)
			n := 0
			for _, statement := range p.tap.sent() {
				if strings.Contains(statement.text, "with free as materialized") {
					n++
				}
			}
			looks = max(looks, n)
		}
		if looks > waiting/2 {
			t.Errorf("%d looks of one call passed %d over", looks, waiting)
		}
		p.exec(t, `drop function slow_insert cascade`)
	})
}
