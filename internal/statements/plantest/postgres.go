package plantest

import (
	"database/sql"
	"encoding/json"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

// node is a node of a plan of PostgreSQL.
type node struct {
	Type      string `json:"Node Type"`
	Schema    string
	Relation  string `json:"Relation Name"`
	Index     string `json:"Index Name"`
	Condition string `json:"Index Cond"`
	Filter    string
	Plans     []node
}

// explainPostgres returns the generic plan of a statement.
func explainPostgres(t testing.TB, db *sql.DB, where database.Database, s statements.Statement) (found plan, err error) {
	ctx := t.Context()
	conn, err := db.Conn(ctx)
	if err != nil {
		return found, err
	}
	defer conn.Close() //nolint:errcheck // returns it to the pool
	if _, err := conn.ExecContext(ctx, `prepare plantest as `+where.Expand(s.Text)); err != nil {
		return found, err
	}
	defer conn.ExecContext(ctx, `deallocate plantest`) //nolint:errcheck // the next statement reports it
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return found, err
	}
	defer tx.Rollback() //nolint:errcheck // nothing is written
	if _, err := tx.ExecContext(ctx, `set local plan_cache_mode = force_generic_plan`); err != nil {
		return found, err
	}
	var parameters int
	if err := tx.QueryRowContext(ctx, `select cardinality(parameter_types) from pg_prepared_statements where name = 'plantest'`).Scan(&parameters); err != nil {
		return found, err
	}
	explain := `explain (format json, verbose) execute plantest`
	if parameters > 0 {
		explain += `(null` + strings.Repeat(`, null`, parameters-1) + `)`
	}
	var text []byte
	if err := tx.QueryRowContext(ctx, explain).Scan(&text); err != nil {
		return found, err
	}
	var roots []struct{ Plan node }
	if err := json.Unmarshal(text, &roots); err != nil {
		return found, err
	}
	p := postgresPlan{t: t, tx: tx, where: where}
	for _, root := range roots {
		p.walk(root.Plan, "", false)
	}
	return p.plan, nil
}

type postgresPlan struct {
	t     testing.TB
	tx    *sql.Tx
	where database.Database
	plan
}

// walk visits a node. A scan of an index below a limit reads what it returns. The scan of
// a bitmap's index does not name its table, so walk passes it on.
func (p *postgresPlan) walk(n node, relation string, limited bool) {
	limited = limited || n.Type == "Limit"
	if n.Relation != "" {
		relation = n.Relation
		if n.Schema != p.where.Schema {
			relation = ""
		}
	}
	if n.Index != "" {
		p.indexes = append(p.indexes, strings.TrimPrefix(n.Index, p.where.Prefix))
	}
	switch {
	case relation == "":
	case strings.Contains(n.Filter, "clock_timestamp()"): // it is volatile
		p.scans = append(p.scans, scan{p.table(relation), n.Type + " that compares each row with clock_timestamp()"})
	case n.Type == "Seq Scan":
		p.scans = append(p.scans, scan{p.table(relation), n.Type})
	case n.Index != "" && strings.HasSuffix(n.Type, "Scan") && n.Condition == "" && !limited && !p.partial(n.Index):
		p.scans = append(p.scans, scan{p.table(relation), n.Type + " without condition by " + n.Index})
	}
	for _, child := range n.Plans {
		p.walk(child, relation, limited)
	}
}

// table returns the name of a table in the texts: that of the whole for a partition.
func (p *postgresPlan) table(relation string) (name string) {
	p.t.Helper()
	err := p.tx.QueryRowContext(p.t.Context(), `
		select relname
		from pg_class
		where oid = coalesce((select inhparent from pg_inherits where inhrelid = to_regclass($1)), to_regclass($1))`,
		p.quoted(relation)).Scan(&name)
	if err != nil {
		p.t.Fatalf("plantest: find table %s: %v", relation, err)
	}
	return strings.TrimPrefix(name, p.where.Prefix)
}

func (p *postgresPlan) partial(index string) (partial bool) {
	p.t.Helper()
	err := p.tx.QueryRowContext(p.t.Context(), `select indpred is not null from pg_index where indexrelid = to_regclass($1)`, p.quoted(index)).Scan(&partial)
	if err != nil {
		p.t.Fatalf("plantest: find index %s: %v", index, err)
	}
	return partial
}

func (p *postgresPlan) quoted(name string) string { return `"` + p.where.Schema + `"."` + name + `"` }
