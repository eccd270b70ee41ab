package oncemill

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// Migrations is the migration set of one package. Every oncemill package that owns
// tables exports its set as a variable of this type.
type Migrations struct {
	// Name of the set, for example "outbox". The database records it.
	Name string

	// FS holds the folders postgresql and sqlite with files named 0001_name.up.sql and
	// 0001_name.down.sql, numbered from 1 without gaps.
	//
	// An up file whose first line is "-- compatible: 3" leaves tables that libraries
	// with version 3 of the set can still work with. Without that line, only libraries
	// that know the file can work with them.
	FS fs.FS
}

// Status describes how far one set has been applied.
type Status struct {
	Set     string
	Version int // applied in the database, 0 if none
	Latest  int // known to this library

	// Oldest is the lowest version that a library must know to work with the tables of
	// a newer database. It is 0 while Version is not above Latest.
	Oldest int

	outdated bool // the table of versions is that of an older library
}

// tooNew reports whether the tables are too new for this library.
func (s Status) tooNew() bool { return s.Oldest > s.Latest }

// Migrate brings the tables of the given sets to the versions this library knows, each
// set in one transaction. Call it at every start: it is idempotent, and processes that
// start at the same time wait for each other.
//
// Migrate does not touch a database that a newer library has migrated. It returns nil
// if this library can still work with the tables, otherwise a [*SchemaError].
//
// A wait for a lock ends after a minute, or after three quarters of the time left in
// ctx, with a [*MigrationLockError].
//
// On SQLite it first checks the settings of db; see [CheckSQLite].
//
// On PostgreSQL it creates the schema if it is missing. The role needs CREATE on the
// database (or on the schema, if that exists).
func Migrate(ctx context.Context, db *sql.DB, cfg Config, sets ...Migrations) error {
	to, loaded, err := loadSets(db, cfg, sets)
	if err != nil {
		return err
	}
	m, done, err := newMigrator(ctx, db, to)
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	defer done()
	for _, s := range loaded {
		if err := m.inTx(ctx, func() error { return m.up(ctx, s) }); err != nil {
			return fmt.Errorf("migrate %s: %w", s.name, err)
		}
	}
	return nil
}

// MigrationStatus returns how far each set has been applied. It changes nothing. In a
// database without oncemill's tables every version is 0.
func MigrationStatus(ctx context.Context, db *sql.DB, cfg Config, sets ...Migrations) ([]Status, error) {
	of, loaded, err := loadSets(db, cfg, sets)
	if err != nil {
		return nil, err
	}
	return of.status(ctx, db, loaded)
}

func (r resolved) status(ctx context.Context, db *sql.DB, loaded []set) ([]Status, error) {
	var columns int
	if err := db.QueryRowContext(ctx, r.Expand(dialectSQL[r.dialect].columns)).Scan(&columns); err != nil {
		return nil, fmt.Errorf("migration status: %w", err)
	}
	status := make([]Status, 0, len(loaded))
	for _, s := range loaded {
		have := Status{Set: s.name, Latest: len(s.steps), outdated: columns > 0 && columns < migrationsColumns}
		text := selectVersion
		if columns < migrationsColumns {
			text = selectVersionBefore
		}
		if columns > 0 {
			if err := db.QueryRowContext(ctx, r.Expand(text), s.name, have.Latest).Scan(&have.Version, &have.Oldest); err != nil {
				return nil, fmt.Errorf("migration status: %w", err)
			}
		}
		status = append(status, have)
	}
	return status, nil
}

// migrationSQL holds what differs between the dialects. begin takes the lock that
// serializes migrators: on PostgreSQL a transaction-level advisory lock, which also
// works through a pooler in transaction mode. The isolation level is explicit because a
// REPEATABLE READ default would fix the snapshot before the lock is granted.
type migrationSQL struct {
	begin   []string // WAIT is the lock_timeout in milliseconds
	columns string   // of the table migrations; 0 without it
	prepare []string
	tables  string // of this schema and prefix, without the table migrations and partitions
	lock    string // of a table in front of its name
	script  scriptSQL
}

// migrationsColumns is the number of columns of the table migrations. Libraries from
// before rolling upgrades created it with one column fewer.
const migrationsColumns = 5

var dialectSQL = map[Dialect]migrationSQL{
	PostgreSQL: {
		begin: []string{
			`begin isolation level read committed`,
			`set local lock_timeout = WAIT`,
			`set local idle_in_transaction_session_timeout = '10s'`, // a frozen migrator keeps its locks no longer
			`select pg_advisory_xact_lock(` + migrationLock + `)`,
		},
		columns: `select count(*) from pg_attribute where attrelid = to_regclass('{{migrations}}') and attnum > 0 and not attisdropped`,
		prepare: []string{
			`do $$ begin
	if to_regnamespace('{{schema}}') is null then
		create schema {{schema}};
	end if;
end $$`,
			`create table if not exists {{migrations}} (
	set_name text not null,
	version integer not null,
	step_name text not null,
	applied_at timestamptz not null default clock_timestamp(),
	compatible integer,
	primary key (set_name, version)
)`,
		},
		tables: `
select '"' || n.nspname || '"."' || c.relname || '"'
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where n.oid = to_regnamespace('{{schema}}') and c.relkind in ('r', 'p') and not c.relispartition
	and c.oid <> to_regclass('{{migrations}}')
order by 1`,
		lock: `lock table `,
		script: scriptSQL{
			shell: `\set ON_ERROR_STOP on`,
			guard: []string{`do $$ begin
	if exists (
		select from (values EXPECTED) as e (set_name, version)
		where e.version <> (select coalesce(max(m.version), 0) from {{migrations}} m where m.set_name = e.set_name)
	) then
		raise exception 'the tables do not have the versions that this script begins with; make it again';
	end if;
end $$`},
		},
	},
	SQLite: {
		begin:   []string{`begin immediate`},
		columns: `select count(*) from pragma_table_info(trim('{{migrations}}', '"'))`,
		prepare: []string{
			`create table if not exists {{migrations}} (
	set_name text not null,
	version integer not null,
	step_name text not null,
	applied_at text not null default (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
	compatible integer,
	primary key (set_name, version)
)`,
		},
		tables: `
select '"' || name || '"'
from sqlite_schema
where type = 'table' and name not like 'sqlite~_%' escape '~' and '"' || name || '"' <> '{{migrations}}'
order by 1`,
		script: scriptSQL{
			shell:  `.bail on`,
			before: []string{`pragma journal_mode = wal`},
			guard: []string{
				`create temporary table expected (
	set_name text,
	version integer constraint these_are_not_the_versions_that_this_script_begins_with check (version = expected),
	expected integer,
	now integer constraint this_shell_is_older_than_3_42 check (now is not null)
)`,
				`insert into temp.expected
select e.column1, (select coalesce(max(m.version), 0) from {{migrations}} m where m.set_name = e.column1), e.column2, unixepoch('subsec')
from (values EXPECTED) e`,
				`drop table temp.expected`,
			},
		},
	},
}

const (
	migrationLock = `hashtextextended('oncemill migrate {{schema}}', 0)`

	addCompatible = `alter table {{migrations}} add column compatible integer`

	// The newest version, and the lowest version that a library must know if it knows
	// $2.
	selectVersion = `
select coalesce(max(version), 0), coalesce(max(case when version > $2 then coalesce(compatible, version) end), 0)
from {{migrations}}
where set_name = $1`

	// The same, for a table that an older library created.
	selectVersionBefore = `
select coalesce(max(version), 0), coalesce(max(case when version > $2 then version end), 0)
from {{migrations}}
where set_name = $1`

	insertVersion = `insert into {{migrations}} (set_name, version, step_name, compatible) values ($1, $2, $3, $4)`
	deleteVersion = `delete from {{migrations}} where set_name = $1 and version = $2`
)

// set is a Migrations whose files have been read and checked.
type set struct {
	name  string
	steps []step
}

type step struct {
	name       string
	up         string
	down       string // empty if the set has no file for it
	compatible int    // the oldest version that may run beside it
}

var (
	upFile     = regexp.MustCompile(`^(\d{4})_([a-z0-9_]+)\.up\.sql$`)
	compatible = regexp.MustCompile(`^-- compatible: (\d+)\n`)
)

func loadSets(db *sql.DB, cfg Config, sets []Migrations) (resolved, []set, error) {
	if db == nil {
		return resolved{}, nil, &ConfigError{Field: "oncemill.Migrate db", Value: "nil", Problem: "a database is needed"}
	}
	to, err := cfg.resolve(db)
	if err != nil {
		return to, nil, err
	}
	loaded, err := to.load(sets)
	return to, loaded, err
}

func (r resolved) load(sets []Migrations) ([]set, error) {
	loaded := make([]set, 0, len(sets))
	for _, m := range sets {
		s, err := m.load(r.dialect)
		if err != nil {
			return nil, err
		}
		loaded = append(loaded, s)
	}
	return loaded, nil
}

func (m Migrations) load(d Dialect) (set, error) {
	bad := func(problem string) error {
		return &ConfigError{Field: "oncemill.Migrations", Value: strconv.Quote(m.Name), Problem: problem}
	}
	if m.Name == "" || m.FS == nil {
		return set{}, bad("needs a Name and an FS")
	}
	entries, err := fs.ReadDir(m.FS, d.String())
	if err != nil {
		return set{}, bad(err.Error())
	}
	s := set{name: m.Name}
	for _, e := range entries { // ReadDir sorts by name
		parts := upFile.FindStringSubmatch(e.Name())
		if parts == nil {
			if strings.HasSuffix(e.Name(), ".down.sql") {
				continue
			}
			return set{}, bad("unexpected file " + e.Name())
		}
		number, _ := strconv.Atoi(parts[1])
		if number != len(s.steps)+1 {
			return set{}, bad(fmt.Sprintf("file %s: number %d is due", e.Name(), len(s.steps)+1))
		}
		up, err := fs.ReadFile(m.FS, path.Join(d.String(), e.Name()))
		if err != nil {
			return set{}, bad(err.Error())
		}
		down, err := fs.ReadFile(m.FS, path.Join(d.String(), strings.TrimSuffix(e.Name(), ".up.sql")+".down.sql"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return set{}, bad(err.Error())
		}
		one := step{name: parts[2], up: string(up), down: string(down), compatible: number}
		if header := compatible.FindSubmatch(up); header != nil {
			one.compatible, _ = strconv.Atoi(string(header[1]))
			if one.compatible < 1 || one.compatible >= number {
				return set{}, bad(fmt.Sprintf("file %s: compatible must be 1 to %d; leave the line out if no older library can run beside it", e.Name(), number-1))
			}
		}
		s.steps = append(s.steps, one)
	}
	if len(s.steps) == 0 {
		return set{}, bad("has no files for " + d.String())
	}
	return s, nil
}

// CheckMigrated returns a [*SchemaError] for each given set whose tables this library
// cannot work with, joined. Such tables are older than this library requires, or a
// newer library has migrated them to a version that this library cannot run beside. On
// SQLite it also checks the settings of db; see [CheckSQLite]. Workers call it when
// they start.
func CheckMigrated(ctx context.Context, db *sql.DB, cfg Config, sets ...Migrations) error {
	of, loaded, err := loadSets(db, cfg, sets)
	if err != nil {
		return err
	}
	status, err := of.status(ctx, db, loaded)
	if err != nil {
		return err
	}
	if of.dialect == SQLite {
		if err := CheckSQLite(ctx, db); err != nil {
			return err
		}
	}
	var errs []error
	for _, s := range status {
		if s.Version < s.Latest || s.tooNew() {
			errs = append(errs, s.schemaError())
		}
	}
	return errors.Join(errs...)
}

func (s Status) schemaError() error {
	problem := "run oncemill migrate, or oncemill.Migrate, first"
	if s.Version > s.Latest {
		problem = fmt.Sprintf("the database is newer; deploy a library that knows version %d", s.Oldest)
	}
	return &SchemaError{Set: s.Set, Have: s.Version, Want: s.Latest, Problem: problem}
}
