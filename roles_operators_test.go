package oncemill_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/status"
	"github.com/oncemill/oncemill/steer"
)

func TestRoles_AnObserverSeesHowMuchWaits(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	err := s.shelf.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		return s.shelf.Publish(ctx, tx, "orders", message.NewMessage("order-1", []byte("private")))
	})
	if err != nil {
		t.Fatal(err)
	}
	look := func(db *sql.DB) (*status.Status, error) {
		reader, err := status.New(db, status.Config{})
		if err != nil {
			return nil, err
		}
		return reader.Read(t.Context())
	}
	seen, err := look(s.observer)
	if err != nil || len(seen.Forbidden) > 0 || seen.Outbox.Depth.N != 1 || seen.Relay == nil || seen.DeadLetters == nil || seen.Keys == nil {
		t.Errorf("an observer sees %+v, %v", seen, err)
	}
	for _, text := range []string{`select payload from oncemill.outbox`, `select payload from oncemill.dead_letters`, `delete from oncemill.outbox`} {
		if _, err := s.observer.ExecContext(t.Context(), text); sqlerr.State(err) != "42501" {
			t.Errorf("%s: %v", text, err)
		}
	}
	seen, err = look(s.producer)
	if want := []string{"outbox", "relay", "dead letters", "idempotency keys", "pauses"}; err != nil || !slices.Equal(seen.Forbidden, want) {
		t.Errorf("a producer may not read %v, want %v, %v", seen.Forbidden, want, err)
	}
}

// pauseAsOperator pauses and resumes a consumer, which may see that and no more.
func (s *shop) pauseAsOperator(t *testing.T, by dlq.Act) {
	t.Helper()
	control, err := steer.New(s.operator, steer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	target, act := steer.Target{Kind: steer.Consumer, Name: "stock"}, steer.Act{By: by.By, Reason: "a test"}
	if err := control.Pause(t.Context(), target, act); err != nil {
		t.Fatal(err)
	}
	for role, db := range map[string]*sql.DB{"operator": s.operator, "consumer": s.stock, "observer": s.observer} {
		reader, err := steer.New(db, steer.Config{})
		if err != nil {
			t.Fatal(err)
		}
		if list, err := reader.List(t.Context()); err != nil || len(list) != 1 || list[0].By != by.By {
			t.Errorf("the %s sees %+v, %v", role, list, err)
		}
	}
	consumer, err := steer.New(s.stock, steer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := consumer.Resume(t.Context(), target, act); sqlerr.State(err) != "42501" {
		t.Errorf("a consumer resumes itself: %v", err)
	}
	if err := errors.Join(control.Resume(t.Context(), target, act), control.Retry(t.Context(), steer.Selection{Key: "k"}, act)); err != nil {
		t.Error(err)
	}
}
