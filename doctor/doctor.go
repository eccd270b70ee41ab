package doctor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/doctorstore"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

// Severity is how bad a finding is.
type Severity string

// The severities.
const (
	Error   Severity = "error"   // messages or effects can be lost, repeated or stuck
	Warning Severity = "warning" // they can after another fault, or work becomes slow
)

// Finding is what is wrong, and what to do. Names in its texts come from the database and the
// broker: whoever may create objects there has chosen them.
type Finding struct {
	Check    string // that found it, for example "synchronous-commit"
	Severity Severity
	Problem  string
	Remedy   string
}

// Config configures a Doctor. The zero value works.
type Config struct {
	Database oncemill.Config

	// InboxRetention is that of the consumers' inboxes; see inbox.Config.Retention. Default: 7
	// days.
	InboxRetention time.Duration

	// LetterRetention is how long closed dead letters are to be kept. Default: 90 days.
	LetterRetention time.Duration

	// Overdue is how long what is past its retention may stay. A shorter time reports a purge
	// that is only slow. Default: 24 h.
	Overdue time.Duration

	// SnapshotAge is how long a transaction may keep deleted rows. Default: 10 min.
	SnapshotAge time.Duration

	// ClockOffset is how far the clocks of this process and of the database may differ.
	// Default: 2 s.
	ClockOffset time.Duration
}

const (
	callLimit     = 3 * time.Second // for a check
	mostAbandoned = 4
)

// Doctor checks one database. It is safe for concurrent use.
type Doctor struct {
	db    *sql.DB
	where database.Database
	store doctorstore.Store
	cfg   Config
	calls *bounded.Calls
	now   func() time.Time
}

// New returns a Doctor. It does not use the database yet.
func New(db *sql.DB, cfg Config) (*Doctor, error) {
	where, err := database.Resolve(db, cfg.Database)
	errs := []error{err}
	for _, d := range []struct {
		field  string
		value  *time.Duration
		normal time.Duration
	}{
		{"InboxRetention", &cfg.InboxRetention, 7 * 24 * time.Hour},
		{"LetterRetention", &cfg.LetterRetention, 90 * 24 * time.Hour},
		{"Overdue", &cfg.Overdue, 24 * time.Hour},
		{"SnapshotAge", &cfg.SnapshotAge, 10 * time.Minute},
		{"ClockOffset", &cfg.ClockOffset, 2 * time.Second},
	} {
		switch {
		case *d.value < 0:
			errs = append(errs, &oncemill.ConfigError{Field: "doctor.Config." + d.field, Value: d.value.String(), Problem: "must be positive, or 0 for " + d.normal.String()})
		case *d.value == 0:
			*d.value = d.normal
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Doctor{db: db, where: where, store: doctorstore.Open(db, where), cfg: cfg, calls: bounded.New(mostAbandoned), now: time.Now}, nil
}

// findings are what one check has found.
type findings []Finding

func (f *findings) add(severity Severity, check, problem, remedy string) {
	*f = append(*f, Finding{Check: check, Severity: severity, Problem: problem, Remedy: remedy})
}

// examination is one run of the checks.
type examination struct {
	*Doctor

	sets []oncemill.Migrations // whose tables exist and are current
}

// has reports whether the tables of a set exist and are current.
func (e *examination) has(set oncemill.Migrations) bool {
	return slices.ContainsFunc(e.sets, func(s oncemill.Migrations) bool { return s.Name == set.Name })
}

// Check makes all checks and returns what they find, nothing if all is well. It reads a bounded
// number of rows, waits a few seconds for each check at most, and changes nothing. A check that
// cannot be made is a finding. The error is that of a database that does not answer.
func (d *Doctor) Check(ctx context.Context) ([]Finding, error) {
	e := &examination{Doctor: d}
	versions, err := bounded.Do(ctx, d.calls, callLimit, func(ctx context.Context) ([]oncemill.Status, error) {
		return oncemill.MigrationStatus(ctx, d.db, d.where.Config(), sets()...)
	})
	switch {
	case errors.Is(err, bounded.ErrAbandoned):
		return nil, fmt.Errorf("doctor: the database gives no answer; check that the address is that of its server: %w", err)
	case err != nil:
		return nil, fmt.Errorf("doctor: %w", err)
	}
	all := e.tables(versions)
	for _, check := range []struct {
		name string
		do   func(context.Context) (findings, error)
	}{
		{"settings", e.server},
		{"synchronous-commit", e.forgetfulRoles},
		{"snapshots", e.snapshots},
		{"sequence-cache", e.sequences},
		{"autovacuum", e.autovacuum},
		{"subscription", e.subscription},
		{"indexes", e.indexes},
		{"pooler", e.pooler},
		{"purge", e.hidden},
		{"purge", e.purge},
		{"retention", e.retention},
	} {
		found, err := bounded.Do(ctx, d.calls, callLimit, check.do)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, bounded.ErrAbandoned):
			return nil, fmt.Errorf("doctor: the database gives no answer: %w", err)
		case err != nil:
			found = nil
			found.add(Warning, check.name, fmt.Sprintf("This could not be checked: %v.", err),
				"Run it as a role that may read the tables and the statistics of the server (pg_monitor), while nobody has locked a table.")
		}
		all = append(all, found...)
	}
	return all, nil
}

// sets are those with tables.
func sets() []oncemill.Migrations {
	return []oncemill.Migrations{outbox.Migrations, relay.Migrations, audit.Migrations, steer.Migrations, dlq.Migrations, inbox.Migrations, idempotency.Migrations, idempotency.QuotaMigrations}
}

// tables notes which tables exist and are current.
func (e *examination) tables(versions []oncemill.Status) (found findings) {
	exist := false
	for i, v := range versions {
		exist = exist || v.Version > 0
		switch {
		case v.Version > v.Latest:
			found.add(Warning, "tables", fmt.Sprintf("The tables of %s are newer than this program, and are not checked.", v.Set), "Use the oncemill of the version that has migrated them.")
		case v.Version == v.Latest:
			e.sets = append(e.sets, sets()[i])
		case v.Version > 0:
			found.add(Error, "tables", fmt.Sprintf("The tables of %s have version %d, and this program needs %d.", v.Set, v.Version, v.Latest), "Run oncemill migrate.")
		}
	}
	if e.has(dlq.Migrations) && !slices.ContainsFunc(versions, func(v oncemill.Status) bool { return v.Set == audit.Migrations.Name && v.Version > 0 }) {
		found.add(Error, "tables", "The tables of audit are missing: nobody can replay or discard dead letters.", "Run oncemill migrate, or add audit.Migrations to your own call.")
	}
	if !exist {
		found.add(Error, "tables", "None of the tables exist.", "Run oncemill migrate, or name the right schema or prefix.")
	}
	return found
}
