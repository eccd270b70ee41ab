package oncemill_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/lib/pq"
	"modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// untouchable is a database that must not be asked.
type untouchable struct{ t *testing.T }

func (u untouchable) Driver() driver.Driver { return u }

func (u untouchable) Open(string) (driver.Conn, error) { return u.Connect(u.t.Context()) }

func (u untouchable) Connect(context.Context) (driver.Conn, error) {
	u.t.Error("a connection was opened")
	return nil, errors.New("refused")
}

// driverless is a connector that reveals no driver, as some do that are wrapped around others.
type driverless struct{ untouchable }

func (driverless) Driver() driver.Driver { return nil }

func untouchableDB(t *testing.T) *sql.DB {
	t.Helper()
	db := sql.OpenDB(untouchable{t})
	t.Cleanup(func() { db.Close() })
	return db
}

const (
	schemaField  = "oncemill.Config.Schema"
	prefixField  = "oncemill.Config.Prefix"
	dialectField = "oncemill.Config.Dialect"
)

var badConfigs = map[string]struct {
	cfg    oncemill.Config
	fields []string
}{
	"schema with quotes":     {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: `a"; drop schema public cascade; --`}, []string{schemaField}},
	"schema in upper case":   {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "Orders"}, []string{schemaField}},
	"schema with a dot":      {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "a.b"}, []string{schemaField}},
	"schema with a space":    {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: " "}, []string{schemaField}},
	"schema with a digit":    {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "1st"}, []string{schemaField}},
	"schema with a line end": {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "orders\n"}, []string{schemaField}},
	"schema with NUL":        {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "a\x00"}, []string{schemaField}},
	"schema in Unicode":      {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "schéma"}, []string{schemaField}},
	"schema not UTF-8":       {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "a\xff"}, []string{schemaField}},
	"schema too long":        {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: strings.Repeat("a", 32)}, []string{schemaField}},
	"schema far too long":    {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: strings.Repeat("é", 100_000)}, []string{schemaField}},
	"schema of PostgreSQL":   {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "pg_oncemill"}, []string{schemaField}},
	"prefix with quotes":     {oncemill.Config{Dialect: oncemill.PostgreSQL, Prefix: `x"`}, []string{prefixField}},
	"prefix too long":        {oncemill.Config{Dialect: oncemill.SQLite, Prefix: strings.Repeat("a", 32)}, []string{prefixField}},
	"prefix on SQLite":       {oncemill.Config{Dialect: oncemill.SQLite, Prefix: "a]"}, []string{prefixField}},
	"schema on SQLite":       {oncemill.Config{Dialect: oncemill.SQLite, Schema: "main"}, []string{schemaField}},
	"dialect":                {oncemill.Config{Dialect: 99}, []string{dialectField}},
	"dialect negative":       {oncemill.Config{Dialect: -1}, []string{dialectField}},
	"everything at once":     {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "?", Prefix: "?"}, []string{schemaField, prefixField}},
	"dialect and prefix":     {oncemill.Config{Dialect: 99, Prefix: "?"}, []string{dialectField, prefixField}},
}

func TestConfig_EveryBadValueIsNamedWithoutAConnection(t *testing.T) {
	t.Parallel()
	db := untouchableDB(t)
	for name, c := range badConfigs {
		_, resolved := database.Resolve(db, c.cfg)
		for act, err := range map[string]error{
			"resolve": resolved,
			"table":   second(c.cfg.Table(db, "outbox")),
			"migrate": oncemill.Migrate(t.Context(), db, c.cfg, outbox.Migrations),
			"check":   oncemill.CheckMigrated(t.Context(), db, c.cfg, outbox.Migrations),
			"status":  second(oncemill.MigrationStatus(t.Context(), db, c.cfg, outbox.Migrations)),
		} {
			got := testserver.ConfigErrors(err)
			if len(got) != len(c.fields) {
				t.Errorf("%s, %s: got %v", name, act, err)
				continue
			}
			for i, bad := range got {
				if bad.Field != c.fields[i] || bad.Value == "" || bad.Problem == "" {
					t.Errorf("%s, %s: got %+v, want field %s", name, act, bad, c.fields[i])
				}
				if text := err.Error(); !strings.Contains(text, bad.Field) || len(text) > 500 || !utf8.ValidString(text) || strings.Contains(text, "\x00") {
					t.Errorf("%s, %s: the text is %q", name, act, text)
				}
			}
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestConfig_DefaultsAndNames(t *testing.T) {
	t.Parallel()
	db := untouchableDB(t)
	longest := strings.Repeat("z", 31)
	for name, c := range map[string]struct {
		cfg   oncemill.Config
		table string
		text  string
	}{
		"PostgreSQL":          {oncemill.Config{Dialect: oncemill.PostgreSQL}, `"oncemill"."outbox"`, `"oncemill"."outbox" "outbox_key" "oncemill"`},
		"PostgreSQL, named":   {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "shop", Prefix: "_m1_"}, `"shop"."_m1_outbox"`, `"shop"."_m1_outbox" "_m1_outbox_key" "shop"`},
		"PostgreSQL, keyword": {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "select"}, `"select"."outbox"`, `"select"."outbox" "outbox_key" "select"`},
		"PostgreSQL, longest": {oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: longest, Prefix: longest}, `"` + longest + `"."` + longest + `outbox"`, `"` + longest + `"."` + longest + `outbox" "` + longest + `outbox_key" "` + longest + `"`},
		"SQLite":              {oncemill.Config{Dialect: oncemill.SQLite}, `"oncemill_outbox"`, `"oncemill_outbox" "oncemill_outbox_key" ""`},
		"SQLite, named":       {oncemill.Config{Dialect: oncemill.SQLite, Prefix: "m_"}, `"m_outbox"`, `"m_outbox" "m_outbox_key" ""`},
	} {
		resolved, err := database.Resolve(db, c.cfg)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := resolved.Table("outbox"); got != c.table {
			t.Errorf("%s: table %s", name, got)
		}
		// What only looks like a placeholder is left alone.
		const braces = ` {{ outbox }} {x} '{{1,2},{3,4}}' {{}} {{Outbox}}`
		if got := resolved.Expand(`{{outbox}} {{name:outbox_key}} {{schema}}` + braces); got != c.text+braces {
			t.Errorf("%s: text %s", name, got)
		}
		if table, err := c.cfg.Table(db, "outbox"); err != nil || table != c.table {
			t.Errorf("%s: Config.Table returned %s, %v", name, table, err)
		}
		if again, err := database.Resolve(db, resolved.Config()); err != nil || again != resolved || database.Of(resolved.Config()) != resolved {
			t.Errorf("%s: resolved again it is %+v, %v", name, again, err)
		}
	}
}

func TestDialectOf_KnowsTheDriver(t *testing.T) {
	t.Parallel()
	connector, err := pq.NewConnector("postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		db   *sql.DB
		want oncemill.Dialect
		err  error
	}{
		{sql.OpenDB(connector), oncemill.PostgreSQL, nil},
		{sql.OpenDB(lite{}), oncemill.SQLite, nil},
		{sql.OpenDB(untouchable{t}), oncemill.DialectAuto, oncemill.ErrUnknownDialect},
		{sql.OpenDB(driverless{untouchable{t}}), oncemill.DialectAuto, oncemill.ErrUnknownDialect},
	} {
		got, err := oncemill.DialectOf(c.db)
		if got != c.want || !errors.Is(err, c.err) {
			t.Errorf("got %v, %v; want %v, %v", got, err, c.want, c.err)
		}
		resolved, err := database.Resolve(c.db, oncemill.Config{})
		if !errors.Is(err, c.err) || err == nil && resolved.Dialect != c.want {
			t.Errorf("resolved to %+v, %v", resolved, err)
		}
		if err := oncemill.Migrate(t.Context(), c.db, oncemill.Config{}); c.err != nil && !errors.Is(err, c.err) {
			t.Errorf("migrate: %v", err)
		}
		c.db.Close()
	}
}

// lite is the SQLite driver, never opened.
type lite struct{}

func (lite) Driver() driver.Driver { return &sqlite.Driver{} }

func (lite) Connect(context.Context) (driver.Conn, error) { return nil, errors.New("not opened") }

func TestDialect_HasAName(t *testing.T) {
	t.Parallel()
	for d, want := range map[oncemill.Dialect]string{
		oncemill.DialectAuto: "auto", oncemill.PostgreSQL: "postgresql", oncemill.SQLite: "sqlite", 9: "Dialect(9)",
	} {
		if got := d.String(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
