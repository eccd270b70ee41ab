package inboxstore

import (
	"database/sql"
	"time"

	"github.com/oncemill/oncemill"
)

// Config configures a Store. See inbox.Config and inbox.Group for its settings.
type Config struct {
	Consumer         string
	Timeout          time.Duration // of an attempt
	Isolation        sql.IsolationLevel
	LockTimeout      time.Duration // of a claim
	GroupLockTimeout time.Duration // of every statement of a group
}

// Resolve returns cfg with the defaults of a database filled in, and reports the values
// that it does not support. Timeout and Consumer are the caller's.
func (cfg Config) Resolve(dialect oncemill.Dialect, bad func(field, value, problem string)) Config {
	if dialect == oncemill.SQLite {
		return cfg.resolveSQLite(bad)
	}
	if cfg.Isolation == sql.LevelDefault {
		cfg.Isolation = sql.LevelReadCommitted
	}
	if cfg.Isolation != sql.LevelReadCommitted && cfg.Isolation != sql.LevelRepeatableRead && cfg.Isolation != sql.LevelSerializable {
		bad("Isolation", cfg.Isolation.String(), "must be sql.LevelReadCommitted, sql.LevelRepeatableRead or sql.LevelSerializable")
	}
	limit := func(field string, value *time.Duration, normal time.Duration) {
		if *value == 0 {
			*value = normal
		}
		if *value < time.Millisecond || *value > time.Hour {
			bad(field, value.String(), "must be 1ms to 1h, or 0 for "+normal.String())
		}
	}
	limit("LockTimeout", &cfg.LockTimeout, defaultLockTimeout)
	limit("Group.LockTimeout", &cfg.GroupLockTimeout, defaultGroupLockTimeout)
	return cfg
}

const (
	defaultLockTimeout      = time.Second
	defaultGroupLockTimeout = 100 * time.Millisecond
)

func (cfg Config) resolveSQLite(bad func(field, value, problem string)) Config {
	if cfg.Isolation != sql.LevelDefault && cfg.Isolation != sql.LevelSerializable {
		bad("Isolation", cfg.Isolation.String(), "SQLite is always serializable")
	}
	limit := func(field string, value *time.Duration, normal time.Duration) {
		if *value != 0 {
			bad(field, value.String(), "SQLite waits as long as the busy timeout of its connection says")
		}
		*value = normal
	}
	limit("LockTimeout", &cfg.LockTimeout, defaultLockTimeout)
	limit("Group.LockTimeout", &cfg.GroupLockTimeout, defaultGroupLockTimeout)
	return cfg
}
