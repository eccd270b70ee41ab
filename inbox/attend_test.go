package inbox

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/group"
	"github.com/oncemill/oncemill/internal/pgmodel"
)

// attending is the work of a group of which nothing but its handlers matters.
type attending func(ctx context.Context, members []*member)

func (a attending) Together(ctx context.Context, members []*member) (again []*member, _ group.Result) {
	a(ctx, members)
	for _, m := range members {
		m.Finish(ended{})
	}
	return nil, group.Clean
}

func (a attending) Alone(context.Context, *work) (ended, group.Result) { return ended{}, group.Failed }

// idleInbox returns an inbox on a database that answers nothing but BEGIN.
func idleInbox(t *testing.T, log *slog.Logger) *Inbox {
	t.Helper()
	db := pgmodel.New(pgmodel.Config{}).DB()
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	in, err := New(db, Config{Consumer: "stock", Database: oncemill.Config{Dialect: oncemill.PostgreSQL}, Logger: log, MeterProvider: noop.NewMeterProvider()})
	if err != nil {
		t.Fatal(err)
	}
	in.pauses = nil
	in.reset(func(d time.Duration) time.Duration { return d })
	return in
}

// A statement that has no answer ends a second after the time of its handler, which then returns its
// error: nobody is to find before that the handler has not returned, and run it again beside itself.
func TestGroup_AStatementWithoutAnAnswerEndsBeforeItsHandlerIsGivenUp(t *testing.T) {
	t.Parallel()
	const limit = time.Minute
	for name, c := range map[string]struct {
		returns bool
		want    error
		after   time.Duration
	}{
		"the statement ends":          {true, bounded.ErrAbandoned, limit + 1500*time.Millisecond},
		"the handler does not return": {false, errNotReturned, limit + 2*time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				in := idleInbox(t, slog.New(slog.DiscardHandler))
				silence := make(chan struct{})
				defer func() {
					close(silence)
					time.Sleep(time.Second) // until the handler has returned
				}()
				var tx *boundtx.Tx
				s := newShared(in, func(ctx context.Context, _ []*message.Message) error {
					_, err := boundtx.Wait(ctx, tx, func() (int, error) { <-silence; return 0, nil })
					time.Sleep(500 * time.Millisecond)
					if !c.returns {
						<-silence
					}
					return err
				})
				attended := attending(func(ctx context.Context, members []*member) {
					ctx, cancel := context.WithTimeout(ctx, limit)
					defer cancel()
					began := time.Now()
					var err error
					if tx, err = boundtx.Begin(ctx, in.db, oncemill.PostgreSQL, in.calls, nil); err != nil {
						t.Fatal(err)
					}
					defer tx.Rollback()
					_, err = s.attend(ctx, tx, members, map[string]bool{"a": true})
					if !errors.Is(err, c.want) || errors.Is(c.want, bounded.ErrAbandoned) == errors.Is(err, errNotReturned) {
						t.Errorf("got %v, want %v", err, c.want)
					}
					if took := time.Since(began); took != c.after {
						t.Errorf("attended for %s, want %s", took, c.after)
					}
				})
				m := &member{ID: "a", Work: &work{id: "a", msg: message.NewMessage("a", nil)}}
				group.New(group.Limits{Size: 2}, attended).Do(t.Context(), m)
			})
		})
	}
}
