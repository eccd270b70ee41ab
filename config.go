package oncemill

import (
	"database/sql"
	"errors"
	"reflect"
	"regexp"
	"strconv"
	"strings"
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
	t := reflect.TypeOf(db.Driver())
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch path := t.PkgPath(); {
	case strings.Contains(path, "lib/pq"), strings.Contains(path, "jackc/pgx"):
		return PostgreSQL, nil
	case strings.Contains(path, "sqlite"):
		return SQLite, nil
	}
	return DialectAuto, ErrUnknownDialect
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

// identifierPattern admits names that never need quoting. The limit leaves room within
// PostgreSQL's 63 bytes for the names that are derived from them.
var identifierPattern = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,30}$`)

const identifierRule = "must be 1 to 31 characters of a-z, 0-9 and _, not starting with a digit"

// Resolve returns c with its defaults filled in, or a [*ConfigError] for every bad
// value (joined). It does no I/O. The packages of oncemill call it in New. Applications
// need it only to write their own SQL with [Config.Table].
func (c Config) Resolve(db *sql.DB) (Config, error) {
	var errs []error
	if c.Dialect == DialectAuto {
		d, err := DialectOf(db)
		if err != nil {
			return c, err
		}
		c.Dialect = d
	}
	switch c.Dialect {
	case PostgreSQL:
		if c.Schema == "" {
			c.Schema = "oncemill"
		}
		if !identifierPattern.MatchString(c.Schema) {
			errs = append(errs, &ConfigError{"oncemill.Config.Schema", shortQuote(c.Schema), identifierRule})
		}
		if strings.HasPrefix(c.Schema, "pg_") {
			errs = append(errs, &ConfigError{"oncemill.Config.Schema", shortQuote(c.Schema), "names that begin with pg_ belong to PostgreSQL"})
		}
	case SQLite:
		if c.Schema != "" {
			errs = append(errs, &ConfigError{"oncemill.Config.Schema", shortQuote(c.Schema), "SQLite has no schemas; use Prefix"})
		}
		if c.Prefix == "" {
			c.Prefix = "oncemill_"
		}
	default:
		errs = append(errs, &ConfigError{"oncemill.Config.Dialect", c.Dialect.String(), "must be DialectAuto, PostgreSQL or SQLite"})
	}
	if c.Prefix != "" && !identifierPattern.MatchString(c.Prefix) {
		errs = append(errs, &ConfigError{"oncemill.Config.Prefix", shortQuote(c.Prefix), identifierRule})
	}
	return c, errors.Join(errs...)
}

// Table returns the quoted, qualified name of an oncemill table, for example
// "oncemill"."outbox". c must come from [Config.Resolve].
func (c Config) Table(name string) string {
	if c.Schema == "" {
		return c.Name(name)
	}
	return `"` + c.Schema + `".` + c.Name(name)
}

// Name returns the quoted, unqualified name of an oncemill object (an index, a
// constraint), for example "outbox_lane". c must come from [Config.Resolve].
func (c Config) Name(name string) string {
	return `"` + c.Prefix + name + `"`
}

// placeholder matches {{name}}, {{name:x}} and {{schema}} in SQL texts.
var placeholder = regexp.MustCompile(`\{\{[a-z0-9_:]+\}\}`)

// Expand fills in the names in a constant SQL text: {{outbox}} becomes the qualified
// name of that table, {{name:outbox_key}} the unqualified name, {{schema}} the quoted
// schema. All SQL of oncemill gets its names this way, once, in New. c must come from
// [Config.Resolve].
func (c Config) Expand(text string) string {
	return placeholder.ReplaceAllStringFunc(text, func(p string) string {
		word := p[2 : len(p)-2]
		if word == "schema" {
			return `"` + c.Schema + `"`
		}
		if name, ok := strings.CutPrefix(word, "name:"); ok {
			return c.Name(name)
		}
		return c.Table(word)
	})
}

func shortQuote(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return strconv.Quote(s)
}
