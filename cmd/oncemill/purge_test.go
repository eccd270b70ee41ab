package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestPurgeCommand_DeletesWhatHasExpired(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	env := []string{"ONCEMILL_DATABASE=sqlite:" + path}
	run := runner(t, env)
	run(0, "migrate")
	if text := run(0, "purge", "--inbox-retention", "1h"); text != "" {
		t.Errorf("nothing has expired, but: %s", text)
	}
	db := testserver.OpenSQLite(t, path)
	for _, text := range []string{
		expiring("01", "1"),
		`insert into oncemill_inbox (consumer, message_id, received_at) values ('stock', 'old', 1), ('stock', 'new', cast(unixepoch('subsec') * 1000000 as integer))`,
		`insert into oncemill_dead_letters (state, source, consumer, topic, message_id, payload, reason, error, fingerprint, closed_at)
			values ('replayed', 'consumer', 'stock', 'orders', 'm', '', 'failed', '', 'f', 1)`,
	} {
		if _, err := db.ExecContext(t.Context(), text); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	if text := run(0, "purge"); text != "1 idempotency keys and responses deleted\n" {
		t.Errorf("without a retention of ids and dead letters: %s", text)
	}
	if text := run(0, "purge", "--inbox-retention", "1h"); !strings.Contains(text, "1 ids and failure records of stock deleted") {
		t.Errorf("got: %s", text)
	}
	if text := run(0, "purge", "--letter-retention", "1h"); !strings.Contains(text, "1 closed dead letters deleted") {
		t.Errorf("got: %s", text)
	}
	if _, err := db.ExecContext(t.Context(), `insert into oncemill_audit (actor, action, subject, at) values ('ada', 'x', 'old', 1), ('ada', 'x', 'young', cast(unixepoch('subsec') * 1000000 as integer))`); err != nil {
		t.Fatal(err)
	}
	if text := run(0, "purge"); text != "" {
		t.Errorf("without a retention of the audit: %s", text)
	}
	if text := run(0, "purge", "--audit-retention", "24h"); text != "1 entries of the audit deleted\n" {
		t.Errorf("got: %s", text)
	}
	run(2, "purge", "--every", "1ms")
	run(2, "purge", "--audit-retention", "23h")
	run(2, "purge", "--inbox-retention", "59m")
	run(2, "purge", "--letter-retention", "59m")
	run(2, "purge", "--letter-retention", "-1h")
}

// expiring is a statement that writes an idempotency key.
func expiring(hash, at string) string {
	return `insert into oncemill_idempotency (key_hash, caller, fingerprint, state, owner, fence, endpoint, created_at, completed_at, lease_until, expires_at, forget_at)
		values (x'` + hash + strings.Repeat("00", 31) + `', zeroblob(16), zeroblob(33), 2, zeroblob(16), 1, 'POST /', 0, 1, 1, ` + at + `, ` + at + `)`
}

// One key expires before the command starts, one while it runs.
func TestPurgeCommand_RepeatsUntilItIsStopped(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	env := []string{"ONCEMILL_DATABASE=sqlite:" + path}
	if cmd, output := command(t.Context(), env, "migrate"); cmd.Run() != nil {
		t.Fatalf("migrate: %s", output)
	}
	db := testserver.OpenSQLite(t, path)
	exec := func(text string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	exec(expiring("01", "1"))
	exec(expiring("02", "cast(unixepoch('subsec') * 1000000 as integer) + 3600000000"))
	left := func() (n int) {
		if err := db.QueryRowContext(t.Context(), `select count(*) from oncemill_idempotency`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}

	cmd, output := command(t.Context(), env, "purge", "--every", "1s")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testserver.Eventually(t, "the first round is over", func() bool { return left() == 1 })
	exec(`update oncemill_idempotency set expires_at = 1, forget_at = 1`)
	testserver.Eventually(t, "what has expired meanwhile is gone", func() bool { return left() == 0 })
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("interrupted: %v: %s", err, output)
	}
}

// purgeable is a PostgreSQL with a row of each kind that has expired.
func purgeable(t *testing.T) (pg testserver.PG, names database.Database) {
	t.Helper()
	pg = testserver.Postgres(t)
	names, err := database.Resolve(pg.DB, pg.Config)
	if err == nil {
		err = oncemill.Migrate(t.Context(), pg.DB, pg.Config, idempotency.Migrations, inbox.Migrations, audit.Migrations, dlq.Migrations)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		`alter table {{inbox}} disable trigger user`, // the seal
		`insert into {{idempotency}} (key_hash, caller, fingerprint, state, owner, fence, endpoint, created_at, completed_at, lease_until, expires_at, forget_at)
			select '\x01', '', '', 2, '', 1, 'POST /', past, past, past, past, past from (select now() - interval '1 day') as t (past)`,
		`insert into {{inbox}} (consumer, message_id, received_at) values ('stock', 'old', now() - interval '1 day')`,
		`insert into {{dead_letters}} (state, source, consumer, topic, message_id, payload, reason, error, fingerprint, closed_at)
			values ('replayed', 'consumer', 'stock', 'orders', 'm', '', 'failed', '', 'f', now() - interval '1 day')`,
	} {
		if _, err := pg.DB.ExecContext(t.Context(), names.Expand(text)); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	return pg, names
}

func TestPurgeCommand_WaitsForALockedTableForALimitedTime(t *testing.T) {
	t.Parallel()
	for table, want := range map[string]string{
		"idempotency": "idempotency keys: ", "inbox": "ids of inboxes: ", "dead_letters": "dead letters: ", "migrations": "ids of inboxes: ",
	} {
		t.Run(table, func(t *testing.T) {
			t.Parallel()
			pg, names := purgeable(t)
			tx, err := pg.DB.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback() //nolint:errcheck // it ends the lock
			if _, err := tx.ExecContext(t.Context(), names.Expand(`lock table {{`+table+`}} in access exclusive mode`)); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait/2)
			defer cancel()
			cmd, output := command(ctx, []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema}, "purge", "--inbox-retention", "1h", "--letter-retention", "1h")
			_ = cmd.Run() // the exit code tells
			if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(output.String(), want) {
				t.Errorf("exit code %d, want 1 and %q: %s", code, want, output)
			}
			if deleted := strings.Count(output.String(), " deleted\n"); table != "migrations" && deleted != 2 {
				t.Errorf("%d other tables were purged, want 2: %s", deleted, output)
			}
		})
	}
}

// The server is silent at the first statement, or at the last deletion.
func TestPurgeCommand_GoesOnAfterASilence(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"pg_attribute", "dead_letters"} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			pg, names := purgeable(t)
			proxy, behind := testserver.NewPostgresProxy(t, pg.DSN)
			proxy.Silence(testserver.Containing(text), 1)
			cmd, output := command(t.Context(), []string{"ONCEMILL_DATABASE=" + behind, "ONCEMILL_SCHEMA=" + pg.Config.Schema}, "purge", "--every", "1s", "--inbox-retention", "1h", "--letter-retention", "1h")
			log := &sharedOutput{}
			cmd.Stderr = log
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			testserver.Eventually(t, "all that has expired is gone", func() bool {
				var left int
				err := pg.DB.QueryRowContext(t.Context(), names.Expand(`select (select count(*) from {{idempotency}}) + (select count(*) from {{inbox}}) + (select count(*) from {{dead_letters}})`)).Scan(&left)
				if err != nil {
					t.Fatal(err)
				}
				return left == 0
			})
			if proxy.Silenced() != 1 || !strings.Contains(log.String(), "purge failed") {
				t.Errorf("%d connections were silenced; log: %s", proxy.Silenced(), log)
			}
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("interrupted: %v: %s%s", err, output, log)
			}
		})
	}
}

// What is deleted was written before, as lines of JSON; what cannot be written stays.
func TestPurgeCommand_ArchivesWhatItDeletes(t *testing.T) {
	t.Parallel()
	path, dir := filepath.Join(t.TempDir(), "shop.db"), t.TempDir()
	run := runner(t, []string{"ONCEMILL_DATABASE=sqlite:" + path})
	run(0, "migrate")
	db := testserver.OpenSQLite(t, path)
	exec := func(text string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	archived := func(kind string) []map[string]any {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(dir, kind+"-*.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		var rows []map[string]any
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(content)) {
				var row map[string]any
				if json.Unmarshal([]byte(line), &row) == nil && strings.HasSuffix(line, "\n") {
					rows = append(rows, row)
				}
			}
		}
		return rows
	}
	purge := func(code int) string {
		t.Helper()
		return run(code, "purge", "--inbox-retention", "1h", "--archive-dir", dir)
	}
	exec(expiring("01", "1"))
	exec(`insert into oncemill_inbox (consumer, message_id, received_at) values ('stock', 'old', 1)`)
	run(2, "purge", "--archive-dir", filepath.Join(dir, "absent"))
	run(2, "purge", "--archive-dir", path)
	if out := purge(0); !strings.Contains(out, "1 idempotency keys") || !strings.Contains(out, "1 ids") {
		t.Error(out)
	}
	keys, ids := archived("idempotency-keys"), archived("inbox-ids")
	if len(keys) != 1 || keys[0]["endpoint"] != "POST /" || len(ids) != 1 || ids[0]["message_id"] != "old" || ids[0]["consumer"] != "stock" {
		t.Errorf("archived %v and %v", keys, ids)
	}
	// A line that a crash has cut short spoils no other one.
	for _, file := range []string{"idempotency-keys", "inbox-ids"} {
		files, err := filepath.Glob(filepath.Join(dir, file+"-*.jsonl"))
		if err != nil || len(files) == 0 {
			t.Fatal(err)
		}
		f, err := os.OpenFile(files[len(files)-1], os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(`{"id":`); err != nil || f.Close() != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(files[0]); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v", info.Mode(), err)
		}
	}
	exec(expiring("02", "1"))
	exec(`insert into oncemill_inbox (consumer, message_id, received_at) values ('stock', 'older', 1)`)
	purge(0)
	if keys, ids := archived("idempotency-keys"), archived("inbox-ids"); len(keys) != 2 || len(ids) != 2 {
		t.Errorf("archived %v and %v", keys, ids)
	}
	// Where a file of that name cannot be written, nothing is deleted.
	dir = t.TempDir()
	for offset := range 2 { // also if the day ends now
		day := time.Now().UTC().AddDate(0, 0, offset).Format("-2006-01-02") + ".jsonl"
		for _, kind := range []string{"idempotency-keys", "inbox-ids"} {
			if err := os.Mkdir(filepath.Join(dir, kind+day), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	exec(expiring("03", "1"))
	exec(`insert into oncemill_inbox (consumer, message_id, received_at) values ('stock', 'oldest', 1)`)
	purge(1)
	var left int
	if err := db.QueryRowContext(t.Context(), `select (select count(*) from oncemill_idempotency) + (select count(*) from oncemill_inbox)`).Scan(&left); err != nil || left != 2 {
		t.Errorf("%d left, %v", left, err)
	}
}
