package oncemill_test

import (
	"database/sql"
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/relay"
)

// column is one of a table.
type column struct{ table, name, kind string }

func columns(t *testing.T, db *sql.DB) (all []column) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), `
		select c.relname, a.attname, format_type(a.atttypid, null)
		from pg_attribute a join pg_class c on c.oid = a.attrelid
		where c.relnamespace = 'oncemill'::regnamespace and c.relkind in ('r', 'p') and c.relname <> 'effects'
			and a.attnum > 0 and not a.attisdropped
		order by 1, a.attnum`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var c column
		if err := rows.Scan(&c.table, &c.name, &c.kind); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// forgery makes values that no honest program writes.
type forgery struct{ *rand.Rand }

func (r forgery) of(kinds ...any) any { return kinds[r.IntN(len(kinds))] }

func (r forgery) value(kind string) any {
	switch kind {
	case "smallint", "integer":
		return r.of(-1, 0, 1, 31, 32, math.MaxInt16)
	case "bigint":
		return r.of(-1, 0, 1, 1<<40, int64(math.MaxInt64), int64(math.MinInt64))
	case "boolean":
		return r.IntN(2) == 0
	case "bytea":
		return r.of([]byte{}, []byte("x"), []byte("{"), make([]byte, 70_000))
	case "state":
		return r.of("dead", "held", "replaying", "replaying", "replaying", "discarding", "replayed", "discarded", "forged")
	case "jsonb":
		return r.of(`[]`, `{}`, `7`, `[{"at":"x"}]`)
	case "timestamp with time zone":
		return r.of("infinity", "-infinity", "now", "1969-01-01", "294276-01-01", "4713-01-01 BC", "9999-12-31")
	}
	raw := make([]byte, 3000)
	for i := range raw {
		raw[i] = byte(r.Uint32())
	}
	return r.of("", "x", strings.Repeat("x", 256), hex.EncodeToString(raw), "consumer", "relay", "replaying", "discarding", "held", "replayed", "discarded",
		"stock", "stock/x", "mail", "\x1b[31m\n", "orders", "m", fmt.Sprint("forged ", r.Uint64()))
}

// Rows of every table with values of every kind, by each role: whatever the database
// takes stops nobody, and of others nothing is read, changed or lost.
func TestRoles_ForgedRowsStopNoRelay(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if given, err := strconv.ParseUint(os.Getenv("ONCEMILL_SEED"), 10, 64); err == nil {
		seed = given
	}
	t.Logf("ONCEMILL_SEED=%d", seed)
	r := forgery{rand.New(rand.NewPCG(seed, 0))}
	s := newShop(t)
	stop := s.run(t)

	// What belongs to others: letters of a relay and of another consumer, its ids,
	// a scheduled message, and one that is parked.
	s.broker.refuse(true, "sick")
	s.publish(t, 0, "sick")
	s.publish(t, time.Hour, "later")
	s.theLetter(t, "sick")
	if _, err := s.admin.ExecContext(t.Context(), `
		insert into oncemill.dead_letters (source, consumer, topic, message_id, payload, reason, error, fingerprint) select 'consumer', 'mail', 'orders', 'm' || i, 'secret', 'failed', '', 'f' from generate_series(1, 20) i;
		insert into oncemill.inbox_failures (consumer, message_id) select 'mail', 'm' || i from generate_series(1, 20) i;
		insert into oncemill.inbox_sequences (consumer, key, seq) select 'mail', 'm' || i, 1 from generate_series(1, 20) i;
		insert into oncemill.inbox_refused (consumer, topic, reason, refused, total) select 'mail', 'm' || i, 'unverified', 1, 1 from generate_series(1, 20) i;
		alter table oncemill.inbox disable trigger all;
		insert into oncemill.inbox (consumer, message_id) select 'mail', 'm' || i from generate_series(1, 20) i;
		alter table oncemill.inbox enable trigger all`); err != nil {
		t.Fatal(err)
	}
	others := func() (all []string) {
		for _, text := range []string{
			`select id || source || topic || message_id || key || payload::text || metadata::text || consumer || coalesce(row_id, 0) || reason || error || died_at from oncemill.dead_letters where consumer not like 'stock%' and id <= 21 order by id`,
			`select i::text from oncemill.inbox i where consumer = 'mail' order by message_id`,
			`select i::text from oncemill.inbox_failures i where consumer = 'mail' order by message_id`,
			`select i::text from oncemill.inbox_sequences i where consumer = 'mail' order by key`,
			`select i::text from oncemill.inbox_refused i where consumer = 'mail' order by topic`,
			`select i::text from oncemill.scheduled i where message_id = 'later'`,
			`select i::text from oncemill.migrations i order by 1`,
			`select count(*) || '' from oncemill.relay_leases`,
		} {
			all = append(all, texts(t, s.admin, text)...)
		}
		return all
	}
	before := others()

	byTable := map[string][]column{}
	for _, c := range columns(t, s.admin) {
		byTable[c.table] = append(byTable[c.table], c)
	}
	tables := slices.Sorted(func(yield func(string) bool) {
		for name := range byTable {
			if !yield(name) {
				return
			}
		}
	})
	// What the roles may write, to begin with.
	valid := map[string]map[string]any{
		"outbox":       {"lane": 1, "topic": "orders", "key": "", "payload": []byte("x"), "metadata": []byte{}},
		"scheduled":    {"lane": 1, "topic": "orders", "key": "", "payload": []byte("x"), "metadata": []byte{}, "deliver_at": "now"},
		"dead_letters": {"source": "consumer", "consumer": "stock", "topic": "orders", "payload": []byte("letter"), "reason": "failed", "error": "", "fingerprint": "f"},
		"inbox":        {"consumer": "stock"}, "inbox_failures": {"consumer": "stock"}, "inbox_sequences": {"consumer": "stock", "key": "", "seq": 1},
		"inbox_refused": {"consumer": "stock", "topic": "", "reason": "", "refused": 1, "total": 1},
		"audit":         {"actor": "x", "action": "x", "subject": "x"}, "dead_letter_notes": {"letter": 1, "actor": "x", "text": "x"},
		"dead_letter_jobs":        {"state": "running", "actor": "x", "reason": "x", "filter": "{}", "bound": 9, "canary": 0, "rate": 100, "stop_after": 0},
		"dead_letter_job_letters": {"job": 1, "letter": 1},
	}
	may := []column{{"dead_letters", "state", "state"}, {"dead_letters", "closed_at", "timestamp with time zone"}, {"dead_letters", "acted_by", "text"}}
	roles := map[string]*sql.DB{"producer": s.producer, "stock": s.stock, "operator": s.operator}
	taken := map[string]int{}
	for i := range 1000 {
		role := r.of("producer", "stock", "operator").(string)
		table := r.of("outbox", "scheduled", "dead_letters", "dead_letters", "audit", "dead_letter_notes", "dead_letter_jobs", tables[r.IntN(len(tables))]).(string)
		own := byTable[table]
		var text string
		var args []any
		if r.IntN(4) > 0 && (role != "operator" || table != "dead_letters") {
			values := maps.Clone(valid[table])
			if values == nil {
				values = map[string]any{"lane": 1}
			}
			if slices.ContainsFunc(own, func(c column) bool { return c.name == "message_id" }) {
				values["message_id"] = fmt.Sprint("forged ", i)
			}
			for range r.IntN(3) {
				c := own[r.IntN(len(own))]
				values[c.name] = r.value(c.kind)
			}
			var names, places []string
			for name, value := range values {
				args = append(args, value)
				names, places = append(names, name), append(places, fmt.Sprint("$", len(args)))
			}
			text = fmt.Sprintf(`insert into oncemill.%s (%s) values (%s)`, table, strings.Join(names, ", "), strings.Join(places, ", "))
		} else {
			changed := []column{own[r.IntN(len(own))], own[r.IntN(len(own))]}
			if table == "dead_letters" && r.IntN(2) == 0 {
				changed = may[:1+r.IntN(len(may))]
			}
			values := map[string]any{}
			for _, c := range changed {
				values[c.name] = r.value(c.kind)
			}
			var sets []string
			for name, value := range values {
				args = append(args, value)
				sets = append(sets, fmt.Sprint(name, " = $", len(args)))
			}
			// Some of them, since one that may not be changed keeps all from it.
			text = fmt.Sprintf(`update oncemill.%s set %s`, table, strings.Join(sets, ", "))
			if table == "dead_letters" {
				text += fmt.Sprintf(` where id %% 5 = %d`, r.IntN(5))
			}
		}
		_, err := roles[role].ExecContext(t.Context(), text, args...)
		switch {
		case err == nil:
			taken[role+" "+strings.Fields(text)[0]+" "+table]++
		case sqlerr.State(err) == "":
			t.Fatalf("%s: %v", text, err)
		}
	}
	t.Logf("taken: %v", taken)
	for _, some := range []string{"producer insert outbox", "producer insert scheduled", "stock insert dead_letters", "operator update dead_letters", "operator insert audit", "operator insert dead_letter_notes", "operator insert dead_letter_jobs"} {
		if taken[some] == 0 {
			t.Errorf("nothing was taken of %s: the test shows nothing", some)
		}
	}
	written := []string{"operator insert audit", "operator insert dead_letter_notes", "operator insert dead_letter_jobs", "operator update dead_letter_jobs", "operator insert dead_letter_job_letters", "operator insert pauses", "operator insert lane_commands"}
	for what := range taken {
		words := strings.Fields(what)
		role, table := words[0], words[2]
		if role == "producer" && table != "outbox" && table != "scheduled" || role == "operator" && what != "operator update dead_letters" && !slices.Contains(written, what) || strings.HasPrefix(table, "relay") || table == "parked" || table == "migrations" {
			t.Errorf("%s was taken", what)
		}
	}
	if after := others(); !slices.Equal(before, after) {
		t.Errorf("what belongs to others was\n%q\nand is\n%q", before, after)
	}
	if n := count(t, s.admin, `select count(*) from oncemill.dead_letters where (source <> 'consumer' or consumer <> 'stock' and not starts_with(consumer, 'stock/')) and payload = 'letter'`); n != 0 {
		t.Errorf("%d letters were forged in the name of others", n)
	}

	// Nobody reads or locks what is others'.
	for role, db := range roles {
		for _, table := range tables {
			mine := map[string][]string{
				"stock":    {"inbox", "inbox_failures", "inbox_sequences", "inbox_refused", "dead_letters", "pauses"},
				"operator": {"dead_letters", "dead_letter_notes", "dead_letter_jobs", "dead_letter_job_letters", "audit", "pauses", "inbox"},
			}[role]
			if !slices.Contains(append(mine, "migrations"), table) {
				if _, err := db.ExecContext(t.Context(), `select from oncemill.`+table); sqlerr.State(err) != "42501" {
					t.Errorf("%s reads %s: %v", role, table, err)
				}
			}
			tx, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.ExecContext(t.Context(), `lock table oncemill.`+table+` in access exclusive mode nowait`); sqlerr.State(err) != "42501" && (role != "stock" || !strings.HasPrefix(table, "inbox")) {
				t.Errorf("%s locks %s: %v", role, table, err)
			}
			if err := tx.Rollback(); err != nil {
				t.Error(err)
			}
		}
	}
	for _, table := range []string{"dead_letters", "inbox", "inbox_failures", "inbox_sequences", "inbox_refused"} {
		if n := count(t, s.stock, `select count(*) from oncemill.`+table+` where consumer not like 'stock%'`); n != 0 {
			t.Errorf("stock sees %d rows of %s of others", n, table)
		}
	}

	// Everybody goes on: the relay that runs, one that starts, the consumer, the operator.
	s.publish(t, 0, "honest 1")
	s.publish(t, time.Millisecond, "honest 2")
	goesOn := func(ids ...string) {
		t.Helper()
		for _, id := range ids {
			eventually(t, "delivery of "+id, func() bool { return len(s.broker.published(id)) == 1 })
		}
	}
	goesOn("honest 1", "honest 2")
	stop()
	if _, err := relay.RepairSequence(t.Context(), s.box); err != nil {
		t.Error(err)
	}
	stop = s.run(t)
	s.publish(t, 0, "honest 3")
	goesOn("honest 3")
	s.consume(t, s.broker.published("honest 1")[0], false)
	s.consume(t, s.broker.published("honest 2")[0], true)
	if n := count(t, s.admin, `select count(*) from oncemill.effects where note = 'honest 1'`); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
	letter := s.theLetter(t, "honest 2")
	if _, err := s.letters.List(t.Context(), dlq.Filter{Limit: 1000}); err != nil {
		t.Error(err)
	}
	if err := s.letters.Discard(t.Context(), letter.ID, grace); err != nil {
		t.Error(err)
	}
	stop()
}

func texts(t *testing.T, db *sql.DB, text string) (all []string) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), text)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	defer rows.Close()
	for rows.Next() {
		var one sql.NullString
		if err := rows.Scan(&one); err != nil {
			t.Fatal(err)
		}
		all = append(all, one.String)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}
