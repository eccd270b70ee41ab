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

var parameter = regexp.MustCompile(`\$([0-9]+)`)

// sqliteScans returns the scans in the plan of a statement. SQLite names a table by its
// alias; the rows of a function or a subquery have names that no table has.
func sqliteScans(t testing.TB, db *sql.DB, where database.Database, s statements.Statement) (scans []scan) {
	t.Helper()
	last := 0
	for _, match := range parameter.FindAllStringSubmatch(s.Text, -1) {
		n, _ := strconv.Atoi(match[1]) // digits
		last = max(last, n)
	}
	rows, err := db.QueryContext(t.Context(), `explain query plan `+where.Expand(s.Text), make([]any, last)...)
	if err != nil {
		t.Errorf("plantest: explain %s: %v", s.Name, err)
		return nil
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	tables := tablesOf(s.Text, where)
	for rows.Next() {
		var id, parent, unused int
		var step string
		if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
			t.Fatalf("plantest: explain %s: %v", s.Name, err)
		}
		words := strings.Fields(step)
		if len(words) < 2 || words[0] != "SCAN" && words[0] != "SEARCH" {
			continue
		}
		table, known := tables[words[1]]
		if known && (words[0] == "SCAN" && !strings.Contains(step, " INDEX ") || strings.Contains(step, " AUTOMATIC ")) {
			scans = append(scans, scan{table, step})
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatalf("plantest: explain %s: %v", s.Name, err)
	}
	return scans
}
