// Package names holds the location of oncemill's tables and fills their names into SQL.
package names

import (
	"database/sql"
	"reflect"
	"regexp"
	"strconv"
	"strings"
)

// Names locates the tables in a database.
type Names struct {
	Schema string // "" on SQLite
	Prefix string // of every table name
}

// The values of oncemill.Dialect.
const (
	Auto = iota
	PostgreSQL
	SQLite
)

// DialectOf detects the dialect of db from its driver. It returns [Auto] if the driver is
// unknown, or if there is none: a connector need not have one.
func DialectOf(db *sql.DB) int {
	if db == nil || db.Driver() == nil {
		return Auto
	}
	t := reflect.TypeOf(db.Driver())
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch path := t.PkgPath(); {
	case strings.Contains(path, "lib/pq"), strings.Contains(path, "jackc/pgx"):
		return PostgreSQL
	case strings.Contains(path, "sqlite"):
		return SQLite
	}
	return Auto
}

// pattern accepts names that never need quoting. Their length leaves room for derived names
// within PostgreSQL's 63 bytes.
var pattern = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,30}$`)

const rule = "must be 1 to 31 characters of a-z, 0-9 and _, not starting with a digit"

// Resolve returns n with its defaults filled in for a dialect, and reports its bad
// values.
func (n Names) Resolve(dialect int, bad func(field, value, problem string)) Names {
	switch dialect {
	case PostgreSQL:
		if n.Schema == "" {
			n.Schema = "oncemill"
		}
		if !pattern.MatchString(n.Schema) {
			bad("Schema", quote(n.Schema), rule)
		}
		if strings.HasPrefix(n.Schema, "pg_") {
			bad("Schema", quote(n.Schema), "names that begin with pg_ belong to PostgreSQL")
		}
	case SQLite:
		if n.Schema != "" {
			bad("Schema", quote(n.Schema), "SQLite has no schemas; use Prefix")
		}
		if n.Prefix == "" {
			n.Prefix = "oncemill_"
		}
	default:
		bad("Dialect", "Dialect("+strconv.Itoa(dialect)+")", "must be DialectAuto, PostgreSQL or SQLite")
	}
	if n.Prefix != "" && !pattern.MatchString(n.Prefix) {
		bad("Prefix", quote(n.Prefix), rule)
	}
	return n
}

// Table returns the quoted, qualified name of a table, for example "oncemill"."outbox".
func (n Names) Table(name string) string {
	if n.Schema == "" {
		return n.Name(name)
	}
	return `"` + n.Schema + `".` + n.Name(name)
}

// Name returns the quoted, unqualified name of an object (an index, a constraint).
func (n Names) Name(name string) string { return `"` + n.Prefix + name + `"` }

var placeholder = regexp.MustCompile(`\{\{[a-z0-9_:]+\}\}`)

// Expand fills the names into a constant SQL text: {{outbox}} becomes the qualified
// name of that table, {{name:outbox_key}} the unqualified name of that object, {{schema}}
// the quoted schema.
func (n Names) Expand(text string) string {
	return placeholder.ReplaceAllStringFunc(text, func(p string) string {
		word := p[2 : len(p)-2]
		if word == "schema" {
			return `"` + n.Schema + `"`
		}
		if name, ok := strings.CutPrefix(word, "name:"); ok {
			return n.Name(name)
		}
		return n.Table(word)
	})
}

func quote(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return strconv.Quote(s)
}
