package outbox_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// withoutLimits takes the limits of rows away: a server from before them.
func (p *fixture) withoutLimits(t *testing.T) {
	t.Helper()
	dialect := "postgresql"
	if p.isSQLite() {
		dialect = "sqlite"
	}
	text, err := fs.ReadFile(outbox.Migrations.FS, dialect+"/0004_limits.down.sql")
	expectNoError(t, err)
	p.exec(t, string(text))
}

// An id that nobody was given is no reason to stop, nor to move the sequence there.
func TestCheck_PassesForgedIDsOver(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		var log bytes.Buffer
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		p.publish(t, messages("m", 3)...)
		p.withoutLimits(t)
		for _, id := range []int64{math.MaxInt64, math.MaxInt64 - 1, 1 << 49} {
			p.insert(t, id, fmt.Sprint("k", id%7), fmt.Sprint("forged ", id))
			if p.isSQLite() {
				p.setSequence(t, 3) // it follows what is inserted
			}
			expectNoError(t, p.queue.Check(t.Context()))
			if text := log.String(); !strings.Contains(text, fmt.Sprint("id=", id)) || !strings.Contains(text, "forged") {
				t.Errorf("logged %q", text)
			}
		}
		p.remove(t, refs(p.read(t))...) // into the history
		expectNoError(t, p.queue.Check(t.Context()))
		last, err := p.queue.RepairSequence(t.Context(), 0)
		if err != nil || last != 3 {
			t.Errorf("repaired to %d, %v; want 3", last, err)
		}
		p.publish(t, newMessage("next", "k"))
		if rows := p.read(t); len(rows) != 1 || rows[0].ID != 4 {
			t.Errorf("the next row is %+v", rows)
		}
	})
}

func TestCheck_PassesForgedSequencesOfScheduledMessagesOver(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes") // SQLite looks at its rows itself
	p.withoutLimits(t)
	p.exec(t, `insert into {{scheduled}} (deliver_at, seq, lane, topic, message_id, payload) values (clock_timestamp() + interval '1 hour', $1, 1, 't', 'm', '')`, int64(math.MaxInt64))
	expectNoError(t, p.queue.Check(t.Context()))
	if _, err := p.queue.RepairSequence(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if next := p.count(t, `select nextval(pg_get_serial_sequence('{{scheduled}}', 'seq'))`); next > 2 {
		t.Errorf("the next is %d", next)
	}
}

// Whatever a program writes, a row fits what a relay can work with.
func TestMigrations_LimitWhatARowHolds(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		long := strings.Repeat("x", 256)
		wide := strings.Repeat("\u00e9", 128) // 256 bytes
		far := map[bool][]any{false: {"infinity", "-infinity", "10001-01-01T00:00:00Z", "1969-12-31T23:59:59Z"}, true: {"infinity", -1, int64(math.MaxInt64), 253402300800000001}}[p.isSQLite()]
		try := func(table, column string, value any) error {
			columns := map[string]any{"lane": 1, "topic": "t", "message_id": "m", "key": "", "payload": []byte{}, "metadata": []byte{}}
			if table == "scheduled" {
				columns["deliver_at"] = p.inOneHour()
			}
			columns[column] = value
			var names, params []string
			var args []any
			for name, value := range columns {
				names, args = append(names, name), append(args, value)
				params = append(params, fmt.Sprint("$", len(args)))
			}
			_, err := p.db.ExecContext(t.Context(), p.expand(t, fmt.Sprintf(`insert into {{%s}} (%s) values (%s)`, table, strings.Join(names, ", "), strings.Join(params, ", "))), args...)
			return err
		}
		for table, id := range map[string]string{"outbox": "id", "scheduled": "seq"} {
			bad := map[string][]any{
				"lane": {-1, 32}, "topic": {"", long, wide}, "message_id": {"", long, wide}, "key": {long, wide},
				"metadata": {make([]byte, 65_537)}, id: {0, -1, int64(math.MaxInt64)},
			}
			if table == "outbox" {
				bad["created_at"] = far
				if !p.isSQLite() { // whose microseconds a double does not hold exactly
					bad["created_at"] = append(far, "2255-06-06T00:00:00Z")
				}
			} else {
				bad["deliver_at"] = far
			}
			if p.isSQLite() {
				bad["lane"] = append(bad["lane"], 1.5)
				for _, column := range []string{"topic", "message_id", "key"} {
					bad[column] = append(bad[column], []byte("blob"))
				}
			}
			for column, values := range bad {
				for _, value := range values {
					if err := try(table, column, value); err == nil {
						t.Errorf("%s: %s of %.40q is taken", table, column, fmt.Sprint(value))
					}
				}
			}
			for column, value := range map[string]any{"topic": long[1:], "message_id": wide[2:], "key": long[1:], "metadata": make([]byte, 65_536)} {
				expectNoError(t, try(table, column, value))
			}
			payload := `convert_to(repeat('x', $2::int), 'UTF8')`
			if p.isSQLite() {
				payload = `zeroblob($2)`
			}
			insert := func(size int) error {
				columns, values, args := "lane, topic, message_id, payload", "1, 't', $1, "+payload, []any{"m", size}
				if table == "scheduled" {
					columns, values, args = columns+", deliver_at", values+", $3", append(args, p.inOneHour())
				}
				_, err := p.db.ExecContext(t.Context(), p.expand(t, fmt.Sprintf(`insert into {{%s}} (%s) values (%s)`, table, columns, values)), args...)
				return err
			}
			if err := insert(128<<20 + 1); err == nil {
				t.Errorf("%s: a payload of more than 128 MiB is taken", table)
			}
			// The other tables have the same limit; to write so much takes long.
			if testserver.Long() || table == "outbox" && !p.isSQLite() {
				expectNoError(t, insert(128<<20))
			}
		}
	})
}

// A row whose message id is a blob was delivered again and again, since it was never found
// to be deleted. One whose lane has a fraction was never delivered.
func TestMigrations_MakeTextOfBlobs(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	for _, direction := range []string{"down", "up"} {
		text, err := fs.ReadFile(outbox.Migrations.FS, "sqlite/0005_types."+direction+".sql")
		expectNoError(t, err)
		p.exec(t, string(text))
		if direction == "down" {
			p.exec(t, `insert into {{outbox}} (lane, topic, message_id, key, payload) values (1.5, $1, $1, $1, $1)`, []byte("blob"))
			p.exec(t, `insert into {{scheduled}} (lane, topic, message_id, key, payload, deliver_at) values (1.5, $1, $1, $1, $1, $2)`, []byte("later"), p.inOneHour())
		}
	}
	rows := p.read(t)
	if len(rows) != 1 || rows[0].Lane != 1 || rows[0].MessageID != "blob" || rows[0].Topic != "blob" || rows[0].Key != "blob" {
		t.Errorf("read %+v", rows)
	}
	p.remove(t, refs(rows)...)
	if n := p.count(t, `select count(*) from {{outbox}}`); n != 0 {
		t.Errorf("%d are left", n)
	}
	if n := p.count(t, `select count(*) from {{scheduled}} where lane = 1 and topic = 'later' and message_id = 'later' and key = 'later'`); n != 1 {
		t.Errorf("%d are scheduled as text", n)
	}
}

// inOneHour is a time in the table's own terms.
func (p *fixture) inOneHour() any {
	when := time.Now().Add(time.Hour)
	if p.isSQLite() {
		return when.UnixMicro()
	}
	return when
}

// What is scheduled becomes a row of the outbox: it has to fit before the limits hold.
func TestMigrations_RefuseLimitsThatAScheduledRowBreaks(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.withoutLimits(t)
		p.exec(t, `insert into {{scheduled}} (deliver_at, lane, topic, message_id, payload) values ($1, 1, $2, 'm', '')`, p.inOneHour(), strings.Repeat("x", 256))
		dialect := "postgresql"
		if p.isSQLite() {
			dialect = "sqlite"
		}
		text, err := fs.ReadFile(outbox.Migrations.FS, dialect+"/0004_limits.up.sql")
		expectNoError(t, err)
		if _, err := p.db.ExecContext(t.Context(), p.expand(t, string(text))); err == nil {
			t.Error("the limits hold although a row breaks them")
		}
	})
}
