package outbox_test

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// slowInsert makes each insert into the outbox whose row fulfils a condition execute
// a statement (PostgreSQL).
func (p *fixture) slowInsert(t *testing.T, when, do string) {
	t.Helper()
	p.exec(t, `create function slow_insert() returns trigger language plpgsql as $$ begin if `+when+` then `+do+`; end if; return new; end $$`)
	p.exec(t, `create trigger slow_insert after insert on {{outbox}} for each row execute function slow_insert()`)
}

// usualLimit is what a relay gives a call.
const usualLimit = 5 * time.Second

// moveWithin calls MoveDue as a relay does, with a limit, and again if that was too short on
// a busy machine.
func (p *fixture) moveWithin(t *testing.T, limit time.Duration) outboxstore.Moved {
	t.Helper()
	for try := 1; ; try++ {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		moved, err := p.queue.MoveDue(ctx, always)
		late := ctx.Err() != nil || sqlerr.Connection(err) // the server ended an idle transaction
		cancel()
		if err == nil {
			return moved
		}
		if !late || try == 20 {
			t.Fatal(err)
		}
		t.Logf("not within %v: %v", limit, err)
	}
}

// scheduleLarge publishes a message of 9 MiB with the key k, another one of its key,
// and some of others, due in this order.
func (p *fixture) scheduleLarge(t *testing.T) {
	t.Helper()
	p.use(t, p.db, func(cfg *outbox.Config) { cfg.MaxPayload = 16 << 20 })
	past := p.now(t).Add(-time.Hour)
	large := at("large", "k", past)
	large.Payload = make([]byte, 9<<20)
	p.publish(t, at("first", "k", past.Add(-time.Second)), large, at("after it", "k", past.Add(time.Second)))
	for i := range 5 {
		p.publish(t, at(fmt.Sprint("other ", i), fmt.Sprint("other ", i), past.Add(time.Minute)))
	}
}

// A message that takes longer than a batch may take is moved all the same, and only
// its key waits for it.
func TestMoveDue_ALargeMessageIsMovedAndHoldsUpItsKeyAlone(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		if !p.isSQLite() {
			p.slowInsert(t, `octet_length(new.payload) > 8000000`, `perform pg_sleep(4)`)
		}
		p.scheduleLarge(t)
		var order []string
		limit, long := usualLimit, false
		for calls := 0; p.scheduled(t) > 0 && calls < 600; calls++ {
			moved := p.moveWithin(t, limit)
			limit = cmp.Or(moved.Limit, usualLimit)
			testserver.Pause(t.Context(), moved.Next)
			rows := p.read(t)
			slices.SortFunc(rows, func(a, b outboxstore.Row) int { return int(a.ID - b.ID) })
			order = append(order, ids(rows)...)
			p.remove(t, refs(rows)...)
			if moved.Limit > 0 {
				long = true
				if got := len(order); got != 6 || p.scheduled(t) != 2 {
					t.Errorf("%v were moved before the large one", order)
				}
			}
		}
		index := func(id string) int { return slices.Index(order, id) }
		if len(order) != 8 || index("first") > index("large") || index("large") > index("after it") {
			t.Errorf("moved %v", order)
		}
		if !long && !p.isSQLite() {
			t.Error("the large message asked for no time: the test shows nothing")
		}
	})
}

// Even one that cannot be moved at all.
func TestMoveDue_AMessageThatCannotBeMovedHoldsUpItsKeyAlone(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.slowInsert(t, `octet_length(new.payload) > 8000000`, `raise exception 'too slow' using errcode = 'query_canceled'`)
		var log syncBuffer
		p.cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		p.scheduleLarge(t)
		for range 5 {
			p.moveWithin(t, time.Minute)
		}
		if n := len(p.read(t)); n != 6 || p.scheduled(t) != 2 {
			t.Errorf("%d were moved, %d wait", n, p.scheduled(t))
		}
		if text := log.String(); strings.Count(text, "cannot be moved") != 1 {
			t.Errorf("logged %q", text)
		}
	})
}

// Messages that the outbox does not take, whatever their size, hold up their keys alone,
// and are tried again.
func TestMoveDue_OneThatIsRefusedHoldsUpItsKeyAlone(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		for _, size := range testserver.Rounds([]int{9 << 20}, []int{10, 9 << 20}) {
			p.exec(t, `delete from {{outbox}}`)
			p.slowInsert(t, `new.message_id like 'bad%'`, `raise exception 'not so' using errcode = 'check_violation'`)
			p.cfg.Logger = slog.New(slog.DiscardHandler)
			p.use(t, p.db, func(cfg *outbox.Config) { cfg.MaxPayload = 16 << 20 })
			past := p.now(t).Add(-time.Hour)
			for i := range 3 {
				bad := at(fmt.Sprint("bad", i), fmt.Sprint("k", i), past.Add(time.Duration(i)*time.Second))
				bad.Payload = make([]byte, size)
				large := at(fmt.Sprint("large", i), fmt.Sprint("other", i), past.Add(time.Minute))
				large.Payload = make([]byte, 9<<20)
				p.publish(t, bad, large, at(fmt.Sprint("behind", i), fmt.Sprint("k", i), past.Add(time.Minute)))
			}
			for i := range 100 {
				p.publish(t, at(fmt.Sprint("small", i), fmt.Sprint("small", i), past.Add(2*time.Minute)))
			}
			for calls := 0; p.scheduled(t) > 6; calls++ {
				if calls == 200 {
					t.Fatalf("%d wait, want 6", p.scheduled(t))
				}
				p.moveWithin(t, time.Minute)
			}
			p.exec(t, `drop trigger slow_insert on {{outbox}}`)
			until := time.Now().Add(time.Minute)
			for p.scheduled(t) > 0 && time.Now().Before(until) { // they are tried again after 10 s
				testserver.Pause(t.Context(), p.moveWithin(t, time.Minute).Next)
			}
			var order []string
			rows := p.read(t)
			slices.SortFunc(rows, func(a, b outboxstore.Row) int { return int(a.ID - b.ID) })
			for _, r := range rows {
				if strings.HasPrefix(r.Key, "k") {
					order = append(order, r.MessageID)
				}
			}
			if len(rows) != 109 || slices.Index(order, "bad1") > slices.Index(order, "behind1") {
				t.Errorf("%d were moved, %v", len(rows), order)
			}
			p.exec(t, `drop function slow_insert`)
		}
	})
}

// A batch that was halved since the server was slow grows again, also where messages are
// larger than what it was halved to.
func TestMoveDue_TakesMoreAtATimeAgain(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.slowInsert(t, `true`, `raise exception 'too slow' using errcode = 'query_canceled'`)
		p.cfg.Logger = slog.New(slog.DiscardHandler)
		p.use(t, p.db, nil)
		const n = 100
		p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
			select now() - interval '1 hour', 12, 'orders', i::text, 'k' || i, convert_to(repeat('x', 300000), 'UTF8') from generate_series(1, $1::int) i`, n)
		for range 5 {
			p.moveWithin(t, usualLimit)
		}
		p.exec(t, `drop trigger slow_insert on {{outbox}}`)
		calls := 0
		for ; p.scheduled(t) > 0 && calls < n; calls++ {
			p.moveWithin(t, usualLimit)
		}
		if p.scheduled(t) > 0 || calls > n/4 {
			t.Errorf("%d calls, %d are left", calls, p.scheduled(t))
		}
	})
}

// A connection that leads nowhere is found out while a message is moved that is as large
// as one can be: no call asks for more time than its size needs before the server has
// said that it takes longer.
func TestMoveDue_ALargeMessageAsksForTheTimeOfItsSize(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		for bytes, want := range map[int]time.Duration{9 << 20: 8450 * time.Millisecond, 128 << 20: 14400 * time.Millisecond} {
			p.exec(t, `delete from {{scheduled}}`)
			p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
				select now() - interval '1 hour', 12, 'orders', 'large', 'a', convert_to(repeat('x', $1::int), 'UTF8')`, bytes)
			if moved := p.moveWithin(t, want/4); moved.Rows > 0 || moved.Limit != want {
				t.Errorf("%d bytes: asked for %v, moved %d", bytes, moved.Limit, moved.Rows)
			}
			p.moveWithin(t, want)
			if p.scheduled(t) > 0 {
				t.Errorf("%d bytes were not moved in %v", bytes, want)
			}
		}
	})
}

// Where a batch takes too long, fewer messages are moved at a time.
func TestMoveDue_TakesFewerAtATimeWhereThatIsSlow(t *testing.T) {
	onEachPostgres(t, func(t *testing.T, p *fixture) {
		p.slowInsert(t, `true`, `perform pg_sleep(0.005)`)
		p.cfg.Logger = slog.New(slog.DiscardHandler)
		p.use(t, p.db, nil)
		const n = 900 // 4.5 s in one batch
		p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
			select now() - interval '1 hour', 12, 'orders', i::text, 'a', '' from generate_series(1, $1::int) i`, n)
		for range 20 {
			p.moveWithin(t, usualLimit)
			if p.scheduled(t) == 0 {
				break
			}
		}
		rows := p.read(t)
		for i, r := range rows {
			if r.MessageID != fmt.Sprint(i+1) {
				t.Fatalf("%s comes at position %d", r.MessageID, i)
			}
		}
		if len(rows) != n {
			t.Errorf("%d of %d were moved", len(rows), n)
		}
	})
}

// The order of ids is the order of times, whatever plan the server chooses: the rows
// are sorted before they take their ids.
func TestMoveDue_SortsBeforeItTakesIDs(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	p.exec(t, `insert into {{scheduled}} (deliver_at, seq, lane, topic, message_id, key, payload)
		select now() - interval '1 hour' + ((i * 7919) % 1000) * interval '1 second', i + 1, 12, 'orders', ((i * 7919) % 1000)::text, 'a', ''
		from generate_series(0, 999) i`)
	p.exec(t, `analyze {{scheduled}}`)
	p.tap.sent()
	p.moveAll(t)
	for i, r := range p.read(t) {
		if r.MessageID != fmt.Sprint(i) {
			t.Fatalf("%s comes at position %d", r.MessageID, i)
		}
	}
	found := false
	for _, s := range p.tap.sent() {
		text := strings.Join(strings.Fields(s.text), " ")
		found = found || strings.Contains(text, "from gone order by deliver_at, seq")
	}
	if !found {
		t.Error("the insert does not sort")
	}
}
