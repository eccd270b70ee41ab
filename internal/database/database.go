// Package database resolves an oncemill.Config for the storage packages.
package database

import (
	"database/sql"
	"errors"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/names"
)

// Database is a resolved oncemill.Config.
type Database struct {
	Dialect oncemill.Dialect
	names.Names
}

// Resolve fills in the defaults of cfg for db. The error holds an
// [*oncemill.ConfigError] for each bad value, or is [oncemill.ErrUnknownDialect]. It
// does no I/O.
func Resolve(db *sql.DB, cfg oncemill.Config) (Database, error) {
	dialect := cfg.Dialect
	if dialect == oncemill.DialectAuto {
		var err error
		if dialect, err = oncemill.DialectOf(db); err != nil {
			return Database{}, err
		}
	}
	var errs []error
	resolved := names.Names{Schema: cfg.Schema, Prefix: cfg.Prefix}.Resolve(int(dialect), func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "oncemill.Config." + field, Value: value, Problem: problem})
	})
	return Database{Dialect: dialect, Names: resolved}, errors.Join(errs...)
}

// Of returns the Database of a Config that [Resolve] filled in.
func Of(cfg oncemill.Config) Database {
	return Database{Dialect: cfg.Dialect, Names: names.Names{Schema: cfg.Schema, Prefix: cfg.Prefix}}
}

// Config returns the resolved configuration.
func (d Database) Config() oncemill.Config {
	return oncemill.Config{Dialect: d.Dialect, Schema: d.Schema, Prefix: d.Prefix}
}
