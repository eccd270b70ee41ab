package main

import (
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/lib/pq"
	"github.com/spf13/pflag"
	_ "modernc.org/sqlite" // driver "sqlite"

	"github.com/oncemill/oncemill"
)

type databaseOptions struct {
	url    string
	schema string
	prefix string
}

func (o *databaseOptions) register(flags *pflag.FlagSet) {
	flags.StringVar(&o.url, "database", "", "postgres://user:password@host/name or sqlite:path/to/file.db; TLS is required, and verified unless the host is loopback; sslmode overrides this (required, except for conformance)")
	flags.StringVar(&o.schema, "schema", "", `schema of oncemill's tables (default "oncemill"; none on SQLite)`)
	flags.StringVar(&o.prefix, "prefix", "", `prefix of oncemill's tables (default none; "oncemill_" on SQLite)`)
}

// open opens a pool for the URL and does not connect. A SQLite file must exist, unless
// mayCreate. Errors never show the URL, which holds a password.
func (o *databaseOptions) open(mayCreate bool) (*sql.DB, oncemill.Config, error) {
	cfg := oncemill.Config{Schema: o.schema, Prefix: o.prefix}
	var db *sql.DB
	var err error
	var file string
	switch scheme, rest, _ := strings.Cut(o.url, ":"); {
	case o.url == "":
		return nil, cfg, &usageError{errors.New("--database or ONCEMILL_DATABASE is required")}
	case ambiguous(o.url):
		return nil, cfg, &usageError{errors.New("--database: " + howToEscape)}
	case (scheme == "postgres" || scheme == "postgresql") && strings.HasPrefix(rest, "//"):
		cfg.Dialect = oncemill.PostgreSQL
		var connector *pq.Connector
		if connector, err = pq.NewConnector(o.url); err == nil {
			db = sql.OpenDB(connector)
			db.SetMaxIdleConns(8) // a relay works with up to six at a time
		}
	case scheme == "sqlite" && strings.TrimPrefix(rest, "//") == ":memory:":
		return nil, cfg, &usageError{errors.New("--database: a database in memory ends with this command; name a file")}
	case scheme == "sqlite" && strings.TrimPrefix(rest, "//") != "":
		cfg.Dialect = oncemill.SQLite
		file = strings.TrimPrefix(rest, "//")
		db, err = sql.Open("sqlite", oncemill.SQLiteDSN(file))
	default:
		return nil, cfg, &usageError{errors.New(`--database: the URL must begin with "postgres://" or "sqlite:"`)}
	}
	if err != nil {
		return nil, cfg, &usageError{errors.New("--database: the URL cannot be parsed")}
	}
	if _, err := cfg.Table(db, "outbox"); err != nil { // checks the names
		return nil, cfg, &usageError{errors.Join(err, db.Close())}
	}
	if file != "" {
		if err := present(file, mayCreate); err != nil {
			return nil, cfg, &usageError{errors.Join(fmt.Errorf("--database: %w", err), db.Close())}
		}
	}
	return db, cfg, nil
}

// present returns an error if the SQLite file does not exist, or creates it.
func present(path string, mayCreate bool) error {
	if mayCreate {
		return createPrivate(path)
	}
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is no file %s; oncemill migrate creates it", path)
	}
	return err
}

// createPrivate creates the file of a new database with mode 0600. SQLite would follow the
// umask. The write-ahead log gets the same mode.
func createPrivate(path string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the operator names it
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return file.Close()
}

// with opens the database, runs fn and closes it.
func (o *databaseOptions) with(fn func(db *sql.DB, cfg oncemill.Config) error) error {
	return o.run(false, fn)
}

// create is with, but creates the SQLite file if it does not exist.
func (o *databaseOptions) create(fn func(db *sql.DB, cfg oncemill.Config) error) error {
	return o.run(true, fn)
}

func (o *databaseOptions) run(mayCreate bool, fn func(db *sql.DB, cfg oncemill.Config) error) error {
	db, cfg, err := o.open(mayCreate)
	if err != nil {
		return err
	}
	return errors.Join(fn(db, cfg), db.Close())
}
