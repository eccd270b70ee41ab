package rabbitmq

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/oncemill/oncemill/relay"
)

// What comes of a pipeline after an outage has cost the lane what it had of it would
// overtake what is to be sent again: it fails too, but what comes again does not, nor
// does what is no pipeline.
func TestLane_FailsWhatComesOfATermAfterAnOutage(t *testing.T) {
	outage := relay.Unavailable(errors.New("connection lost"))
	for name, lose := range map[string]func(*lane){
		"pending": func(l *lane) { l.failPending(0, outage) },
		"topic":   func(l *lane) { l.failTopic("orders", outage) },
		"in flight": func(l *lane) {
			c := &channel{}
			for _, it := range l.pending.all() {
				c.waiting++
				c.flight.push(&entry{message: it.message, batch: it.batch, term: it.batch.term})
			}
			l.pending.cut(0)
			l.abandon(c, c.flight.all(), outage)
		},
		"pending, with an older one in flight": func(l *lane) {
			c := &channel{}
			c.flight.push(&entry{term: 6}) // it has its outcome
			l.failPending(0, outage)
			l.abandon(c, c.flight.all(), outage)
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLane(&running{settings: &settings{Config: Config{Window: 10}}}, 0)
			var failed []string
			hand := func(id string, term uint64) {
				l.inbox.put(newBatch(t.Context(), []*relay.Message{{MessageID: id, Topic: "orders", Term: term}}, func(m *relay.Message, err error) {
					if errors.Is(err, outage) {
						failed = append(failed, m.MessageID)
					}
				}))
				l.receive()
			}
			hand("early", 7)
			lose(l)
			hand("late", 7)
			hand("again", 8)
			hand("alone", 0)
			if len(failed) != 2 || failed[0] != "early" || failed[1] != "late" {
				t.Errorf("failed: %v", failed)
			}
			if n := l.pending.len(); n != 2 {
				t.Errorf("%d are to be sent, want 2", n)
			}
		})
	}
}

// What is pending behind a message whose time has ended fails with it, and what comes of
// its term: sent now, it would overtake that message. What is in front of it may go.
func TestLane_FailsWhatIsBehindAMessageWhoseTimeHasEnded(t *testing.T) {
	l := newLane(&running{settings: &settings{Config: Config{Window: 10}}}, 0)
	var failed []string
	hand := func(ctx context.Context, id string) {
		l.inbox.put(newBatch(ctx, []*relay.Message{{MessageID: id, Topic: "orders", Term: 7}}, func(m *relay.Message, _ error) {
			failed = append(failed, m.MessageID)
		}))
		l.receive()
	}
	ctx, end := context.WithCancel(t.Context())
	hand(t.Context(), "in front")
	hand(ctx, "ended")
	hand(t.Context(), "behind")
	end()
	l.expirePending(unavailableUnanswered)
	hand(t.Context(), "late")
	if want := []string{"ended", "behind", "late"}; !slices.Equal(failed, want) {
		t.Errorf("failed: %q, want %q", failed, want)
	}
	if n := l.pending.len(); n != 1 {
		t.Errorf("%d are to be sent, want the one in front", n)
	}
}
