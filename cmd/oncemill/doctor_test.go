package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/doctor"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestDoctorCommand_ExitsWithOneForErrorsOnly(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	run := runner(t, []string{"ONCEMILL_DATABASE=sqlite:" + path})
	run(2, "doctor") // no file
	run(0, "migrate")
	if out := run(0, "doctor"); out != "Nothing is wrong.\n" {
		t.Errorf("%q", out)
	}
	if out := run(0, "doctor", "--json"); out != "[]\n" {
		t.Errorf("%q", out)
	}
	run(2, "doctor", "--snapshot-age", "-1s")
	db := testserver.OpenSQLite(t, path)
	exec := func(text string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	// What a finding says helps.
	exec("insert into oncemill_inbox (consumer, message_id, received_at) values ('gone', 'm', 0)")
	exec(`insert into oncemill_dead_letters (state, source, topic, message_id, key, payload, reason, error, fingerprint, died_at, closed_at)
		values ('replayed', 'consumer', 't', 'm', '', '', 'refused', '', 'f', 0, 1)`)
	exec(`insert into oncemill_idempotency (key_hash, caller, fingerprint, state, owner, fence, endpoint, completed_at, created_at, lease_until, expires_at, forget_at)
		values (x'6b', x'63', x'66', 2, '', 1, 'POST /', 0, 0, 0, 0, 0)`)
	var told []doctor.Finding
	if err := json.Unmarshal([]byte(run(0, "doctor", "--json")), &told); err != nil || len(told) != 3 {
		t.Fatalf("%+v, %v", told, err)
	}
	for _, f := range told {
		_, flags, found := strings.Cut(f.Remedy, ": oncemill purge ")
		if !found {
			t.Fatalf("%q names no command", f.Remedy)
		}
		run(0, append([]string{"purge"}, strings.Fields(strings.TrimPrefix(flags, "--every 1h"))...)...)
	}
	if out := run(0, "doctor"); out != "Nothing is wrong.\n" {
		t.Errorf("%q", out)
	}

	exec("insert into oncemill_inbox (consumer, message_id, received_at) values ('stock\n\x1b[31m', 'm', 0)")
	if out := run(0, "doctor"); !strings.HasPrefix(out, "warning (purge): Nobody purges the ids of 1 consumers") || strings.Contains(out, "\x1b") || strings.Count(out, "\n") != 2 || !strings.Contains(out, "name it.") {
		t.Errorf("%q", out)
	}
	exec("drop index oncemill_parked_key")
	out := run(1, "doctor", "--json")
	var found []doctor.Finding
	if err := json.NewDecoder(strings.NewReader(out)).Decode(&found); err != nil || len(found) != 2 || found[0].Check != "indexes" || found[1].Check != "purge" {
		t.Errorf("%v: %s", err, out)
	}
}

func TestDoctorCommand_ChecksTheBrokerIfItIsNamed(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, uri, "orders")
	path := filepath.Join(t.TempDir(), "shop.db")
	run := runner(t, []string{"ONCEMILL_DATABASE=sqlite:" + path})
	run(0, "migrate")
	run(0, "doctor", "--amqp-url", uri, "--queue", "orders", "--topology", "queue", "--topic", "orders")
	if out := run(1, "doctor", "--amqp-url", uri, "--queue", "payments"); !strings.HasPrefix(out, `error (queue): Queue "payments"`) {
		t.Errorf("%q", out)
	}
	// A broker that refuses hides no finding of the database, and the other way round.
	db := testserver.OpenSQLite(t, path)
	if _, err := db.ExecContext(t.Context(), "drop index oncemill_parked_key"); err != nil {
		t.Fatal(err)
	}
	refused := strings.Replace(uri, "guest:guest", "guest:hunter2", 1)
	if out := run(1, "doctor", "--amqp-url", refused); !strings.HasPrefix(out, "error (indexes)") || !strings.Contains(out, "RabbitMQ") || strings.Contains(out, "hunter2") {
		t.Errorf("%q", out)
	}
	silent := "postgres://nobody@127.0.0.1:1/shop?sslmode=disable"
	if out := run(1, "doctor", "--database", silent, "--amqp-url", uri, "--queue", "payments"); !strings.HasPrefix(out, `error (queue)`) || !strings.Contains(out, "connection refused") {
		t.Errorf("%q", out)
	}
	for _, more := range [][]string{nil, {"--json"}} {
		if out := run(1, append([]string{"doctor", "--database", silent, "--amqp-url", uri}, more...)...); !strings.HasPrefix(out, "oncemill: doctor: ") {
			t.Errorf("%q", out)
		}
	}
	for name, args := range map[string][]string{
		"--amqp-url":   {"--queue", "orders"},
		"--topology":   {"--amqp-url", uri, "--topology", "x"},
		"--amqp-admin": {"--amqp-url", uri, "--amqp-admin", "http://a:hunter2@example.com"},
	} {
		if out := run(2, append([]string{"doctor"}, args...)...); !strings.Contains(out, name) || strings.Contains(out, "hunter2") {
			t.Errorf("%v: %s", args, out)
		}
	}
}
