// Package status reads what waits in oncemill's tables, and who works: for a dashboard, an alarm,
// or the command oncemill status.
//
//	reader, err := status.New(db, status.Config{})
//	...
//	s, err := reader.Read(ctx)
//	...
//	for _, problem := range s.Problems() {
//		log.Println(problem)
//	}
//
// It reads by indexes, at most Config.Limit rows of each kind, so its cost does not grow with a
// backlog. What costs it time are deleted rows that an old snapshot keeps in a table: it passes
// over them. It writes nothing, waits for no lock of a row, and does not wait for long where a
// table is locked or the server is silent. Parts whose tables do not exist are nil. The parts are
// read one after another, not at the same instant.
package status

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/keystore"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

// Config says where the tables are.
type Config struct {
	Database oncemill.Config

	// Limit is the number at which counts end, at least 1. Default: 10,000.
	Limit int
}

const (
	defaultLimit = 10_000

	// partLimit is the time for a part. A read takes at most five times this, and a second more
	// if the server is silent.
	partLimit = 2 * time.Second

	// mostAbandoned is how many parts may hang at a time, each with a connection.
	mostAbandoned = 4
)

// Names of the parts, as in Status.Forbidden and Status.Silent.
const (
	partOutbox      = "outbox"
	partRelay       = "relay"
	partDeadLetters = "dead letters"
	partKeys        = "idempotency keys"
	partPauses      = "pauses"
)

// Status is the state of one database.
type Status struct {
	At time.Time // of this process, when it was read

	Outbox      *Outbox      `json:",omitempty"`
	Relay       *Relay       `json:",omitempty"`
	DeadLetters *DeadLetters `json:",omitempty"`
	Keys        *Keys        `json:",omitempty"`
	Pauses      *Pauses      `json:",omitempty"`

	// Forbidden are the parts whose tables the role of the database may not read: "outbox",
	// "relay", "dead letters", "idempotency keys", "pauses". docs/operations.md has the grants.
	Forbidden []string `json:",omitempty"`

	// Silent are the parts that gave no answer in time: the server is silent, or somebody
	// else has locked a table.
	Silent []string `json:",omitempty"`
}

// Count is a number of rows.
type Count struct {
	N int64

	// AtLeast means that counting ended at the limit: there may be more.
	AtLeast bool `json:",omitempty"`

	// Estimate means that N comes from the statistics of the database, since counting ended
	// at the limit.
	Estimate bool `json:",omitempty"`
}

// String returns the number, with a sign if it is not exact.
func (c Count) String() string {
	text := strconv.FormatInt(c.N, 10)
	switch {
	case c.Estimate:
		return "~" + text
	case c.AtLeast:
		return text + "+"
	}
	return text
}

// Age is a span of time. In JSON it is a number of seconds.
type Age time.Duration

// String returns the age in units that fit its size.
func (a Age) String() string {
	d := time.Duration(a)
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 48*time.Hour:
		return strconv.FormatFloat(d.Hours(), 'f', 1, 64) + "h"
	}
	return strconv.FormatFloat(d.Hours()/24, 'f', 1, 64) + "d"
}

// MarshalJSON implements json.Marshaler.
func (a Age) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(a).Seconds()) }

// Outbox is what producers have committed and relays have not delivered yet.
type Outbox struct {
	Depth     Count  // messages that wait for a first attempt, or are in flight
	Oldest    Age    // since the oldest of them was written
	Lanes     []Lane // those with messages
	Scheduled Count  // messages for later
	Due       Count  // of them, those that should be in the outbox by now
	Late      Age    // since the first of them was due
}

// Lane is what waits in a lane.
type Lane struct {
	Lane   int
	Depth  Count
	Oldest Age
}

// Relay is who delivers, and what waits for another attempt.
type Relay struct {
	Workers  []Worker
	Unowned  []int // lanes that no running worker owns
	Free     Age   // how long the first of them has been without an owner, up to an hour
	Retrying Count // messages that were refused or set aside, and will be tried again
	Oldest   Age   // since the oldest of them was written

	// SetAside are those of Retrying that have used up no attempt: their topic is unavailable,
	// or nobody takes them. They wait until that ends. OldestSetAside is the time since the
	// oldest of them was written.
	SetAside       Count
	OldestSetAside Age

	HeldKeys Count // ordering keys that a dead letter holds, until it is replayed or discarded
	Behind   Count // messages that wait behind one of their key that is retrying or held
}

// Worker is a process that relays, or has done so within the last hour.
type Worker struct {
	ID       string
	Name     string
	Host     string `json:",omitempty"`
	Version  string `json:",omitempty"` // of the library
	Problem  string `json:",omitempty"` // why it is not ready
	Up       Age
	Beat     Age // since its last heartbeat; at rest it has one within a third of its lease; 0: not known
	Gone     Age // since it counts as gone; 0 while it is alive
	Ready    bool
	Stopping bool
	Lanes    int // that it owns
}

// DeadLetters are those that are neither replayed nor discarded.
type DeadLetters struct {
	Total Count
	Open  []Letters

	// Stuck are those whose replay or discard nobody has carried out within a minute, with
	// the time since somebody asked for the oldest.
	Stuck []Letters
}

// Letters are the dead letters of one origin in one state.
type Letters struct {
	State    dlq.State
	Source   dlq.Source
	Consumer string `json:",omitempty"`
	Count    Count
	Oldest   Age
}

// Keys are the idempotency keys.
type Keys struct {
	Stored  Count // on PostgreSQL by the statistics of the server
	Started []Started
}

// Started are the requests of one endpoint that have begun and not ended.
type Started struct {
	Endpoint string

	// Running means that their processes work on them. Otherwise the processes have ended or
	// lost the database, and the next request with the key takes over.
	Running bool
	Count   Count
	Oldest  Age
}

// Pauses are what operators have paused.
type Pauses struct {
	Paused []steer.Pause // by kind and name
}

// Reader reads the state of one database. It is safe for concurrent use.
type Reader struct {
	db    *sql.DB
	where database.Database
	most  int
	calls *bounded.Calls
}

// New returns a Reader. It does not use the database yet.
func New(db *sql.DB, cfg Config) (*Reader, error) {
	if cfg.Limit == 0 {
		cfg.Limit = defaultLimit
	}
	where, err := database.Resolve(db, cfg.Database)
	if cfg.Limit < 0 {
		err = errors.Join(err, &oncemill.ConfigError{Field: "status.Config.Limit", Value: strconv.Itoa(cfg.Limit), Problem: "must be at least 1"})
	}
	if err != nil {
		return nil, err
	}
	return &Reader{db: db, where: where, most: cfg.Limit, calls: bounded.New(mostAbandoned)}, nil
}

// Read reads the state. A [*oncemill.SchemaError] means that tables are older than this library,
// or too new for it. An error that wraps [context.DeadlineExceeded] means that no part gave an
// answer.
func (r *Reader) Read(ctx context.Context) (*Status, error) {
	s := &Status{At: time.Now()}
	parts := []struct {
		name string
		set  oncemill.Migrations
		read func(context.Context, *Status) error
	}{
		{partOutbox, outbox.Migrations, r.outbox},
		{partRelay, relay.Migrations, r.relay},
		{partDeadLetters, dlq.Migrations, r.deadLetters},
		{partKeys, idempotency.Migrations, r.keys},
		{partPauses, steer.Migrations, r.pauses},
	}
	var silence error
	for _, part := range parts {
		if errors.Is(silence, bounded.ErrAbandoned) { // the server itself is silent
			s.Silent = append(s.Silent, part.name)
			continue
		}
		// Its own Status: the call may still write to it after it was abandoned.
		read, err := bounded.Do(ctx, r.calls, partLimit, func(ctx context.Context) (*Status, error) {
			read := new(Status)
			err := r.part(ctx, part.set, func(ctx context.Context) error { return part.read(ctx, read) })
			if err != nil && ctx.Err() != nil {
				err = ctx.Err() // the server tells that it was canceled
			}
			return read, err
		})
		switch {
		case err == nil:
			s.take(read)
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case sqlerr.Forbidden(err):
			s.Forbidden = append(s.Forbidden, part.name)
		case bounded.Silence(err):
			s.Silent, silence = append(s.Silent, part.name), err
		default:
			return nil, fmt.Errorf("status: %s: %w", part.name, err)
		}
	}
	if len(s.Silent) == len(parts) {
		return nil, fmt.Errorf("status: the database gives no answer: %w", silence)
	}
	return s, nil
}

// take adds the part that was read.
func (s *Status) take(part *Status) {
	switch {
	case part.Outbox != nil:
		s.Outbox = part.Outbox
	case part.Relay != nil:
		s.Relay = part.Relay
	case part.DeadLetters != nil:
		s.DeadLetters = part.DeadLetters
	case part.Keys != nil:
		s.Keys = part.Keys
	case part.Pauses != nil:
		s.Pauses = part.Pauses
	}
}

// part reads one part, if its tables exist.
func (r *Reader) part(ctx context.Context, set oncemill.Migrations, read func(context.Context) error) error {
	status, err := oncemill.MigrationStatus(ctx, r.db, r.where.Config(), set)
	if err != nil || status[0].Version == 0 {
		return err
	}
	if err := oncemill.CheckMigrated(ctx, r.db, r.where.Config(), set); err != nil {
		return err
	}
	return read(ctx)
}

func (r *Reader) count(n int64) Count { return Count{N: n, AtLeast: n >= int64(r.most)} }

func (r *Reader) outbox(ctx context.Context, s *Status) error {
	perLane := max(1, r.most/outbox.Lanes)
	b, err := outboxstore.Open(r.db, r.where).Backlog(ctx, perLane)
	if err != nil {
		return err
	}
	o := &Outbox{Lanes: []Lane{}, Scheduled: r.count(b.Scheduled), Due: r.count(b.Due), Late: Age(b.Late)}
	for _, l := range b.Lanes {
		o.Lanes = append(o.Lanes, Lane{Lane: l.Lane, Depth: Count{N: l.Rows, AtLeast: l.Rows >= int64(perLane)}, Oldest: Age(l.Oldest)})
	}
	o.Depth.N, o.Depth.AtLeast = b.Depth()
	if o.Depth.AtLeast && o.Depth.N == b.Estimate {
		o.Depth.AtLeast, o.Depth.Estimate = false, true
	}
	o.Oldest = Age(b.Oldest())
	s.Outbox = o
	return nil
}

func (r *Reader) relay(ctx context.Context, s *Status) error {
	store := relaystore.Open(r.db, r.where)
	waiting, err := store.Waiting(ctx, r.most)
	if err != nil {
		return err
	}
	owners, err := store.Owners(ctx)
	if err != nil {
		return err
	}
	workers, err := store.Workers(ctx)
	if err != nil {
		return err
	}
	all := &Relay{
		Workers: []Worker{}, Unowned: []int{},
		Retrying: r.count(waiting.Retrying), HeldKeys: r.count(waiting.HeldKeys), Oldest: Age(waiting.Oldest),
		SetAside: Count{N: waiting.SetAside, AtLeast: r.count(waiting.Retrying).AtLeast}, OldestSetAside: Age(waiting.OldestSetAside),
		Behind: Count{N: max(0, waiting.All-waiting.Retrying-waiting.HeldKeys), AtLeast: r.count(waiting.All).AtLeast},
	}
	lanes := map[string]int{}
	for _, o := range owners {
		if o.Alive() {
			lanes[o.Owner]++
		} else {
			all.Unowned, all.Free = append(all.Unowned, o.Lane), max(all.Free, Age(-o.Left))
		}
	}
	for _, w := range workers {
		all.Workers = append(all.Workers, Worker{
			ID: w.Owner, Name: w.Name, Host: w.Host, Version: w.Version, Problem: w.Problem, Beat: Age(max(0, w.Heartbeat)), Up: Age(w.Up), Gone: Age(max(0, -w.Left)), Ready: w.Ready, Stopping: w.Stopping, Lanes: lanes[w.Owner],
		})
	}
	s.Relay = all
	return nil
}

func (r *Reader) deadLetters(ctx context.Context, s *Status) error {
	store := dlqstore.Open(r.db, r.where)
	counts, err := store.CountOpen(ctx, r.most)
	if err != nil {
		return err
	}
	stuck, err := store.Stuck(ctx, dlq.StuckAfter, r.most)
	if err != nil {
		return err
	}
	all := &DeadLetters{Open: []Letters{}, Stuck: []Letters{}}
	byState := map[string]int64{}
	for _, c := range counts {
		byState[c.State] += c.N
	}
	for _, c := range counts {
		full := byState[c.State] >= int64(r.most)
		all.Open = append(all.Open, lettersOf(c, full))
		all.Total.N += c.N
		all.Total.AtLeast = all.Total.AtLeast || full
	}
	for _, c := range stuck {
		all.Stuck = append(all.Stuck, lettersOf(c, byState[c.State] >= int64(r.most)))
	}
	s.DeadLetters = all
	return nil
}

func lettersOf(c dlqstore.OpenCount, atLeast bool) Letters {
	return Letters{
		State: dlq.State(c.State), Source: dlq.Source(c.Source), Consumer: c.Consumer, Count: Count{N: c.N, AtLeast: atLeast}, Oldest: Age(c.Oldest),
	}
}

func (r *Reader) keys(ctx context.Context, s *Status) error {
	store := keystore.Open(r.db, r.where, nil, false)
	counts, err := store.CountStarted(ctx, r.most)
	if err != nil {
		return err
	}
	n, estimated, err := store.CountStored(ctx, r.most)
	if err != nil {
		return err
	}
	stored := r.count(n)
	if estimated {
		stored = Count{N: n, Estimate: true}
	}
	all := &Keys{Stored: stored, Started: []Started{}}
	total := int64(0)
	for _, c := range counts {
		total += c.N
	}
	for _, c := range counts {
		all.Started = append(all.Started, Started{
			Endpoint: c.Endpoint, Running: c.Running, Count: Count{N: c.N, AtLeast: total >= int64(r.most)}, Oldest: Age(c.Oldest),
		})
	}
	s.Keys = all
	return nil
}

func (r *Reader) pauses(ctx context.Context, s *Status) error {
	control, err := steer.New(r.db, steer.Config{Database: r.where.Config()})
	if err != nil {
		return err
	}
	list, err := control.List(ctx)
	if err != nil {
		return err
	}
	s.Pauses = &Pauses{Paused: list}
	return nil
}
