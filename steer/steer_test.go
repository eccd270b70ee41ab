package steer_test

import (
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/steer"
)

func newControl(t *testing.T) *steer.Control {
	t.Helper()
	return controlOn(t, testserver.SQLite(t))
}

func controlOn(t *testing.T, db *sql.DB) *steer.Control {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, audit.Migrations, steer.Migrations); err != nil {
		t.Fatal(err)
	}
	c, err := steer.New(db, steer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

var (
	orders = steer.Target{Kind: steer.Topic, Name: "orders"}
	act    = steer.Act{By: "ada", Reason: "their queue is full"}
)

func TestControl_ASecondPauseNamesWhoWasFirstAndASecondResumeIsAnError(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	if err := c.Pause(t.Context(), orders, act); err != nil {
		t.Fatal(err)
	}
	var paused *steer.PausedError
	err := c.Pause(t.Context(), orders, steer.Act{By: "bob", Reason: "mine"})
	if !errors.As(err, &paused) || paused.By != "ada" || time.Since(paused.Since).Abs() > time.Hour || !strings.Contains(err.Error(), "paused already, by") {
		t.Errorf("%v", err)
	}
	if list, err := c.List(t.Context()); err != nil || len(list) != 1 || list[0].Target() != orders || list[0].Reason != act.Reason {
		t.Errorf("%+v, %v", list, err)
	}
	if err := c.Resume(t.Context(), orders, steer.Act{By: "bob"}); err != nil {
		t.Error(err)
	}
	var not *steer.NotPausedError
	if err := c.Resume(t.Context(), orders, act); !errors.As(err, &not) || not.Target != orders {
		t.Errorf("%v", err)
	}
}

func TestControl_RefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	for _, target := range []steer.Target{
		{},
		{Kind: steer.Topic},
		{Kind: "queue", Name: "x"},
		{Kind: steer.Lane, Name: "32"},
		{Kind: steer.Lane, Name: "-1"},
		{Kind: steer.Lane, Name: "x"},
		{Kind: steer.Key, Name: "a\x00b"},
		{Kind: steer.Topic, Name: "a\xff"},
		{Kind: steer.Sink, Name: strings.Repeat("x", 256)},
	} {
		var bad *steer.TargetError
		for _, err := range []error{c.Pause(t.Context(), target, act), c.Resume(t.Context(), target, act)} {
			if !errors.As(err, &bad) || len(err.Error()) > 400 || strings.Contains(err.Error(), "\x00") || !utf8.ValidString(err.Error()) {
				t.Errorf("%q: %v", target.Name, err)
			}
		}
	}
	for _, err := range []error{
		c.Pause(t.Context(), orders, steer.Act{Reason: "x"}), c.Resume(t.Context(), orders, steer.Act{By: " "}),
		c.ReleaseLane(t.Context(), 1, steer.Act{Reason: "x"}), c.Retry(t.Context(), steer.Selection{All: true}, steer.Act{}),
	} {
		if !errors.Is(err, steer.ErrNoActor) {
			t.Error(err)
		}
	}
	if err := errors.Join(c.Pause(t.Context(), orders, steer.Act{By: "ada"})); !errors.Is(err, steer.ErrNoReason) {
		t.Error(err)
	}
	var bad *oncemill.ConfigError
	for _, what := range []steer.Selection{{}, {Topic: "a", All: true}} {
		if err := c.Retry(t.Context(), what, act); !errors.As(err, &bad) {
			t.Errorf("%+v: %v", what, err)
		}
	}
	if list, err := c.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := steer.New(nil, steer.Config{}); !errors.As(err, &bad) {
		t.Error(err)
	}
}

// The audit names all that an act selects.
func TestControl_TheAuditNamesTopicAndKey(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	c := controlOn(t, db)
	if err := c.Retry(t.Context(), steer.Selection{Topic: "orders", Key: "k"}, act); err != nil {
		t.Fatal(err)
	}
	var subject, details string
	if err := db.QueryRowContext(t.Context(), `select subject, details from oncemill_audit`).Scan(&subject, &details); err != nil {
		t.Fatal(err)
	}
	if subject != "key k" || details != "topic orders" {
		t.Errorf("%q, %q", subject, details)
	}
}

// A lane has one name, however its number is written.
func TestControl_ALaneHasOneName(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	if err := c.Pause(t.Context(), steer.Target{Kind: steer.Lane, Name: "07"}, act); err != nil {
		t.Fatal(err)
	}
	if err := c.Resume(t.Context(), steer.Target{Kind: steer.Lane, Name: "7"}, act); err != nil {
		t.Error(err)
	}
}
