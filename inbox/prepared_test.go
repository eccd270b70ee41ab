package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
)

// With lib/pq, what the handlers of a group repeat is sent twice: as it is, and to be
// prepared. Nothing stays prepared, also when a member fails and the group with it.
func TestGroup_PreparesWhatItsHandlersRepeat(t *testing.T) {
	const note = `update effects set note = $2 where message_id = $1`
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.grouping(t, 20)
		p.tap.sent()
		deliver := func(bad string, msgs ...*message.Message) {
			t.Helper()
			errs := deliverAll(t, in, func(msg *message.Message) ([]*message.Message, error) {
				err := errors.Join(addEffect(msg), handlerExec(msg, note, msg.UUID, "noted"))
				if msg.UUID == bad {
					err = errUndo
				}
				return nil, err
			}, msgs...)
			for id, err := range errs {
				if (err != nil) != (id == bad) {
					t.Errorf("%s: %v", id, err)
				}
			}
		}
		deliver("", newMessages(t, numbered(20)...)...)
		sent := p.tap.sent()
		want := 20
		if _, ok := p.tap.driver.(*pq.Driver); ok {
			want = 2
		}
		n := 0
		for _, text := range sent {
			if text == note {
				n++
			}
		}
		if n != want {
			t.Errorf("a statement of 20 handlers was sent %d times, wanted %d", n, want)
		}
		deliver("j", newMessages(t, strings.Split("abcdefghijklmnopqrst", "")...)...)
		p.expect(t, 39, 39, 0)
		if n := p.count(t, `select count(*) from effects where note = 'noted'`); n != 39 {
			t.Errorf("%d effects are noted", n)
		}
		expectClosedInTime(t, append(sent, p.tap.sent()...), want == 2)
	})
}

// A member that leaves rows open, or executes something for each, is refused by lib/pq.
// That is its own loss, though the others have statements prepared.
func TestGroup_OpenRowsSpoilNobody(t *testing.T) {
	deeds := map[string]func(context.Context, oncemill.Tx) error{
		"forgotten": func(ctx context.Context, tx oncemill.Tx) error {
			rows, err := tx.QueryContext(ctx, `select i from generate_series(1, $1) i`, 3)
			if err == nil {
				rows.Next()
			}
			return err
		},
		"nested": func(ctx context.Context, tx oncemill.Tx) error {
			rows, err := tx.QueryContext(ctx, `select i from generate_series(1, $1) i`, 3)
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
				if _, err := tx.ExecContext(ctx, `insert into effects (message_id) values ($1)`, "nested"); err != nil {
					return err
				}
			}
			return rows.Err()
		},
		"nested, without arguments": func(ctx context.Context, tx oncemill.Tx) error {
			rows, err := tx.QueryContext(ctx, `select i from generate_series(1, $1) i`, 3)
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
				if _, err := tx.ExecContext(ctx, `insert into effects (message_id) values ('nested')`); err != nil {
					return err
				}
			}
			return rows.Err()
		},
	}
	onPostgreSQL(t, func(t *testing.T, p *testDB) {
		n := 0
		for deed, do := range deeds {
			if strings.HasSuffix(deed, "without arguments") && !strings.Contains(p.dsn, "binary_parameters") {
				continue // lib/pq takes the rest of the rows for its answer, prepared or not
			}
			in := p.grouping(t, 20)
			ids := numbered(20)
			for i := range ids {
				ids[i] = deed + ids[i]
			}
			bad := ids[19] // nobody's statement comes after its rows, but the inbox's
			errs := deliverAll(t, in, func(msg *message.Message) ([]*message.Message, error) {
				if err := addEffect(msg); err != nil || msg.UUID != bad {
					return nil, err
				}
				tx, err := handlerTx(msg.Context())
				if err != nil {
					return nil, err
				}
				return nil, do(msg.Context(), tx)
			}, newMessages(t, ids...)...)
			for id, err := range errs {
				if (err != nil) != (id == bad) {
					t.Errorf("%s: %v", id, err)
				}
			}
			n += 19
			p.expect(t, n, n, 0)
		}
	})
}

// Behind a pooler the connection may know the names that lib/pq gives. Then nothing is
// prepared any more.
func TestGroup_PreparesNothingWhereNamesAreTaken(t *testing.T) {
	onPostgreSQL(t, func(t *testing.T, p *testDB) {
		db := openTap(t, p.tap)
		db.SetMaxOpenConns(1)
		for i := range 20 {
			if _, err := db.ExecContext(t.Context(), fmt.Sprintf(`prepare "%d" as select 1`, i)); err != nil {
				t.Fatal(err)
			}
		}
		in, err := inbox.New(db, inbox.Config{Consumer: "stock", Database: p.cfg, Retry: inbox.Retry{Tries: 1}, Group: inbox.Group{Size: 20, Wait: time.Second}})
		if err != nil {
			t.Fatal(err)
		}
		for round := range 2 {
			p.tap.sent()
			ids := numbered(20)
			for i := range ids {
				ids[i] += fmt.Sprint(round)
			}
			for id, err := range deliverAll(t, in, effect, newMessages(t, ids...)...) {
				if err != nil {
					t.Errorf("%s: %v", id, err)
				}
			}
		}
		p.expect(t, 40, 40, 0)
		commits := 0
		for _, text := range p.tap.sent() {
			if text == "COMMIT" {
				commits++
			}
		}
		if commits > 3 { // groups were halved by the first round
			t.Errorf("the second round took %d transactions", commits)
		}
	})
}

// expectClosedInTime checks that statements are closed before the transaction ends
// that they were prepared in: behind a pooler another server would be told.
func expectClosedInTime(t *testing.T, sent []string, some bool) {
	t.Helper()
	open, closed := 0, 0 // the one that failed has a transaction beside that of the group
	for _, text := range sent {
		switch text {
		case "BEGIN":
			open++
		case "COMMIT", "ROLLBACK":
			open--
		case closeStatement:
			closed++
			if open == 0 {
				t.Error("a statement was closed after its transaction")
			}
		}
	}
	if (closed > 0) != some {
		t.Errorf("%d statements were closed", closed)
	}
}
