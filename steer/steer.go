package steer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/steerstore"
	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/outbox"
)

// Migrations creates the tables pauses and lane_commands.
var Migrations = oncemill.Migrations{Name: "steer", FS: steerstore.Migrations}

// Config configures a Control. The zero value is right for most services.
type Config struct {
	// Database describes the database and the location of the tables.
	Database oncemill.Config
}

// Control steers the workers of a database. It holds no connection and no goroutine. It is
// safe for concurrent use.
type Control struct {
	cfg   Config // defaults filled in
	store steerstore.Store
}

// New returns a control of the workers that use db. It does no I/O; oncemill.Migrate creates
// the tables with audit.Migrations and [Migrations]. All bad values of cfg are reported at
// once, each as an [*oncemill.ConfigError]. The caller keeps ownership of db.
func New(db *sql.DB, cfg Config) (*Control, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "steer.New db", Value: "nil", Problem: "a database is needed"}
	}
	resolved, err := database.Resolve(db, cfg.Database)
	if err != nil {
		return nil, err
	}
	cfg.Database = resolved.Config()
	return &Control{cfg: cfg, store: steerstore.Open(db, resolved)}, nil
}

// Config returns the configuration with its defaults filled in.
func (c *Control) Config() Config { return c.cfg }

// Kind is a kind of what can be paused.
type Kind string

// The kinds; the package comment says what a pause of each does.
const (
	Topic    Kind = steerstore.KindTopic
	Sink     Kind = steerstore.KindSink
	Lane     Kind = steerstore.KindLane
	Key      Kind = steerstore.KindKey
	Consumer Kind = steerstore.KindConsumer
)

// Target is what can be paused. Nothing checks that it exists: a topic can be paused before
// its first message.
type Target struct {
	Kind Kind
	Name string // 1 to 255 bytes of UTF-8 without NUL; of a lane its number
}

// String returns the kind and the name, which is quoted and shortened.
func (t Target) String() string {
	switch t.Kind {
	case Topic, Sink, Lane, Key, Consumer:
		return string(t.Kind) + " " + text.Quote(t.Name, mostShown)
	}
	return text.Quote(string(t.Kind), mostShown) + " " + text.Quote(t.Name, mostShown)
}

// check returns a [*TargetError] if there can be no such target. It brings the number of a lane
// into one form.
func (t *Target) check() error {
	bad := func(problem string) error { return &TargetError{*t, problem} }
	switch t.Kind {
	case Lane:
		n, err := strconv.Atoi(t.Name)
		if err != nil || n < 0 || n >= outbox.Lanes {
			return bad("lanes are numbered from 0 to " + strconv.Itoa(outbox.Lanes-1))
		}
		t.Name = strconv.Itoa(n)
	case Topic, Sink, Key, Consumer:
		if t.Name == "" {
			return bad("a name is required")
		}
		if problem := text.Check(t.Name, maxName); problem != "" {
			return bad("the name " + problem)
		}
	default:
		return bad("the kind must be topic, sink, lane, key or consumer")
	}
	return nil
}

const maxName = 255

// Pause is a target that somebody has paused.
type Pause struct {
	Kind   Kind
	Name   string
	By     string // who, as the caller said
	Reason string
	Since  time.Time // by the clock of the database
}

// Target returns what is paused.
func (p Pause) Target() Target { return Target{Kind: p.Kind, Name: p.Name} }

// Act is who does something, and why, for the audit.
type Act struct {
	By     string // who; required
	Reason string // why; required to pause and to release a lane
}

func (a Act) check(needsReason bool) error {
	switch {
	case strings.TrimSpace(a.By) == "":
		return ErrNoActor
	case needsReason && strings.TrimSpace(a.Reason) == "":
		return ErrNoReason
	}
	return nil
}

// Pause pauses t. Workers know it within a second or two. If t is paused already, the error is
// a [*PausedError], and names who did it. Other errors: [*TargetError], [ErrNoActor],
// [ErrNoReason], [ErrTooMany], [ErrNoAudit].
func (c *Control) Pause(ctx context.Context, t Target, act Act) error {
	if err := errors.Join(t.check(), act.check(true)); err != nil {
		return err
	}
	already, err := c.store.Pause(ctx, string(t.Kind), t.Name, steerstore.Act(act))
	switch {
	case err != nil:
		return fmt.Errorf("steer: pause %s: %w", t, err)
	case already != nil:
		return &PausedError{pauseOf(*already)}
	}
	return nil
}

// Resume ends the pause of t. Workers know it within a second or two. If t is not paused, the
// error is a [*NotPausedError].
func (c *Control) Resume(ctx context.Context, t Target, act Act) error {
	if err := errors.Join(t.check(), act.check(false)); err != nil {
		return err
	}
	_, err := c.store.Resume(ctx, string(t.Kind), t.Name, steerstore.Act(act))
	switch {
	case errors.Is(err, steerstore.ErrNotPaused):
		return &NotPausedError{t}
	case err != nil:
		return fmt.Errorf("steer: resume %s: %w", t, err)
	}
	return nil
}

// List returns what is paused, by kind and name; at most 1,000.
func (c *Control) List(ctx context.Context) ([]Pause, error) {
	found, err := c.store.Pauses(ctx)
	if err != nil {
		return nil, fmt.Errorf("steer: %w", err)
	}
	pauses := make([]Pause, len(found))
	for i, p := range found {
		pauses[i] = pauseOf(p)
	}
	return pauses, nil
}

func pauseOf(p steerstore.Pause) Pause {
	return Pause{Kind: Kind(p.Kind), Name: p.Name, By: p.By, Reason: p.Reason, Since: p.Since}
}

// ReleaseLane has the owner of a lane finish what is in flight, and give the lane back. If
// another worker can take it, that one does; otherwise the former owner does.
func (c *Control) ReleaseLane(ctx context.Context, lane int, act Act) error {
	t := Target{Kind: Lane, Name: strconv.Itoa(lane)}
	if err := errors.Join(t.check(), act.check(true)); err != nil {
		return err
	}
	if err := c.store.Give(ctx, steerstore.ActionRelease, []int{lane}, "", "", "lane "+t.Name, "", steerstore.Act(act)); err != nil {
		return fmt.Errorf("steer: release %s: %w", t, err)
	}
	return nil
}

// Selection selects retrying messages. With several fields, all of them must match; the zero
// value is an error.
type Selection struct {
	Topic string
	Key   string
	All   bool // instead of Topic and Key
}

// Retry has the selected retrying messages tried now, instead of when they are due, and
// everything that is withheld while a topic is unavailable. It uses up an attempt of those that
// fail again. Messages of what is paused stay where they are.
func (c *Control) Retry(ctx context.Context, what Selection, act Act) error {
	subject, details := "all", ""
	lanes := make([]int, outbox.Lanes)
	for i := range lanes {
		lanes[i] = i
	}
	var err error
	named := what.Topic != "" || what.Key != ""
	if named == what.All {
		err = &oncemill.ConfigError{Field: "steer.Selection", Value: fmt.Sprintf("%+v", what), Problem: "give a topic, a key, or all"}
	}
	if what.Topic != "" {
		t := Target{Topic, what.Topic}
		err = errors.Join(err, t.check())
		subject = "topic " + what.Topic
	}
	if what.Key != "" {
		t := Target{Key, what.Key}
		err = errors.Join(err, t.check())
		lanes = []int{outbox.Lane(what.Key, "")}
		if what.Topic != "" {
			details = subject
		}
		subject = "key " + what.Key
	}
	if err := errors.Join(err, act.check(false)); err != nil {
		return err
	}
	if err := c.store.Give(ctx, steerstore.ActionRetry, lanes, what.Topic, what.Key, subject, details, steerstore.Act(act)); err != nil {
		return fmt.Errorf("steer: retry: %w", err)
	}
	return nil
}
