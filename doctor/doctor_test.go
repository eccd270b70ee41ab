package doctor_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/doctor"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// patient is a database in which all is well, until a test makes a fault.
type patient struct {
	*testing.T

	db    *sql.DB
	where database.Database
	cfg   doctor.Config
	clock func() time.Time
}

func newPatient(t *testing.T, db *sql.DB, cfg oncemill.Config) *patient {
	t.Helper()
	err := oncemill.Migrate(t.Context(), db, cfg, outbox.Migrations, relay.Migrations, audit.Migrations, steer.Migrations, dlq.Migrations, inbox.Migrations, idempotency.Migrations, idempotency.QuotaMigrations)
	if err != nil {
		t.Fatal(err)
	}
	where, err := database.Resolve(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &patient{T: t, db: db, where: where, cfg: doctor.Config{Database: cfg}, clock: time.Now}
}

func (p *patient) exec(text string, args ...any) {
	p.Helper()
	if _, err := p.db.ExecContext(p.Context(), p.where.Expand(text), args...); err != nil {
		p.Fatalf("%s: %v", text, err)
	}
}

func (p *patient) check() []doctor.Finding {
	p.Helper()
	d, err := doctor.New(p.db, p.cfg)
	if err != nil {
		p.Fatal(err)
	}
	d.SetClock(p.clock)
	found, err := d.Check(p.Context())
	if err != nil {
		p.Fatal(err)
	}
	return found
}

// expect fails unless exactly this is found, at once or when the server has noticed the fault.
func (p *patient) expect(check string, severity doctor.Severity, names string) {
	p.Helper()
	var found []doctor.Finding
	defer func() {
		if p.Failed() {
			p.Logf("found: %+v", found)
		}
	}()
	testserver.EventuallyMoving(p.T, "there is one finding", func() bool { found = p.check(); return len(found) == 1 }, func() string { return fmt.Sprint(found) })
	f := found[0]
	if f.Check != check || f.Severity != severity || !strings.Contains(f.Problem, names) || f.Remedy == "" {
		p.Errorf("%+v; want %s, %s, %q", f, check, severity, names)
	}
}

func (p *patient) healthy() {
	p.Helper()
	var found []doctor.Finding
	testserver.EventuallyMoving(p.T, "nothing is found", func() bool { found = p.check(); return len(found) == 0 }, func() string { return fmt.Sprint(found) })
}

// fault is one that the tables of both databases can have.
type fault struct {
	do       func(p *patient)
	check    string
	severity doctor.Severity
	names    string
}

func past(p *patient, days string) string {
	if p.where.Dialect == oncemill.SQLite {
		return `cast(unixepoch('subsec') * 1000000 as integer) - ` + days + ` * 86400000000`
	}
	return `clock_timestamp() - ` + days + ` * interval '1 day'`
}

func insertID(p *patient, days string) {
	if p.where.Dialect == oncemill.PostgreSQL {
		p.exec(`alter table {{inbox}} disable trigger user`) // the seal
	}
	p.exec(`insert into {{inbox}} (consumer, message_id, received_at) values ('stock', 'm', ` + past(p, days) + `)`)
}

var tableFaults = map[string]fault{
	"a missing index": {func(p *patient) {
		name := `{{name:dead_letters_fingerprint}}`
		if p.where.Dialect == oncemill.PostgreSQL {
			name = `{{dead_letters_fingerprint}}`
		}
		p.exec(`drop index ` + name)
	}, "indexes", doctor.Error, "dead_letters_fingerprint"},
	"keys that nobody purges": {func(p *patient) {
		now := past(p, "2")
		p.exec(`insert into {{idempotency}} (key_hash, caller, fingerprint, state, owner, fence, endpoint, completed_at, created_at, lease_until, expires_at, forget_at)
			values ('k', 'c', 'f', 2, '', 1, 'POST /', ` + strings.Repeat(now+", ", 4) + now + `)`)
	}, "purge", doctor.Warning, "idempotency keys"},
	"ids that nobody purges": {func(p *patient) { insertID(p, "9") }, "purge", doctor.Warning, `"stock"`},
	"dead letters that nobody purges": {func(p *patient) {
		p.exec(`insert into {{dead_letters}} (state, source, topic, message_id, key, payload, reason, error, fingerprint, died_at, closed_at)
			values ('replayed', 'consumer', 't', 'm', '', '', 'refused', '', 'f', ` + past(p, "100") + `, ` + past(p, "99") + `)`)
	}, "purge", doctor.Warning, "dead letters"},
	"a retention shorter than the history": {func(p *patient) {
		p.cfg.InboxRetention = 36 * time.Hour
		if p.where.Dialect == oncemill.PostgreSQL {
			p.exec(`create table {{outbox_history_old}} partition of {{outbox_history}} for values from ('2000-01-01') to ('9999-01-01')`)
		}
		p.exec(`insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at) values (1, 1, 't', 'm', '', '', '', ` + past(p, "2") + `, ` + past(p, "2") + `)`)
	}, "retention", doctor.Warning, "2.0 days"},
	"a clock that is ahead": {func(p *patient) {
		p.clock = func() time.Time { return time.Now().Add(time.Minute) }
	}, "clock", doctor.Warning, "differ by"},
	"a clock that is behind": {func(p *patient) {
		p.clock = func() time.Time { return time.Now().Add(-time.Minute) }
	}, "clock", doctor.Warning, "differ by"},
}

func TestDoctor_FindsEachFaultOfTheTables(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	for name, f := range tableFaults {
		schema := strings.ReplaceAll(name[:min(len(name), 25)], " ", "_")
		run := func(t *testing.T, p *patient) {
			p.healthy()
			insertID(p, "6") // within its retention
			p.healthy()
			p.exec(`delete from {{inbox}}`)
			f.do(p)
			p.expect(f.check, f.severity, f.names)
			if f.check == "indexes" { // what it says helps
				p.exec(between(p.check()[0].Remedy, "writers: ", "; if"))
				p.healthy()
			}
		}
		t.Run(name+" on PostgreSQL", func(t *testing.T) {
			t.Parallel()
			run(t, newPatient(t, server.Open(), oncemill.Config{Schema: schema}))
		})
		t.Run(name+" on SQLite", func(t *testing.T) {
			t.Parallel()
			run(t, newPatient(t, testserver.SQLite(t), oncemill.Config{}))
		})
	}
}

// The settings are those of one server, so the cases run one after another.
func TestDoctor_FindsEachFaultOfAServer(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t, "wal_level=logical", "max_prepared_transactions=5")
	p := newPatient(t, server.Open(), oncemill.Config{})
	p.cfg.SnapshotAge = 100 * time.Millisecond
	system := func(setting, value string) {
		p.exec(`alter system set ` + setting + ` = ` + value)
		p.exec(`select pg_reload_conf()`)
	}
	reset := func(setting string) { p.exec(`alter system reset ` + setting); p.exec(`select pg_reload_conf()`) }
	with := func(params ...string) func() {
		whole := p.db
		p.db = server.Open(params...)
		return func() { p.db = whole }
	}
	for _, c := range []struct {
		name     string
		fault    func() (undo func())
		check    string
		severity doctor.Severity
		names    string
	}{
		{"synchronous_commit off", func() func() { return with("synchronous_commit=off") }, "synchronous-commit", doctor.Error, "is off"},
		{"isolation", func() func() { return with("default_transaction_isolation=repeatable read") }, "isolation", doctor.Warning, "repeatable read"},
		{"another role's synchronous_commit", func() func() {
			p.exec(`create role producer`)
			p.exec(`alter role producer set synchronous_commit = off`)
			return func() { p.exec(`drop role producer`) }
		}, "synchronous-commit", doctor.Error, `"producer"`},
		{"another role's synchronous_commit in this database", func() func() {
			p.exec(`create role "Etl"`)
			p.exec(`alter role "Etl" in database postgres set synchronous_commit = 'False'`)
			return func() {
				for _, f := range p.check() { // what it says helps
					p.exec(between(f.Remedy, "run ", " and let"))
				}
				p.healthy()
				p.exec(`drop role "Etl"`)
			}
		}, "synchronous-commit", doctor.Error, `"Etl"`},
		{"all roles' synchronous_commit", func() func() {
			p.exec(`alter role all set synchronous_commit = 0`)
			p.db = server.Open("synchronous_commit=on")
			return func() {
				for _, f := range p.check() {
					p.exec(between(f.Remedy, "run ", " and let"))
				}
			}
		}, "synchronous-commit", doctor.Error, "All roles have"},
		{"autovacuum off", func() func() { system("autovacuum", "off"); return func() { reset("autovacuum") } }, "autovacuum", doctor.Error, "track_counts"},
		{"autovacuum off for a table", func() func() {
			p.exec(`alter table {{outbox_2}} set (autovacuum_enabled = f, fillfactor = 90)`)
			return func() { p.exec(`alter table {{outbox_2}} reset (autovacuum_enabled, fillfactor)`) }
		}, "autovacuum", doctor.Error, "outbox_2"},
		{"fsync off", func() func() { system("fsync", "off"); return func() { reset("fsync") } }, "fsync", doctor.Error, "power failure"},
		{"a sequence with a cache", func() func() {
			p.exec(`alter sequence {{outbox_id}} cache 20`)
			return func() { p.exec(`alter sequence {{outbox_id}} cache 1`) }
		}, "sequence-cache", doctor.Error, "cache 20"},
		{"the sequence of scheduled messages", func() func() {
			p.exec(`alter sequence {{scheduled_seq_seq}} cache 20`)
			return func() { p.exec(`alter sequence {{scheduled_seq_seq}} cache 1`) }
		}, "sequence-cache", doctor.Error, "scheduled"},
		{"an open transaction", func() func() {
			tx, err := p.db.BeginTx(context.WithoutCancel(t.Context()), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.ExecContext(t.Context(), `set application_name = 'report'; select from pg_class`); err != nil {
				t.Fatal(err)
			}
			return func() { _ = tx.Rollback() }
		}, "snapshots", doctor.Warning, `"report"`},
		{"a prepared transaction", func() func() {
			p.exec(`begin; create table public.forgotten (); prepare transaction 'nobody'`)
			return func() { p.exec(`rollback prepared 'nobody'`) }
		}, "snapshots", doctor.Warning, `prepared transaction "nobody"`},
		{"a slot that nobody reads", func() func() {
			p.exec(`select pg_create_logical_replication_slot('abandoned', 'pgoutput')`)
			return func() { p.exec(`select pg_drop_replication_slot('abandoned')`) }
		}, "snapshots", doctor.Warning, `"abandoned"`},
		{"a subscribed outbox", func() func() {
			p.exec(`create database publisher`)
			publisher := newPatient(t, server.OpenAs("postgres", "publisher"), oncemill.Config{})
			publisher.exec(`create publication shop for table {{outbox}}`)
			p.exec(`create subscription shop connection '` + strings.Replace(server.DSN(), "/postgres?", "/publisher?", 1) + `' publication shop with (create_slot = false, slot_name = none, enabled = false)`)
			return func() {
				p.exec(`drop subscription shop`)
				if err := publisher.db.Close(); err != nil {
					t.Error(err)
				}
			}
		}, "subscription", doctor.Error, "outbox"},
		{"an invalid index", func() func() {
			p.exec(`update pg_index set indisvalid = false where indexrelid = '{{parked_key}}'::regclass`)
			return func() { p.exec(`update pg_index set indisvalid = true where indexrelid = '{{parked_key}}'::regclass`) }
		}, "indexes", doctor.Error, "parked_key"},
		{"an asynchronous standby", func() func() { return server.Standby().Stop }, "asynchronous-failover", doctor.Warning, "asynchronously: 1."},
	} {
		p.healthy()
		undo := c.fault()
		p.expect(c.check, c.severity, c.names)
		undo()
		if t.Failed() {
			t.Fatalf("%s", c.name)
		}
	}
	p.healthy()

	standby := server.Standby()
	defer standby.Stop()
	p.db = standby.Open()
	p.expect("standby", doctor.Error, "accepts no writes")
}

// between returns what is between two texts.
func between(s, before, after string) string {
	_, s, _ = strings.Cut(s, before)
	s, _, _ = strings.Cut(s, after)
	return s
}

// What does no harm to the tables is no finding.
func TestDoctor_GivesNoFalseAlarm(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t, "wal_level=logical")
	p := newPatient(t, server.Open(), oncemill.Config{})
	p.cfg.SnapshotAge = 200 * time.Millisecond
	p.exec(`create database other`)
	p.exec(`alter role all in database other set synchronous_commit = off`)
	p.exec(`alter table {{inbox}} set (autovacuum_enabled = true)`)

	// A subscriber of a logical slot is no standby: nobody fails over to it.
	p.exec(`create table public.large as select i from generate_series(1, 100000) i`)
	p.exec(`create publication capture for table public.large`)
	p.exec(`select pg_create_logical_replication_slot('capture', 'pgoutput')`)
	other := server.OpenAs("postgres", "other")
	for _, text := range []string{
		`create table public.large (i int)`,
		`create subscription capture connection '` + server.DSN() + `' publication capture with (create_slot = false, copy_data = false)`,
	} {
		if _, err := other.ExecContext(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	testserver.Eventually(t, "the subscriber streams", func() (streams bool) {
		err := p.db.QueryRowContext(t.Context(), `select count(*) > 0 from pg_stat_replication where state = 'streaming'`).Scan(&streams)
		return err == nil && streams
	})

	// A report in another database keeps no rows of this one.
	tx, err := other.BeginTx(context.WithoutCancel(t.Context()), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(t.Context(), `select from pg_class`); err != nil {
		t.Fatal(err)
	}

	// Neither does vacuum, which may take hours.
	vacuum, err := p.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, err := vacuum.ExecContext(ctx, `set vacuum_cost_limit = 1; set vacuum_cost_delay = 100`)
		if err == nil {
			_, err = vacuum.ExecContext(ctx, `vacuum public.large`)
		}
		ended <- err
	}()
	defer func() {
		cancel()
		if err := <-ended; err == nil {
			t.Error("vacuum ended before it was seen")
		}
	}()
	testserver.Eventually(t, "both have a snapshot for long enough", func() (both bool) {
		err := p.db.QueryRowContext(t.Context(), `select count(*) = 2 from pg_stat_activity
			where (query like 'vacuum public%' or query like 'select from pg_class%' and datname = 'other') and backend_xmin is not null and clock_timestamp() - xact_start > interval '300 ms'`).Scan(&both)
		return err == nil && both
	})
	for _, f := range p.check() {
		t.Errorf("%+v", f)
	}
}

// Rows that a role may not see are no sign that all is well.
func TestDoctor_ReportsTablesWhoseRowsItMayNotSee(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	owner := newPatient(t, server.Open(), oncemill.Config{})
	insertID(owner, "9")
	owner.exec(`alter table {{inbox}} enable row level security`)
	owner.exec(`create role watcher login password 'postgres' in role pg_monitor`)
	owner.exec(`grant usage on schema oncemill to watcher`)
	owner.exec(`grant select on all tables in schema oncemill to watcher`)
	owner.expect("purge", doctor.Warning, `"stock"`)
	watcher := *owner
	watcher.db = server.OpenAs("watcher", "postgres")
	watcher.expect("purge", doctor.Warning, "hides rows of oncemill.inbox")
}

func TestDoctor_NoticesAPooler(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	straight := newPatient(t, server.Open(), oncemill.Config{})
	straight.db.SetMaxOpenConns(1) // it cannot tell, and does not hang
	straight.healthy()
	straight.db.SetMaxOpenConns(0)
	straight.healthy()
	behind, err := sql.Open("postgres", server.PgBouncer().DSN()+"&binary_parameters=yes")
	if err != nil {
		t.Fatal(err)
	}
	defer behind.Close()
	pooled := &patient{T: t, db: behind, cfg: straight.cfg, clock: time.Now}
	pooled.expect("pooler", doctor.Warning, "transaction mode")
}

func TestDoctor_FindsTablesThatAreMissingOrOld(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	d, err := doctor.New(db, doctor.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if found, err := d.Check(t.Context()); err != nil || len(found) != 1 || found[0].Check != "tables" {
		t.Fatalf("%+v, %v", found, err)
	}
	p := newPatient(t, db, oncemill.Config{})
	p.healthy()
	if _, err := oncemill.MigrateDown(t.Context(), db, oncemill.Config{}, dlq.Migrations, oncemill.DownOptions{}); err != nil {
		t.Fatal(err)
	}
	p.expect("tables", doctor.Error, "tables of dlq have version")

	db = testserver.SQLite(t)
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	p = &patient{T: t, db: db, clock: time.Now}
	p.expect("tables", doctor.Error, "tables of audit are missing")
}

func TestDoctor_EndsWhileTheServerIsSilent(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	proxy, db := testserver.OpenSilenceable(t, pg.DSN)
	p := newPatient(t, pg.DB, pg.Config)
	d, err := doctor.New(db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	proxy.SilenceAll()
	if found, err := d.Check(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%+v, %v", found, err)
	}
	proxy.Resume()
}

func TestNew_ReportsAllBadValuesTogether(t *testing.T) {
	t.Parallel()
	_, err := doctor.New(testserver.SQLite(t), doctor.Config{InboxRetention: -1, SnapshotAge: -1})
	for _, field := range []string{"doctor.Config.InboxRetention", "doctor.Config.SnapshotAge"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%v does not name %s", err, field)
		}
	}
}
