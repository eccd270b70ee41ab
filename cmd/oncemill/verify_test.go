package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/lib/pq"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/cmd/oncemill/internal/verify"
	"github.com/oncemill/oncemill/internal/testserver"
)

// target is where a test runs oncemill verify: a database and a virtual host in which others
// have a schema and a queue.
type target struct {
	t       *testing.T
	pg      testserver.PG
	amqp    string
	name    string // of the run
	logs    string // directory in which it makes that of its logs
	channel *amqp.Channel
}

func newTarget(t *testing.T) *target {
	t.Helper()
	pg := testserver.Postgres(t)
	at := &target{t: t, pg: pg, amqp: testserver.RabbitMQ(t), logs: t.TempDir()}
	at.name = verify.NamePrefix + pg.Schema[len(pg.Schema)-8:]
	conn, err := amqp.Dial(at.amqp)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if at.channel, err = conn.Channel(); err != nil {
		t.Fatal(err)
	}
	if _, err := at.channel.QueueDeclare("orders", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	if err := at.channel.PublishWithContext(t.Context(), "", "orders", false, false, amqp.Publishing{Body: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	at.exec("create table bystander (id integer)")
	t.Cleanup(func() { // of a run that failed
		_, err := pg.DB.ExecContext(context.WithoutCancel(t.Context()), "drop schema if exists "+at.name+" cascade")
		if err != nil {
			t.Error(err)
		}
	})
	return at
}

// command returns the command of a short run.
func (at *target) command(more ...string) (*exec.Cmd, *bytes.Buffer) {
	return command(at.t.Context(), []string{"TMPDIR=" + at.logs}, append([]string{"verify", "--database", at.pg.DSN, "--amqp-url", at.amqp, "--name", at.name, "--time", "5s", "--rate", testserver.Rounds("20", "40")}, more...)...)
}

// run runs the command and returns its output.
func (at *target) run(code int, more ...string) string {
	at.t.Helper()
	cmd, output := at.command(more...)
	_ = cmd.Run() // the exit code tells
	if got := cmd.ProcessState.ExitCode(); got != code {
		at.t.Errorf("exit code %d, want %d; output: %s", got, code, output)
	}
	return output.String()
}

func (at *target) exec(statement string) {
	at.t.Helper()
	if _, err := at.pg.DB.ExecContext(at.t.Context(), statement); err != nil {
		at.t.Fatalf("%s: %v", statement, err)
	}
}

func (at *target) has(statement string) bool {
	at.t.Helper()
	var found bool
	if err := at.pg.DB.QueryRowContext(at.t.Context(), "select exists ("+statement+")").Scan(&found); err != nil {
		at.t.Fatalf("%s: %v", statement, err)
	}
	return found
}

func (at *target) hasTable(name string) bool {
	return at.has("select from pg_tables where schemaname = " + pq.QuoteLiteral(at.name) + " and tablename = " + pq.QuoteLiteral(name))
}

// left returns what a run has left, or taken away.
func (at *target) left() (names []string) {
	at.t.Helper()
	if at.has("select from pg_namespace where nspname = " + pq.QuoteLiteral(at.name)) {
		names = append(names, "the schema")
	}
	if at.has("select from bystander") {
		names = append(names, "a row of another table")
	}
	if logs, err := os.ReadDir(at.logs); err != nil || len(logs) > 0 {
		names = append(names, "logs")
	}
	conn, err := amqp.Dial(at.amqp)
	if err != nil {
		at.t.Fatal(err)
	}
	defer conn.Close()
	for _, name := range []string{"orders", "_orders_first", "_receipts_second", "_mirror", "_orders", "_receipts"} {
		ch, err := conn.Channel() // the answer that there is none closes it
		if err != nil {
			at.t.Fatal(err)
		}
		if name == "orders" {
			if q, err := ch.QueueDeclarePassive(name, true, false, false, false, nil); err != nil || q.Messages != 1 {
				names = append(names, "another queue with other messages")
			}
			continue
		}
		if strings.Count(name, "_") == 2 || name == "_mirror" {
			_, err = ch.QueueDeclarePassive(at.name+name, true, false, false, false, nil)
		} else {
			err = ch.ExchangeDeclarePassive(at.name+name, "fanout", true, false, false, false, nil)
		}
		var answer *amqp.Error
		if !errors.As(err, &answer) || answer.Code != amqp.NotFound {
			names = append(names, name)
		}
	}
	return names
}

// deliverOneAgain puts a copy of the first order that it sees into the queue of its consumer.
func (at *target) deliverOneAgain() {
	at.t.Helper()
	q, err := at.channel.QueueDeclare("", false, true, true, false, nil)
	if err != nil {
		at.t.Fatal(err)
	}
	if err := at.channel.QueueBind(q.Name, "", at.name+"_orders", false, nil); err != nil {
		at.t.Fatal(err)
	}
	var seen amqp.Delivery
	testserver.Eventually(at.t, "an order arrives", func() (ok bool) {
		if seen, ok, err = at.channel.Get(q.Name, true); err != nil {
			at.t.Fatal(err)
		}
		return ok && seen.Headers["kind"] == ""
	})
	err = at.channel.PublishWithContext(at.t.Context(), "", at.name+"_orders_first", false, false, amqp.Publishing{
		Headers: seen.Headers, MessageId: seen.MessageId, Timestamp: seen.Timestamp, Type: seen.Type, Body: seen.Body,
	})
	if err != nil {
		at.t.Fatal(err)
	}
}

func TestVerifyCommand_PassesAndLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	at := newTarget(t)
	dir := t.TempDir()
	page := filepath.Join(dir, "certificate.html")
	output := at.run(0, "--seed", "7", "--json", filepath.Join(dir, "certificate.json"), "--html", page)
	lines := strings.Split(strings.TrimSpace(output), "\n")
	if last := lines[len(lines)-1]; !strings.HasPrefix(last, "verify: passed ") {
		t.Errorf("the last line: %s", last)
	}
	if left := at.left(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	text, err := os.ReadFile(filepath.Join(dir, "certificate.json"))
	if err != nil {
		t.Fatal(err)
	}
	var c verify.Certificate
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	injected := map[string]int{}
	for _, f := range c.Faults {
		if injected[f.Kind] = f.Injected; f.Injected == 0 && f.Skipped == "" {
			t.Errorf("%s: none, without a reason", f.Kind)
		}
	}
	f := c.Figures
	if !c.Passed() || f.Messages == 0 || f.Effects == 0 || f.Answers == 0 || f.ByHand != injected["messages published a second time"] || len(injected) != 7 {
		t.Errorf("certificate: %s", text)
	}
	html, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"oncemill verify: passed", "synchronous_commit", "seed", at.name} {
		if !bytes.Contains(html, []byte(want)) {
			t.Errorf("the page lacks %q", want)
		}
	}
	for _, all := range []string{output, string(text), string(html)} {
		if strings.Contains(all, "postgres:postgres") || strings.Contains(all, "guest:guest") {
			t.Error("a password is shown")
		}
	}
}

// Triggers of the test break two promises: rows vanish from the outbox, and the inbox forgets
// which messages it has handled, one of which is delivered again.
func TestVerifyCommand_NamesWhatIsBroken(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	at := newTarget(t)
	cmd, output := at.command("--patience", "5s")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testserver.Eventually(t, "the tables exist", func() bool { return at.hasTable("outbox") && at.hasTable("inbox") })
	at.exec(strings.ReplaceAll(`create function SCHEMA.vanish() returns trigger language plpgsql as $$ begin
		execute format('delete from %I.%I where message_id = $1', tg_table_schema, tg_table_name) using new.message_id;
		return null;
	end $$;
	create trigger vanish after insert on SCHEMA.outbox for each row when (hashtext(new.message_id) % 4 = 0) execute function SCHEMA.vanish();
	create trigger vanish after insert on SCHEMA.inbox for each row execute function SCHEMA.vanish()`, "SCHEMA", at.name))
	at.deliverOneAgain()
	_ = cmd.Wait() // the exit code tells
	if code := cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("exit code %d; output: %s", code, output)
	}
	for _, want := range []string{"\nverify: failed: broken: no loss, one effect", "was committed and never reached the broker", " effects after ", "The logs of the processes are in " + at.logs} {
		if !strings.Contains(output.String(), want) {
			t.Errorf("the output lacks %q: %s", want, output)
		}
	}
	if left := at.left(); !slices.Equal(left, []string{"logs"}) {
		t.Errorf("left: %q", left)
	}
}

func TestVerifyCommand_RefusesWhatExists(t *testing.T) {
	t.Parallel()
	at := newTarget(t)
	at.exec("create schema " + at.name + "; create table " + at.name + ".kept ()")
	if output := at.run(1); !strings.Contains(output, "schema "+at.name+" exists already") || !at.hasTable("kept") {
		t.Errorf("a schema: %s", output)
	}
	at.exec("drop schema " + at.name + " cascade")
	queue := at.name + "_mirror"
	if _, err := at.channel.QueueDeclare(queue, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	if output := at.run(1); !strings.Contains(output, "queue "+queue+" exists already") {
		t.Errorf("a queue: %s", output)
	}
	if left := at.left(); len(left) != 1 || left[0] != "_mirror" {
		t.Errorf("left: %q", left)
	}
	if _, err := at.channel.QueueDelete(queue, false, false, false); err != nil {
		t.Fatal(err)
	}
	exchange := at.name + "_receipts"
	if err := at.channel.ExchangeDeclare(exchange, "topic", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	if output := at.run(1); !strings.Contains(output, "exchange "+exchange+" exists already") {
		t.Errorf("an exchange: %s", output)
	}
	if left := at.left(); len(left) != 1 || left[0] != "_receipts" {
		t.Errorf("left: %q", left)
	}
}

func TestVerifyCommand_LeavesNothingBehindWhenItIsInterrupted(t *testing.T) {
	t.Parallel()
	at := newTarget(t)
	cmd, output := at.command("--time", "10m")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testserver.Eventually(t, "requests are answered", func() bool {
		return at.hasTable("verify_effects") && at.has("select from "+at.name+".verify_effects")
	})
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // the exit code tells
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(output.String(), "interrupted") {
		t.Errorf("exit code %d; output: %s", code, output)
	}
	if left := at.left(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
