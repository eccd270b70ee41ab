// Package steerstore stores what operators have paused, and their commands to the owners of
// lanes.
package steerstore

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

//go:embed migrations postgresql sqlite
var files embed.FS

// Migrations create the tables pauses and lane_commands.
var Migrations = statements.Migrations(files)

// Kinds of pauses.
const (
	KindTopic    = "topic"
	KindSink     = "sink"
	KindLane     = "lane"
	KindKey      = "key"
	KindConsumer = "consumer"
)

// Actions of commands.
const (
	ActionRelease = "release"
	ActionRetry   = "retry"
)

const (
	// MostPauses bounds the pauses of a database. Every worker reads all of them.
	MostPauses = 1000

	// MostApplied bounds what workers obey. More than MostPauses were written past Pause; they
	// must not keep a worker from those that were not.
	MostApplied = 10 * MostPauses

	// MostCommands bounds the commands of each lane that one read returns.
	MostCommands = 32
)

var (
	// ErrTooMany is returned by Pause if there are MostPauses.
	ErrTooMany = errors.New("too many pauses")

	// ErrNotPaused is returned by Resume for what is not paused.
	ErrNotPaused = errors.New("is not paused")
)

// Target is what can be paused.
type Target struct{ Kind, Name string }

// Pause is what somebody has paused.
type Pause struct {
	Target
	By, Reason string
	Since      time.Time
}

// Command is what an operator wants the owner of a lane to do.
type Command struct {
	ID         int64
	Action     string
	Lane       int
	Topic, Key string    // of a retry; empty: all
	Worker     string    // of a release: who has begun it; empty: nobody
	Asked      time.Time // when it was given, by the database's clock
}

// Act is who does it, and why. Texts that a database does not accept are cleaned.
type Act struct{ By, Reason string }

// Store holds the pauses and commands of a database. It is safe for concurrent use.
type Store interface {
	// Pauses returns the pauses by kind and name, at most MostPauses. Without the table there
	// are none. After that was so once, the next call looks for the table again.
	Pauses(ctx context.Context) ([]Pause, error)

	// Paused returns what is paused for workers, as Pauses: of one kind, or of all if kind is
	// empty, at most MostApplied.
	Paused(ctx context.Context, kind string) ([]Target, error)

	// Pause pauses something. If it is paused already, it returns that pause, and changes
	// nothing.
	Pause(ctx context.Context, kind, name string, act Act) (already *Pause, err error)

	// Resume ends a pause, and returns it.
	Resume(ctx context.Context, kind, name string, act Act) (Pause, error)

	// Give gives a command for lanes. The audit has one entry, about subject, with details.
	Give(ctx context.Context, action string, lanes []int, topic, key, subject, details string, act Act) error

	// Commands returns commands: at most MostCommands of each lane, releases first. Without
	// the table there are none.
	Commands(ctx context.Context) ([]Command, error)

	// BeginRelease records that a worker gives the lane of a command back, and reports
	// whether no other one does. Twice is as once.
	BeginRelease(ctx context.Context, id int64, worker string) (bool, error)

	// End deletes a command that was carried out.
	End(ctx context.Context, id int64) error
}

// Open returns the store of a database.
func Open(db *sql.DB, where database.Database) Store {
	if where.Dialect == oncemill.SQLite {
		return newSQLite(db, where)
	}
	return newPostgres(db, where)
}

// texts are the statements. Those of the same name take the same arguments on all databases.
type texts struct {
	There, Pauses, Paused, PauseOf, LockPauses, CountPauses, Pause, Resume string
	Command, Commands, BeginRelease, EndCommand                            string
}
