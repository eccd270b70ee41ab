package outbox_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// A million messages wait (a tenth of that in a short run), half of them for the
// same moment, which has passed. What
// the scheduler does goes by the index whatever the table was like before, and reads
// no more than it moves.
func TestPlans_AMillionScheduledMessagesSlowNobody(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t, "autovacuum=off", "fsync=off")
	p := newFixture(t, &pq.Driver{}, server.DSN(), outbox.Config{Database: oncemill.Config{Dialect: oncemill.PostgreSQL}})
	p.exec(t, `vacuum analyze {{scheduled}}`) // statistics of an empty table
	db, seen := explained(t, p.dsn+"&binary_parameters=yes")
	box, err := outbox.New(db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	queue := outboxqueue.Of(box)
	schedule := func(n int, due string) {
		t.Helper()
		p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, key, payload)
			select `+due+`, i % 32, 'orders', 'scheduled ' || i, 'key ' || i % 1000, decode(repeat('ab', 50), 'hex')
			from generate_series(1, $1::int) i`, n)
	}
	check := func(situation string, rows int) {
		t.Helper()
		seen.take()
		moved, err := queue.MoveDue(t.Context(), always)
		if err != nil || moved.Rows != rows {
			t.Fatalf("%s: moved %+v, %v", situation, moved, err)
		}
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := box.CancelScheduled(t.Context(), tx, fmt.Sprint("scheduled ", 12_345)); err != nil {
			t.Fatal(err)
		}
		used := seen.take()
		want := 4
		if rows == 0 {
			want = 2
		}
		if len(used) != want {
			t.Fatalf("%s: %d plans", situation, len(used))
		}
		for _, plan := range used {
			// The move sorts what it has chosen, some hundred rows, to number them, and
			// a cancellation may go by a bitmap of the index.
			bad := slices.DeleteFunc(faults(t, plan), func(kind string) bool {
				return strings.HasSuffix(kind, "Sort") || strings.HasPrefix(kind, "Bitmap")
			})
			if len(bad) > 0 {
				t.Errorf("%s: %v in\n%s", situation, bad, plan)
			}
			if most := mostRows(t, plan, "scheduled"); most > 4000 {
				t.Errorf("%s: %v rows of the table were read in\n%s", situation, most, plan)
			}
		}
	}
	half := 50_000
	if testserver.Long() {
		half = 500_000
	}
	schedule(half, `clock_timestamp() + interval '1 hour' + i * interval '1 millisecond'`)
	check("nothing due, never analyzed", 0)
	p.exec(t, `analyze {{scheduled}}`)
	check("nothing due, analyzed", 0)
	schedule(half, `date_trunc('day', clock_timestamp()) - interval '1 day'`)
	check("half of them due at one moment", 2000)
	check("half of them due at one moment, again", 2000)
	p.exec(t, `analyze {{scheduled}}`)
	check("analyzed with its backlog", 2000)
}

// mostRows returns the largest number of rows that a scan of a table has taken,
// those that its filter removed included.
func mostRows(t *testing.T, plan, table string) (most float64) {
	t.Helper()
	eachNode(t, plan, func(node map[string]any) {
		if node["Relation Name"] != table {
			return
		}
		number := func(name string) float64 { n, _ := node[name].(float64); return n }
		if rows := (number("Actual Rows") + number("Rows Removed by Filter")) * max(1, number("Actual Loops")); rows > most && node["Operation"] == nil {
			most = rows
		}
	})
	return most
}
