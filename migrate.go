package oncemill

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Migrations is the history of the tables of one package. Every package of
// oncemill that owns tables exports its own as a variable of this type.
type Migrations struct {
	// Name of the set, for example "outbox". It is what the database remembers.
	Name string

	// FS holds the folders postgresql and sqlite with files named
	// 0001_name.up.sql and 0001_name.down.sql, numbered from 1 without gaps.
	FS fs.FS
}

// Status says how far one set has been applied.
type Status struct {
	Set     string
	Version int // applied in the database, 0 if none
	Latest  int // known to this library
}

// Migrate brings the tables of the given sets to the versions this library
// knows, each set in one transaction. It may be called at every start: it is
// idempotent, processes that start at once wait for each other, and a database
// that a newer library has migrated is refused with a [*SchemaError] and left
// alone.
//
// On PostgreSQL it creates the schema if it is missing. The role needs create on
// the database (or on the schema, if that is there).
func Migrate(ctx context.Context, db *sql.DB, cfg Config, sets ...Migrations) error {
	cfg, loaded, err := loadSets(db, cfg, sets)
	if err != nil {
		return err
	}
	conn, err := connect(ctx, db)
	if err != nil {
		return fmt.Errorf("migrate: connect: %w", err)
	}
	defer conn.Close() //nolint:errcheck // returns the connection to the pool
	for _, s := range loaded {
		if err := s.apply(ctx, conn, cfg); err != nil {
			return fmt.Errorf("migrate %s: %w", s.name, err)
		}
	}
	return nil
}

// connect waits for its turn. The one who gives a new SQLite file its write-ahead log
// needs the file alone, and SQLite's busy timeout does not hold for those who come at
// that moment.
func connect(ctx context.Context, db *sql.DB) (*sql.Conn, error) {
	for end := time.Now().Add(busyTimeout); ; {
		conn, err := db.Conn(ctx)
		if err == nil || !sqlerr.Retryable(err) || time.Now().After(end) {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// MigrationStatus tells how far each set has been applied. It changes nothing;
// a database without oncemill's tables has version 0 everywhere.
func MigrationStatus(ctx context.Context, db *sql.DB, cfg Config, sets ...Migrations) ([]Status, error) {
	cfg, loaded, err := loadSets(db, cfg, sets)
	if err != nil {
		return nil, err
	}
	var there bool
	if err := db.QueryRowContext(ctx, cfg.Expand(dialectSQL[cfg.Dialect].versionsExist)).Scan(&there); err != nil {
		return nil, fmt.Errorf("migration status: %w", err)
	}
	status := make([]Status, 0, len(loaded))
	for _, s := range loaded {
		have := 0
		if there {
			if err := db.QueryRowContext(ctx, cfg.Expand(selectVersion), s.name).Scan(&have); err != nil {
				return nil, fmt.Errorf("migration status: %w", err)
			}
		}
		status = append(status, Status{Set: s.name, Version: have, Latest: len(s.steps)})
	}
	return status, nil
}

// migrationSQL holds what differs between the dialects. begin takes the lock
// that makes concurrent migrators wait: on PostgreSQL a transaction-level
// advisory lock, which a pooler in transaction mode keeps intact. The isolation
// level is spelled out because a REPEATABLE READ default would fix the snapshot
// before the lock is granted.
type migrationSQL struct {
	begin         []string
	versionsExist string
	prepare       []string
}

var dialectSQL = map[Dialect]migrationSQL{
	PostgreSQL: {
		begin: []string{
			`begin isolation level read committed`,
			`select pg_advisory_xact_lock(hashtextextended('oncemill migrate {{schema}}', 0))`,
		},
		versionsExist: `select to_regclass('{{migrations}}') is not null`,
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
				primary key (set_name, version)
			)`,
		},
	},
	SQLite: {
		begin:         []string{`begin immediate`},
		versionsExist: `select count(*) > 0 from sqlite_schema where type = 'table' and '"' || name || '"' = '{{migrations}}'`,
		prepare: []string{
			`create table if not exists {{migrations}} (
				set_name text not null,
				version integer not null,
				step_name text not null,
				applied_at text not null default (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
				primary key (set_name, version)
			)`,
		},
	},
}

const (
	selectVersion = `select coalesce(max(version), 0) from {{migrations}} where set_name = $1`
	insertVersion = `insert into {{migrations}} (set_name, version, step_name) values ($1, $2, $3)`
)

// set is a Migrations whose files have been read and checked.
type set struct {
	name  string
	steps []step
}

type step struct {
	name string
	up   string
}

func (s set) apply(ctx context.Context, conn *sql.Conn, cfg Config) (err error) {
	texts := dialectSQL[cfg.Dialect]
	defer func() {
		if err != nil {
			// The transaction may be over already, or the connection gone; the
			// first error is the one to report. ctx may have ended.
			_, _ = conn.ExecContext(context.WithoutCancel(ctx), `rollback`)
		}
	}()
	for _, text := range texts.begin {
		if _, err := conn.ExecContext(ctx, cfg.Expand(text)); err != nil {
			return fmt.Errorf("begin: %w", err)
		}
	}
	for _, text := range texts.prepare {
		if _, err := conn.ExecContext(ctx, cfg.Expand(text)); err != nil {
			return fmt.Errorf("create table of versions: %w", err)
		}
	}
	var have int
	if err := conn.QueryRowContext(ctx, cfg.Expand(selectVersion), s.name).Scan(&have); err != nil {
		return fmt.Errorf("read version: %w", err)
	}
	if have > len(s.steps) {
		return &SchemaError{Set: s.name, Have: have, Want: len(s.steps), Problem: "the database is newer; deploy a library that knows its version"}
	}
	for i := have; i < len(s.steps); i++ {
		if _, err := conn.ExecContext(ctx, cfg.Expand(s.steps[i].up)); err != nil {
			return fmt.Errorf("step %d %s: %w", i+1, s.steps[i].name, err)
		}
		if _, err := conn.ExecContext(ctx, cfg.Expand(insertVersion), s.name, i+1, s.steps[i].name); err != nil {
			return fmt.Errorf("record step %d: %w", i+1, err)
		}
	}
	if _, err := conn.ExecContext(ctx, `commit`); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

var upFile = regexp.MustCompile(`^(\d{4})_([a-z0-9_]+)\.up\.sql$`)

func loadSets(db *sql.DB, cfg Config, sets []Migrations) (Config, []set, error) {
	if db == nil {
		return cfg, nil, &ConfigError{Field: "oncemill.Migrate db", Value: "nil", Problem: "a database is needed"}
	}
	cfg, err := cfg.Resolve(db)
	if err != nil {
		return cfg, nil, err
	}
	loaded := make([]set, 0, len(sets))
	for _, m := range sets {
		s, err := m.load(cfg.Dialect)
		if err != nil {
			return cfg, nil, err
		}
		loaded = append(loaded, s)
	}
	return cfg, loaded, nil
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
		if n, _ := strconv.Atoi(parts[1]); n != len(s.steps)+1 {
			return set{}, bad(fmt.Sprintf("file %s: number %d is due", e.Name(), len(s.steps)+1))
		}
		text, err := fs.ReadFile(m.FS, path.Join(d.String(), e.Name()))
		if err != nil {
			return set{}, bad(err.Error())
		}
		s.steps = append(s.steps, step{name: parts[2], up: string(text)})
	}
	if len(s.steps) == 0 {
		return set{}, bad("has no files for " + d.String())
	}
	return s, nil
}

// CheckMigrated returns a [*SchemaError] unless every given set is applied at
// exactly the version this library knows (joined, one for each that is not).
// Workers call it when they start.
func CheckMigrated(ctx context.Context, db *sql.DB, cfg Config, sets ...Migrations) error {
	status, err := MigrationStatus(ctx, db, cfg, sets...)
	if err != nil {
		return err
	}
	status = slices.DeleteFunc(status, func(s Status) bool { return s.Version == s.Latest })
	errs := make([]error, 0, len(status))
	for _, s := range status {
		problem := "run oncemill migrate, or oncemill.Migrate, first"
		if s.Version > s.Latest {
			problem = "the database is newer; deploy a library that knows its version"
		}
		errs = append(errs, &SchemaError{Set: s.Set, Have: s.Version, Want: s.Latest, Problem: problem})
	}
	return errors.Join(errs...)
}
