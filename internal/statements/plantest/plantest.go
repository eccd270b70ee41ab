// Package plantest explains the statements of storage packages. It is for tests only.
//
// [Check] explains every statement of a folder on tables that the test has filled and
// analyzed, with plans that hold for any argument. It fails if a statement scans a whole
// table. A statement that may do so permits it in its comment, with the reason:
//
//	-- name: lanes
//	-- Few rows.
//	-- scans: leases: it has 32 rows
//
// A permission that no plan needs fails the test, too. A comment may also name an index
// that the plan has to use, which the test then requires:
//
//	-- name: newest
//	-- index: orders_created, from its end. Reads only what it returns.
package plantest

import (
	"database/sql"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

// Check reports the [Faults] of the statements for the dialect of where.
func Check(t testing.TB, db *sql.DB, where database.Database, files fs.FS) {
	t.Helper()
	for _, fault := range Faults(t, db, where, files) {
		t.Error(fault)
	}
}

// Faults returns what is wrong with the plans of the statements in files, in the folder
// that is named like the dialect of where. On PostgreSQL a fault is a sequential scan of
// a table of where, a scan of a whole index that is not partial, unless a limit ends it, or
// a comparison with clock_timestamp() that no index can serve: a limit may never be reached.
// statement_timestamp() can be used in an index. On SQLite it is a scan without an index, or an index made for the statement.
// A table without rows is a fault, since plans for it show nothing; so is a statement that
// cannot be explained.
func Faults(t testing.TB, db *sql.DB, where database.Database, files fs.FS) (faults []string) {
	t.Helper()
	all := statements.Read(files, where.Dialect.String())
	faults = emptyTables(t, db, where, all)
	explained := 0
	for _, s := range all {
		if !planned.MatchString(s.Text) {
			continue
		}
		explained++
		explain := explainPostgres
		if where.Dialect == oncemill.SQLite {
			explain = explainSQLite
		}
		found, err := explain(t, db, where, s)
		if err != nil {
			faults = append(faults, fmt.Sprintf("%s: cannot be explained: %v", s.Name, err))
			continue
		}
		faults = append(faults, judge(s, found)...)
	}
	if explained == 0 {
		t.Fatalf("plantest: no statement of %s can be explained", where.Dialect)
	}
	return faults
}

// planned matches the statements that have a plan.
var planned = regexp.MustCompile(`^(select|insert|update|delete|with|values)\s`)

// plan is what matters of a plan.
type plan struct {
	scans   []scan
	indexes []string // without the prefix
}

// scan is a part of a plan that reads a whole table.
type scan struct{ table, step string }

var (
	permission  = regexp.MustCompile(`(?m)^scans: ([a-z0-9_]+): \S`)
	requirement = regexp.MustCompile(`(?m)^index: ([a-z0-9_]+)`)
)

// judge compares the plan of a statement with its comment.
func judge(s statements.Statement, found plan) (faults []string) {
	for _, match := range requirement.FindAllStringSubmatch(s.Comment, -1) {
		if !slices.Contains(found.indexes, match[1]) {
			faults = append(faults, fmt.Sprintf("%s: does not use %s but %q", s.Name, match[1], found.indexes))
		}
	}
	needed := map[string]bool{}
	for _, match := range permission.FindAllStringSubmatch(s.Comment, -1) {
		needed[match[1]] = false
	}
	for _, found := range found.scans {
		if _, permitted := needed[found.table]; permitted {
			needed[found.table] = true
			continue
		}
		faults = append(faults, fmt.Sprintf("%s: %s of %s", s.Name, found.step, found.table))
	}
	for _, table := range slices.Sorted(maps.Keys(needed)) {
		if !needed[table] {
			faults = append(faults, fmt.Sprintf("%s: permits a scan of %s, which its plan does not need", s.Name, table))
		}
	}
	return faults
}

// mention matches a table in the text of a statement, and the alias that may follow.
var mention = regexp.MustCompile(`\{\{([a-z0-9_]+)\}\}(?:\s+(?:as\s+)?([a-z_][a-z0-9_]*))?`)

// tablesOf returns the tables that a text mentions, by the names they have in it.
// Functions, which a text mentions in the same way, have no rows and no plan here.
func tablesOf(text string, where database.Database) map[string]string {
	tables := map[string]string{}
	for _, match := range mention.FindAllStringSubmatch(text, -1) {
		tables[where.Prefix+match[1]] = match[1]
		if match[2] != "" {
			tables[match[2]] = match[1] // a keyword names nothing in a plan
		}
	}
	return tables
}

func emptyTables(t testing.TB, db *sql.DB, where database.Database, all []statements.Statement) (faults []string) {
	t.Helper()
	seen := map[string]bool{}
	for _, s := range all {
		for _, table := range tablesOf(s.Text, where) {
			seen[table] = true
		}
	}
	for _, table := range slices.Sorted(maps.Keys(seen)) {
		exists, filled := `select count(*) > 0 from sqlite_schema where type = 'table' and name = $1`, false
		arg := where.Prefix + table
		if where.Dialect == oncemill.PostgreSQL {
			exists, arg = `select to_regclass($1) is not null`, where.Table(table)
		}
		scanBool(t, db, &filled, exists, arg)
		if !filled {
			continue // a function
		}
		if scanBool(t, db, &filled, `select exists (select 1 from `+where.Table(table)+`)`); !filled {
			faults = append(faults, fmt.Sprintf("%s is empty: fill it before its statements are explained", table))
		}
	}
	return faults
}

func scanBool(t testing.TB, db *sql.DB, into *bool, text string, args ...any) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), text, args...).Scan(into); err != nil {
		t.Fatalf("plantest: %v: %s", err, text)
	}
}
