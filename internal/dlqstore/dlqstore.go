// Package dlqstore stores dead letters.
package dlqstore

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

// Migrations create the table dead_letters.
var Migrations = statements.Migrations(files)

// ErrNotFound is returned for an id that no dead letter has, or none in the wanted state.
var ErrNotFound = errors.New("not found")

// Store holds the dead letters of a database. It is safe for concurrent use. Each act of a
// person (Replay, Discard, Restore, ReplayEdited, AddNote, Import) writes entries of the
// audit in its transaction; auditstore.ErrNotMigrated means that there is no table for
// them, and nothing was done.
type Store interface {
	Jobs

	// Get returns a dead letter with its message and, if it was replayed and failed again,
	// the id of the dead letter of that. Otherwise the error is ErrNotFound.
	Get(ctx context.Context, id int64) (*Letter, error)

	// List returns the dead letters that f selects, without payload, metadata and
	// attempts.
	List(ctx context.Context, f Filter) ([]*Letter, error)

	// States returns the states of those of the dead letters that exist.
	States(ctx context.Context, ids []int64) (map[int64]string, error)

	// Replay sets the state replaying for the dead letters that are dead or held, and
	// returns their ids. Of concurrent calls, one gets an id. A consumer's dead letter gets
	// a new token. The caller sorts ids, so that concurrent calls do not deadlock.
	Replay(ctx context.Context, ids []int64, by, reason string) (accepted []int64, err error)

	// Discard sets the state discarding for a dead letter that is held, and discarded for
	// one that is dead or a consumer's that is replaying. The rest is as with Replay.
	Discard(ctx context.Context, ids []int64, by, reason string) (accepted []int64, err error)

	// Restore sets the state dead for a discarded dead letter whose message is still there,
	// and held for one that is discarding. The rest is as with Replay.
	Restore(ctx context.Context, ids []int64, by, reason string) (accepted []int64, err error)

	// ReplayEdited is Replay for a consumer's dead letter that is dead, with other content.
	// The message of the dead letter stays as it is.
	ReplayEdited(ctx context.Context, id int64, edit Edit) (accepted bool, err error)

	// AddNote adds a note to a dead letter; false if there is no such dead letter.
	AddNote(ctx context.Context, id int64, by, note string) (added bool, err error)

	// Notes returns the notes of a dead letter, the oldest first, at most so many of the
	// newest.
	Notes(ctx context.Context, id int64, most int) ([]Note, error)

	// Import adds a dead letter of an export, and returns its id; 0 if it is there already.
	// Of l it takes everything but id, version, token, edit and trace id. Its state is
	// dead, replayed or discarded; a closed one is closed now. A relay's has to be closed.
	Import(ctx context.Context, l *Letter, by, reason string) (id int64, err error)

	// Now returns the time of the database's clock.
	Now(ctx context.Context) (time.Time, error)

	// Stuck counts the dead letters that have been replaying or discarding for longer than
	// wait. It looks at the oldest of each state, at most so many.
	Stuck(ctx context.Context, wait time.Duration, most int) ([]OpenCount, error)

	// CountOpen counts the dead letters that are neither replayed nor discarded, at most so
	// many of each state, the oldest ones.
	CountOpen(ctx context.Context, most int) ([]OpenCount, error)

	// Groups returns the groups of alike open dead letters, the largest first, at most so many.
	// It looks at the newest of each state, at most so many.
	Groups(ctx context.Context, look, most int) ([]Group, error)

	// Purge deletes the dead letters that were replayed or discarded longer ago than
	// retention, in short transactions. It leaves those that others have locked.
	Purge(ctx context.Context, retention time.Duration) (deleted int64, err error)

	// Add writes a consumer's dead letter in a transaction of the store's database. It
	// takes the message and its failure from l. The id, the state, the times, the trace id
	// and the fingerprint are assigned. Texts that a database does not accept are cleaned,
	// and cut at 4 KiB with a mark, so that a dead letter can always be written.
	Add(ctx context.Context, tx oncemill.Tx, l *Letter) error

	// ReplayToken returns the secret of a consumer's dead letter that is replaying: 128
	// random bits in hexadecimal, which the database generates with the replay. Otherwise
	// the error is ErrNotFound.
	ReplayToken(ctx context.Context, id int64) (token string, err error)

	// CheckReplay returns a consumer's dead letter, with its message, if token is that of
	// its replay, even if the replay has ended. Otherwise the error is ErrNotFound.
	CheckReplay(ctx context.Context, id int64, token string) (*Letter, error)

	// FormerReplay returns consumer, message id and metadata of a consumer's dead letter if
	// token is that of one of its last hundred replays but the last one. Otherwise the error
	// is ErrNotFound.
	FormerReplay(ctx context.Context, id int64, token string) (*Letter, error)

	// EndReplay ends the replay of a consumer's dead letter in tx, which holds the outcome
	// of the message. It reports false and changes nothing, unless the dead letter belongs
	// to that consumer, is replaying, and has this token and payload. Of two concurrent
	// calls, the second waits for the transaction of the first.
	EndReplay(ctx context.Context, tx oncemill.Tx, consumer string, id int64, token string, payload []byte) (ended bool, err error)
}

// OpenCount is a number of dead letters.
type OpenCount struct {
	State, Source, Consumer string
	N                       int64
	Oldest                  time.Duration // its age
}

// Group is a group of dead letters with the same fingerprint.
type Group struct {
	Fingerprint string
	N           int64
	First, Last time.Time // when they died
	Newest      int64     // the id of one of them, which the rest is from

	Source, Consumer, Topic, Reason, Error string
}

// Open returns the store of a database.
func Open(db *sql.DB, where database.Database) Store {
	if where.Dialect == oncemill.SQLite {
		return newSQLite(db, where)
	}
	return newPostgres(db, where)
}

// texts are the statements. Those of the same name take the same arguments on all
// databases; times are in microseconds since 1970.
type texts struct {
	Now                                      string
	Get, States, ReplayToken, CheckReplay    string
	FormerReplay, FailedAgain, Notes         string
	Add, Import, EndReplay, Purge            string
	Replay, ReplayEdited, Discard, Restore   string
	AddNote                                  string
	CountOpen, Stuck, Groups                 string
	NewestLetter, StartJob, DueJob, LockJob  string
	LookForJob, PostponeJob                  string
	GetJob, ListJobs, SaveJob, AddJobLetters string
	PendingJobLetters, AskJobLetters         string
	OpenLetters, ReplaySome                  string
	EndJobLetters, JobOutcomes               string
	RelayOutcomes                            string
	PurgeJobLetters, PurgeJob                string
	NewestByTime, OldestByTime               string
	NewestByMessage, OldestByMessage         string
	NewestByKey, OldestByKey                 string
	NewestByFingerprint, OldestByFingerprint string
	NewestByConsumer, OldestByConsumer       string
	NewestByTopic, OldestByTopic             string
	NewestByState, OldestByState             string
}
