package audit

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
)

// Migrations creates the table audit.
var Migrations = oncemill.Migrations{Name: "audit", FS: auditstore.Migrations}

// Config configures a Log. The zero value is right for most services.
type Config struct {
	// Database describes the database and the location of the table.
	Database oncemill.Config

	// Retention is how long Purge keeps entries. Nothing calls Purge by itself. Default:
	// 400 days. At least 24 h.
	Retention time.Duration
}

const (
	defaultRetention = 400 * 24 * time.Hour
	leastRetention   = 24 * time.Hour
)

// Log reads the audit of a database. It holds no connection and no goroutine. It is safe
// for concurrent use.
type Log struct {
	cfg   Config // defaults filled in
	store auditstore.Store
}

// New returns the audit of db. It does no I/O; oncemill.Migrate creates the table with
// [Migrations]. All bad values of cfg are reported at once, each as an
// [*oncemill.ConfigError]. The caller keeps ownership of db.
func New(db *sql.DB, cfg Config) (*Log, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "audit.New db", Value: "nil", Problem: "a database is needed"}
	}
	var errs []error
	resolved, err := database.Resolve(db, cfg.Database)
	if err != nil {
		errs = append(errs, err)
	}
	switch {
	case cfg.Retention == 0:
		cfg.Retention = defaultRetention
	case cfg.Retention < leastRetention:
		errs = append(errs, &oncemill.ConfigError{Field: "audit.Config.Retention", Value: cfg.Retention.String(), Problem: "must be at least 24h, or 0 for 400 days"})
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	cfg.Database = resolved.Config()
	return &Log{cfg: cfg, store: auditstore.Open(db, resolved)}, nil
}

// Config returns the configuration with its defaults filled in.
func (l *Log) Config() Config { return l.cfg }

// Entry is what somebody did to one subject.
type Entry struct {
	ID      int64
	At      time.Time // by the clock of the database
	Role    string    // database role that was logged in; empty on SQLite
	By      string    // who, as the caller said
	Reason  string    // why; may be empty where the act does not require it
	Action  string    // such as "dead_letter.replay"
	Subject string    // such as "dead_letter 17"
	Details string    // what else is known of the act, or empty
}

// Cursor returns the position of the entry in a list; see [Filter].After.
func (e *Entry) Cursor() Cursor { return Cursor{At: e.At, ID: e.ID} }

// Cursor is a position in a list. Lists are ordered by Entry.At, so entries that are
// written meanwhile do not move others.
type Cursor struct {
	At time.Time
	ID int64
}

// Filter selects the entries to list. Empty fields match everything. The zero value lists
// the newest of all.
type Filter struct {
	By      string
	Action  string
	Subject string

	Since time.Time // at or after; zero: any
	Until time.Time // before; zero: any

	OldestFirst bool
	Limit       int    // Default: 100. At most 1000.
	After       Cursor // where the page begins: the Cursor of the last entry of the previous page
}

const (
	defaultLimit = 100
	mostLimit    = 1000
)

// List returns entries, by an index for each of subject, By, action and time. A bad Limit
// is an [*oncemill.ConfigError].
func (l *Log) List(ctx context.Context, f Filter) ([]Entry, error) {
	switch {
	case f.Limit == 0:
		f.Limit = defaultLimit
	case f.Limit < 0 || f.Limit > mostLimit:
		return nil, &oncemill.ConfigError{Field: "audit.Filter.Limit", Value: strconv.Itoa(f.Limit), Problem: "must be 1 to " + strconv.Itoa(mostLimit) + ", or 0 for " + strconv.Itoa(defaultLimit)}
	}
	found, err := l.store.List(ctx, auditstore.Filter{
		By: f.By, Action: f.Action, Subject: f.Subject, Since: f.Since, Until: f.Until,
		OldestFirst: f.OldestFirst, Limit: f.Limit, AfterAt: f.After.At, AfterID: f.After.ID,
	})
	if err != nil {
		return nil, fmt.Errorf("audit: list entries: %w", err)
	}
	entries := make([]Entry, len(found))
	for i, e := range found {
		entries[i] = Entry(e)
	}
	return entries, nil
}

// Purge deletes the entries that are older than Config.Retention, in small batches, and
// returns how many. Concurrent calls are safe.
func (l *Log) Purge(ctx context.Context) (deleted int64, err error) {
	deleted, err = l.store.Purge(ctx, l.cfg.Retention)
	if err != nil {
		err = fmt.Errorf("audit: purge: %w", err)
	}
	return deleted, err
}
