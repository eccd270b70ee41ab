package outbox_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

const backlog = 200_000

// plans are the plans that a server has really used, as auto_explain tells them
// to the one connection of a pool.
type plans struct {
	mu   sync.Mutex
	text []string
}

func (p *plans) add(notice *pq.Error) {
	if _, plan, ok := strings.Cut(notice.Message, "plan:\n"); ok {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.text = append(p.text, plan)
	}
}

// take returns the plans since the last call.
func (p *plans) take() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	taken := p.text
	p.text = nil
	return taken
}

// explained returns a pool of one connection that tells its plans.
func explained(t *testing.T, dsn string) (*sql.DB, *plans) {
	t.Helper()
	connector, err := pq.NewConnector(testserver.WithPlans(t, dsn, "log_nested_statements=on", "log_verbose=on"))
	if err != nil {
		t.Fatal(err)
	}
	seen := &plans{}
	db := sql.OpenDB(pq.ConnectorWithNoticeHandler(connector, seen.add))
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	return db, seen
}

// faults returns what a plan of ours must not contain: a sort, a scan of a whole
// partition or of a whole lane, code compiled for one execution (JIT), and a value
// that was not known when it was made, which tells a generic plan from one made
// for its execution.
func faults(t *testing.T, plan string) (bad []string) {
	t.Helper()
	eachNode(t, plan, func(node map[string]any) {
		kind, _ := node["Node Type"].(string)
		if strings.Contains(kind, "Sort") || strings.Contains(kind, "Seq Scan") || strings.Contains(kind, "Bitmap") {
			bad = append(bad, kind)
		}
		if _, compiled := node["JIT"]; compiled {
			bad = append(bad, "JIT")
		}
		output, _ := node["Output"].([]any)
		if subplan, _ := node["Subplan Name"].(string); strings.HasPrefix(subplan, "InitPlan") && strings.HasPrefix(fmt.Sprint(output...), "$") {
			bad = append(bad, "generic")
		}
	})
	return bad
}

// eachNode calls fn for each object of a plan.
func eachNode(t *testing.T, plan string, fn func(node map[string]any)) {
	t.Helper()
	var tree any
	if err := json.Unmarshal([]byte(plan), &tree); err != nil {
		t.Fatalf("%v in %s", err, plan)
	}
	var walk func(node any)
	walk = func(node any) {
		switch node := node.(type) {
		case []any:
			for _, n := range node {
				walk(n)
			}
		case map[string]any:
			fn(node)
			for _, n := range node {
				walk(n)
			}
		}
	}
	walk(tree)
}

func totalCost(t *testing.T, plan string) float64 {
	t.Helper()
	var top struct {
		Plan struct {
			Cost float64 `json:"Total Cost"`
		}
	}
	if err := json.Unmarshal([]byte(plan), &top); err != nil || top.Plan.Cost == 0 {
		t.Fatalf("%v in %s", err, plan)
	}
	return top.Plan.Cost
}

// unhurried returns what fn sees once none of its statements was canceled for its time,
// after which others take its place. A slow machine gets more tries.
func unhurried(t *testing.T, server *testserver.PostgresServer, fn func() error) {
	t.Helper()
	canceled := func() int {
		text, err := os.ReadFile(server.Log())
		expectNoError(t, err)
		return bytes.Count(text, []byte("canceling statement due to statement timeout"))
	}
	for range 20 {
		before := canceled()
		err := fn()
		if canceled() == before {
			expectNoError(t, err)
			return
		}
	}
	t.Fatal("the server has canceled statements in 20 tries")
}

// work is a relay's use of the queue: reads of several kinds and a deletion.
func work(ctx context.Context, queue *outboxqueue.Queue) error {
	rows, err := queue.Read(ctx, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 100, Bytes: 1 << 20})
	if err != nil {
		return err
	}
	known := make([]outboxstore.Known, 0, 1000)
	for _, r := range rows[:min(1000, len(rows))] {
		known = append(known, r.Known())
	}
	for _, req := range []outboxstore.ReadRequest{
		{Lanes: allLanes(), Rows: 400, Bytes: 1 << 20, Known: known, Busy: []string{"key 1", "key 2"}, Hollow: []string{"paused"}},
		{Lanes: allLanes(), Rows: 100, Bytes: 1},
	} {
		if _, err := queue.Read(ctx, req); err != nil {
			return err
		}
	}
	for _, n := range []int{1, 500} {
		if _, err := queue.Remove(ctx, refs(rows[:min(n, len(rows))])); err != nil {
			return err
		}
	}
	return nil
}

// naiveLimited is planned at each execution, but tells the planner the limit. By
// statistics of the empty table that is above the rows of a lane.
const naiveLimited = `
select m.*
from unnest($1::smallint[]) as l (lane)
cross join lateral (
	select *
	from {{outbox}} o
	where o.lane = l.lane
		and $2::int + $7::int > 0
		and o.id not in (select unnest($3::bigint[] || $4::bigint[]))
		and o.key not in (select unnest($5::text[] || $6::text[]))
	order by o.id
	limit 500
) m`

// naiveRead is planned once.
var naiveRead = strings.Replace(naiveLimited, "limit 500", "limit $2", 1)

func TestPlans_NeverSortNorScanWhateverTheTableWasLikeBefore(t *testing.T) {
	t.Parallel()
	// On a server where nobody else's changes make a session forget its plans.
	server := testserver.PrivatePostgres(t, "autovacuum=off")
	p := newFixture(t, &pq.Driver{}, server.DSN(), outbox.Config{Database: oncemill.Config{Dialect: oncemill.PostgreSQL}})

	p.exec(t, `vacuum analyze {{outbox}}`)

	// The naive version prepares our own texts on the empty table, as a driver
	// with a statement cache does, and keeps the plan.
	expectNoError(t, work(t.Context(), p.queue))
	read, remove := p.statements(t)
	naive, err := p.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer naive.Close()
	for _, text := range []string{
		`prepare naive_limited as ` + p.expand(t, naiveLimited),
		`set plan_cache_mode = force_generic_plan`,
		`prepare naive_read as ` + p.expand(t, naiveRead), `execute naive_read ` + read.values(),
		`prepare naive_remove as ` + remove.text, `execute naive_remove ` + remove.values(),
	} {
		if _, err := naive.ExecContext(t.Context(), text); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}

	// Ours, on connections that have seen the empty table, too.
	type relay struct {
		db    *sql.DB
		queue *outboxqueue.Queue
		seen  *plans
	}
	relays := map[string]relay{}
	for name, params := range map[string]string{"plain": "", "binary parameters": "&binary_parameters=yes"} {
		for history, keep := range map[string]time.Duration{"": outbox.NoHistory, ", history": time.Hour} {
			db, seen := explained(t, p.dsn+params)
			cfg := p.cfg
			cfg.History = keep
			box, err := outbox.New(db, cfg)
			if err != nil {
				t.Fatal(err)
			}
			r := relay{db, outboxqueue.Of(box), seen}
			for range 8 { // a server begins to think of a generic plan after five
				expectNoError(t, work(t.Context(), r.queue))
			}
			relays[name+history] = r
		}
	}

	check := func(situation string) {
		t.Helper()
		for name, r := range relays {
			var used []string
			unhurried(t, server, func() error {
				r.seen.take()
				err := work(t.Context(), r.queue)
				used = r.seen.take()
				return err
			})
			// A read is a statement and the one in its function, lanes of large messages
			// are read twice, and a removal may concern two partitions.
			if len(used) < 9 || len(used) > 11 {
				t.Fatalf("%s, %s: %d plans, want those of 9 to 11 statements", situation, name, len(used))
			}
			kept := 0
			for _, plan := range used {
				bad := faults(t, plan)
				if strings.Contains(plan, "unnest(lanes)") { // in the function: it can have no other plan
					kept++
					bad = slices.DeleteFunc(bad, func(what string) bool { return what == "generic" })
				}
				if len(bad) > 0 {
					t.Errorf("%s, %s: %v in\n%s", situation, name, bad, plan)
				}
				// 100 rows of each lane cost 16,000 by estimate, a tenth of each lane 49,000,
				// and five times that with a million rows, where compiling begins.
				if strings.Contains(plan, "bytes_before") && totalCost(t, plan) > 30_000 {
					t.Errorf("%s, %s: a read of large messages is expected to cost %v: the planner does not know its limit", situation, name, totalCost(t, plan))
				}
			}
			if kept != 3 {
				t.Errorf("%s, %s: %d plans of reads, want 3", situation, name, kept)
			}
			// A look ahead goes through the table once, at most, and sorts what it has chosen.
			begin := time.Now()
			var looks []string
			for _, unordered := range []bool{true, false} {
				unhurried(t, server, func() error {
					r.seen.take()
					_, err := r.queue.ReadAhead(t.Context(), outboxstore.ReadRequest{Lanes: allLanes(), Rows: 3, Bytes: 1 << 20, Known: []outboxstore.Known{{ID: 1}, {ID: 2}}},
						outboxstore.Ahead{Topics: []string{"orders"}, Newest: 4, Look: 200, Scan: 20_000, Unordered: unordered})
					return err
				})
				looks = append(looks, r.seen.take()...)
			}
			t.Logf("%s, %s: two looks ahead took %v", situation, name, time.Since(begin))
			for _, plan := range looks {
				bad := slices.DeleteFunc(faults(t, plan), func(what string) bool { return strings.Contains(what, "Sort") })
				if len(bad) > 4 || slices.ContainsFunc(bad, func(what string) bool { return what != "Seq Scan" }) {
					t.Errorf("%s, %s: %v in\n%s", situation, name, bad, plan)
				}
			}
			// Rows that are locked.
			rows := refs(p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 20, Bytes: 1 << 20}))
			release := p.lock(t, `select from {{outbox}} where lane = $1 and id = $2 for update`, rows[9].Lane, rows[9].ID)
			var blocked []int
			unhurried(t, server, func() error {
				r.seen.take()
				blocked = nil
				for _, n := range []int{10, 500} {
					removal, err := r.queue.Remove(t.Context(), rows[:n])
					if err != nil {
						return err
					}
					blocked = append(blocked, len(removal.Locked))
				}
				used = r.seen.take()
				return nil
			})
			if !slices.Equal(blocked, []int{1, 1}) {
				t.Errorf("%s, %s: %v are locked", situation, name, blocked)
			}
			release()
			if len(used) < 2 || len(used) > 5 { // some partitions may hold none of the locked rows
				t.Fatalf("%s, %s: %d plans, want 2 to 5", situation, name, len(used))
			}
			for _, plan := range used {
				if bad := faults(t, plan); len(bad) > 0 {
					t.Errorf("%s, %s: %v in\n%s", situation, name, bad, plan)
				}
			}
			expectNothingPrepared(t, r.db)
		}
	}
	p.load(t, backlog)
	check("never analyzed since it was empty")

	for name, text := range map[string]string{"read": read.values(), "remove": remove.values()} {
		start := time.Now()
		var plan string
		if err := naive.QueryRowContext(t.Context(), `explain (verbose, format json) execute naive_`+name+` `+text).Scan(&plan); err != nil {
			t.Fatal(err)
		}
		_, err := naive.ExecContext(t.Context(), `execute naive_`+name+` `+text)
		expectNoError(t, err)
		bad := faults(t, plan)
		t.Logf("a naive %s took %v: %v", name, time.Since(start), bad)
		if !slices.Contains(bad, "Seq Scan") {
			t.Errorf("the plan of a naive %s is good: the test shows nothing", name)
		}
	}
	for _, text := range []string{`set plan_cache_mode = force_custom_plan`, `explain (verbose, format json) execute naive_limited ` + read.values()} {
		var plan string
		if err := naive.QueryRowContext(t.Context(), text).Scan(&plan); err != nil && !errors.Is(err, sql.ErrNoRows) {
			t.Fatalf("%s: %v", text, err)
		}
		if plan != "" && !slices.Contains(faults(t, plan), "Sort") {
			t.Error("the plan of a naive limit is good: the test shows nothing")
		}
	}

	p.exec(t, `analyze {{outbox}}`)
	check("analyzed with its backlog")
	p.exec(t, `delete from {{outbox}} where id > 1000`)
	p.exec(t, `analyze {{outbox}}`)
	p.load(t, 20_000)
	check("dead rows of a burst before")
}

// statements returns the read and the move that the queue sends.
func (p *fixture) statements(t *testing.T) (read, remove statement) {
	t.Helper()
	p.tap.sent()
	p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 100, Bytes: 1 << 20})
	p.remove(t, outboxstore.Ref{Lane: 1, ID: 1, MessageID: "a", CreatedAt: time.Now()})
	sent := p.tap.sent()
	if len(sent) != 5 {
		t.Fatalf("sent %s", firstWords(sent))
	}
	return sent[0], sent[3] // begin, limits, the removal, commit
}

// values returns the arguments for EXECUTE.
func (s statement) values() string {
	texts := make([]string, len(s.args))
	for i, arg := range s.args {
		texts[i] = pq.QuoteLiteral(fmt.Sprint(arg.Value))
	}
	return "(" + strings.Join(texts, ", ") + ")"
}

// load writes n rows, spread over all lanes.
func (p *fixture) load(t *testing.T, n int) {
	t.Helper()
	p.exec(t, `insert into {{outbox}} (lane, topic, message_id, key, payload)
		select i % 32, 'orders', 'loaded ' || i, 'key ' || i % 1000, decode(repeat('ab', 100), 'hex')
		from generate_series(1, $1::int) i`, n)
}

// expectNothingPrepared looks at a connection's server: whatever the library has
// executed on it, no statement was kept under a name.
func expectNothingPrepared(t *testing.T, db *sql.DB) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), `select name, statement from pg_prepared_statements where name <> ''`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var name, text string
		expectNoError(t, rows.Scan(&name, &text))
		t.Errorf("statement %q is prepared: %s", name, text)
	}
	expectNoError(t, rows.Err())
}

// A server whose configuration prefers generic plans changes nothing for lib/pq:
// it is the driver that must not keep statements.
func TestPlans_TheLibraryPreparesNothing(t *testing.T) {
	t.Parallel()
	for _, params := range [][]string{nil, {"binary_parameters=yes"}} {
		p := onPostgres(t, params...)
		db := p.open(t)
		db.SetMaxOpenConns(1)
		p.use(t, db, nil)
		for i := range 10 {
			p.publish(t, newMessage(fmt.Sprint(i), ""))
			p.publish(t, messages(fmt.Sprint(i), 3)...)
			rows := p.read(t)
			p.remove(t, refs(rows)...)
			p.maintain(t)
			expectNoError(t, p.queue.Check(t.Context()))
		}
		expectNothingPrepared(t, db)
	}
}

func TestPlans_OnSQLiteEachLaneIsReadByItsIndex(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	p.publish(t, messages("m", 50)...)
	p.exec(t, `analyze`)
	p.tap.sent()
	rows := p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 10, Bytes: 1 << 20, Known: []outboxstore.Known{{ID: 1}, {ID: 2}}, Busy: []string{"a"}, Hollow: []string{"b"}})
	p.remove(t, refs(rows)...)
	for _, s := range p.tap.sent() {
		text, prepared := strings.CutPrefix(s.text, "PREPARE ")
		if !prepared && len(s.args) == 0 {
			continue // begin, commit
		}
		args := make([]any, 0, len(s.args))
		for _, a := range s.args {
			args = append(args, a.Value)
		}
		if prepared {
			args = []any{1, 1, "a", 1}
		}
		steps, err := p.db.QueryContext(t.Context(), `explain query plan `+text, args...)
		if err != nil {
			t.Fatal(err)
		}
		indexed := false
		for steps.Next() {
			var id, parent, unused int
			var step string
			expectNoError(t, steps.Scan(&id, &parent, &unused, &step))
			if strings.Contains(step, "SCAN oncemill_outbox") || strings.Contains(step, "TEMP B-TREE") {
				t.Errorf("%s: %s", step, text)
			}
			indexed = indexed || strings.Contains(step, "SEARCH oncemill_outbox USING")
		}
		expectNoError(t, errors.Join(steps.Err(), steps.Close()))
		if !indexed {
			t.Errorf("no index serves %s", text)
		}
	}
}
