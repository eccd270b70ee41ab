package oncemill

import (
	"database/sql"
	"errors"
	"strconv"

	"github.com/oncemill/oncemill/internal/names"
)

// Dialect is the SQL dialect of a database.
type Dialect int

const (
	// DialectAuto detects the dialect from the Go package of the driver (lib/pq, pgx,
	// modernc.org/sqlite). It is the zero value.
	DialectAuto Dialect = iota
	// PostgreSQL is PostgreSQL 13 or newer.
	PostgreSQL
	// SQLite is SQLite 3.42 or newer.
	SQLite
)

func (d Dialect) String() string {
	switch d {
	case DialectAuto:
		return "auto"
	case PostgreSQL:
		return "postgresql"
	case SQLite:
		return "sqlite"
	}
	return "Dialect(" + strconv.Itoa(int(d)) + ")"
}

// DialectOf detects the dialect of db from its driver. It does no I/O. The error is
// [ErrUnknownDialect].
func DialectOf(db *sql.DB) (Dialect, error) {
	d := Dialect(names.DialectOf(db))
	if d == DialectAuto {
		return d, ErrUnknownDialect
	}
	return d, nil
}

// Config describes a database and the location of oncemill's tables in it. The zero
// value is right for a database of one service. Give the same Config to every package
// that works on the same tables.
type Config struct {
	// Dialect of the database. Default: detected from the driver.
	Dialect Dialect

	// Schema that holds the tables. Default: "oncemill" on PostgreSQL. Must be empty on
	// SQLite, which has no schemas.
	Schema string

	// Prefix of every table name. Default: none on PostgreSQL, "oncemill_" on
	// SQLite.
	Prefix string
}

// Table returns the quoted, qualified name of an oncemill table of db, for your own SQL,
// for example "oncemill"."outbox". It does no I/O. The error holds a [*ConfigError] for
// each bad value of c, or is [ErrUnknownDialect].
func (c Config) Table(db *sql.DB, name string) (string, error) {
	t, err := c.resolve(db)
	return t.Table(name), err
}

// resolved is a Config with its defaults filled in.
type resolved struct {
	dialect Dialect
	names.Names
}

func (c Config) resolve(db *sql.DB) (resolved, error) {
	if c.Dialect == DialectAuto {
		d, err := DialectOf(db)
		if err != nil {
			return resolved{}, err
		}
		c.Dialect = d
	}
	var errs []error
	tables := names.Names{Schema: c.Schema, Prefix: c.Prefix}.Resolve(int(c.Dialect), func(field, value, problem string) {
		errs = append(errs, &ConfigError{"oncemill.Config." + field, value, problem})
	})
	return resolved{c.Dialect, tables}, errors.Join(errs...)
}
