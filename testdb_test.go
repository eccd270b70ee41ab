package oncemill_test

import (
	"database/sql"
	"path/filepath"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// testDB is an empty database. open gives pools on it as other processes have
// them.
type testDB struct {
	db   *sql.DB
	cfg  oncemill.Config
	open func(t *testing.T) *sql.DB
}

// testDBs are the databases that the tests of Migrate run on. The second has the default that
// fixes a snapshot before a lock is granted.
var testDBs = map[string]func(*testing.T) *testDB{
	"postgresql": func(t *testing.T) *testDB {
		pg := testserver.Postgres(t)
		return &testDB{pg.DB, pg.Config, func(t *testing.T) *sql.DB { return pg.Open(t) }}
	},
	"postgresql_repeatable_read": func(t *testing.T) *testDB {
		pg := testserver.Postgres(t)
		open := func(t *testing.T) *sql.DB { return pg.Open(t, "default_transaction_isolation=repeatable read") }
		return &testDB{open(t), pg.Config, open}
	},
	"sqlite": func(t *testing.T) *testDB {
		path := filepath.Join(t.TempDir(), "test.db")
		open := func(t *testing.T) *sql.DB { return testserver.OpenSQLite(t, path) }
		return &testDB{open(t), oncemill.Config{}, open}
	},
}

func onEachDB(t *testing.T, test func(t *testing.T, p *testDB)) {
	t.Helper()
	t.Parallel()
	for _, name := range append(testserver.OneOf(t, "postgresql", "postgresql_repeatable_read"), "sqlite") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, testDBs[name](t))
		})
	}
}

func (p *testDB) isSQLite() bool { return p.cfg.Dialect != oncemill.PostgreSQL }

func (p *testDB) expand(t *testing.T, text string) string {
	t.Helper()
	resolved, err := database.Resolve(p.db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	return resolved.Expand(text)
}

func (p *testDB) exec(t *testing.T, text string, args ...any) {
	t.Helper()
	if _, err := p.db.ExecContext(t.Context(), p.expand(t, text), args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// objects returns everything that exists in the places of oncemill's tables: a
// change of any of them, or of the versions, shows.
func (p *testDB) objects(t *testing.T) (all []string) {
	t.Helper()
	text := `select c.relname || ' ' || c.oid || ' ' || c.relfilenode from pg_class c join pg_namespace n on n.oid = c.relnamespace
		where n.nspname = trim('{{schema}}', '"') order by 1`
	if p.isSQLite() {
		text = `select name || ' ' || coalesce(sql, '') from sqlite_schema order by 1`
	}
	all = p.list(t, text)
	if p.has(t, "migrations") {
		all = append(all, p.list(t, `select set_name || ' ' || version || ' ' || step_name || ' ' || applied_at from {{migrations}} order by set_name, version`)...)
	}
	return all
}

func (p *testDB) has(t *testing.T, table string) bool {
	t.Helper()
	text := `select coalesce(to_regclass('{{` + table + `}}')::text, 'none')`
	if p.isSQLite() {
		text = `select coalesce((select name from sqlite_schema where '"' || name || '"' = '{{` + table + `}}'), 'none')`
	}
	return p.list(t, text)[0] != "none"
}

func (p *testDB) list(t *testing.T, text string) []string {
	t.Helper()
	return testserver.Texts(t, p.db, p.expand(t, text))
}
