package plantest

import (
	"database/sql"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

var parameter = regexp.MustCompile(`[$?]([0-9]+)`)

var used = regexp.MustCompile(`USING (?:COVERING )?INDEX ([a-z0-9_]+)`)

// explainSQLite returns the plan of a statement. SQLite names a table by its
// alias; the rows of a function or a subquery have names that no table has.
func explainSQLite(t testing.TB, db *sql.DB, where database.Database, s statements.Statement) (found plan, err error) {
	last := 0
	for _, match := range parameter.FindAllStringSubmatch(s.Text, -1) {
		n, _ := strconv.Atoi(match[1]) // digits
		last = max(last, n)
	}
	conn, err := db.Conn(t.Context())
	if err != nil {
		return found, err
	}
	defer conn.Close() //nolint:errcheck // returns it to the pool
	// Without samples of the rows, plans do not depend on the arguments.
	for _, text := range []string{`delete from sqlite_stat4`, `analyze sqlite_schema`} {
		if _, err := conn.ExecContext(t.Context(), text); err != nil {
			return found, err
		}
	}
	rows, err := conn.QueryContext(t.Context(), `explain query plan `+where.Expand(s.Text), make([]any, last)...)
	if err != nil {
		return found, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	tables := tablesOf(s.Text, where)
	for rows.Next() {
		var id, parent, unused int
		var step string
		if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
			return found, err
		}
		if match := used.FindStringSubmatch(step); match != nil {
			found.indexes = append(found.indexes, strings.TrimPrefix(match[1], where.Prefix))
		}
		words := strings.Fields(step)
		if len(words) < 2 || words[0] != "SCAN" && words[0] != "SEARCH" {
			continue
		}
		table, known := tables[words[1]]
		if known && (words[0] == "SCAN" && !strings.Contains(step, " INDEX ") || strings.Contains(step, " AUTOMATIC ")) {
			found.scans = append(found.scans, scan{table, step})
		}
	}
	return found, rows.Err()
}
