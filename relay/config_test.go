package relay_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// countingDriver counts what a database is asked for, and answers nothing.
type countingDriver struct{ connections int }

func (d *countingDriver) Connect(context.Context) (driver.Conn, error) {
	d.connections++
	return nil, errors.New("not a database")
}
func (d *countingDriver) Driver() driver.Driver            { return d }
func (d *countingDriver) Open(string) (driver.Conn, error) { return d.Connect(context.Background()) }

// fields returns the fields of all the ConfigErrors that err joins.
func fields(t *testing.T, err error) []string {
	t.Helper()
	var all []string
	for pending := []error{err}; len(pending) > 0; pending = pending[1:] {
		switch e := pending[0].(type) { //nolint:errorlint // takes the tree apart
		case *oncemill.ConfigError:
			if e.Value == "" || e.Problem == "" {
				t.Errorf("%+v names no value or no problem", e)
			}
			all = append(all, e.Field)
		case interface{ Unwrap() []error }:
			pending = append(pending, e.Unwrap()...)
		case nil:
		default:
			t.Errorf("error %v is not a ConfigError", e)
		}
	}
	return all
}

// idleSink takes no messages.
type idleSink struct{ relay.Sink }

func (idleSink) MaxInFlight() int { return 0 }

func TestNew_NamesEveryBadValueAndSendsNothing(t *testing.T) {
	t.Parallel()
	counting := &countingDriver{}
	db := sql.OpenDB(counting)
	defer db.Close()
	box, err := outbox.New(db, outbox.Config{Database: oncemill.Config{Dialect: oncemill.PostgreSQL}})
	if err != nil {
		t.Fatal(err)
	}
	s := &sink{wire: &wire{}}
	for field, configs := range map[string][]relay.Config{
		"Lease":          {{Lease: -1}, {Lease: time.Millisecond}, {Lease: time.Second - 1}, {Lease: time.Hour + 1}},
		"PublishTimeout": {{PublishTimeout: -1}, {PublishTimeout: time.Millisecond}, {PublishTimeout: time.Hour + 1}},
		"StopTimeout":    {{StopTimeout: -1}, {StopTimeout: time.Microsecond}, {StopTimeout: time.Hour + 1}},
		"Window":         {{Window: -1}, {Window: 1<<16 + 1}},
		"Batch":          {{Batch: -1}, {Batch: 401}},
		"PollMin":        {{PollMin: -1}, {PollMin: time.Microsecond}, {PollMin: time.Minute + 1}},
		"PollMax":        {{PollMax: -1}, {PollMax: time.Millisecond}, {PollMax: time.Hour + 1}, {PollMin: time.Second, PollMax: time.Second - 1}},
	} {
		for _, cfg := range configs {
			r, err := relay.New(box, s, cfg)
			if got := fields(t, err); r != nil || !slices.Equal(got, []string{"relay.Config." + field}) {
				t.Errorf("%+v: fields %v of error %v, want %s", cfg, got, err, field)
			}
		}
	}

	all := relay.Config{Lease: -1, StopTimeout: -1, Window: -1, Batch: -1, PollMin: -1}
	_, err = relay.New(nil, nil, all)
	got := map[string]bool{}
	for _, field := range fields(t, err) {
		got[field] = true
	}
	want := []string{
		"relay.Config.Batch", "relay.Config.Lease", "relay.Config.PollMin", "relay.Config.StopTimeout",
		"relay.Config.Window", "relay.New box", "relay.New sink",
	}
	if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, want) {
		t.Errorf("joined: %v, want %v", names, want)
	}

	if _, err := relay.New(box, idleSink{s}, relay.Config{}); !slices.Equal(fields(t, err), []string{"relay.New sink"}) {
		t.Errorf("a sink that takes nothing: %v", err)
	}

	for _, cfg := range []relay.Config{
		{},
		{Lease: time.Second, PublishTimeout: 10 * time.Millisecond, StopTimeout: time.Millisecond, Window: 1, Batch: 1, PollMin: time.Millisecond, PollMax: time.Millisecond},
		{Lease: time.Hour, PublishTimeout: 20 * time.Minute, StopTimeout: time.Hour, Window: 1 << 16, Batch: 400, PollMin: time.Minute, PollMax: time.Hour},
		{PollMin: time.Minute}, // PollMax follows
	} {
		if _, err := relay.New(box, s, cfg); err != nil {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	if counting.connections > 0 {
		t.Errorf("%d connections to the database", counting.connections)
	}
}
