package inbox_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// The sequence waits for a message that has failed and comes again, and drops none that
// is being tried.
func TestSequence_WaitsForWhatIsRetried(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.GapWait = 100 * time.Millisecond
			cfg.Retry = inbox.Retry{Tries: 1, Deliveries: 5, Delay: 10 * time.Second}
			cfg.Sequence = func(m *message.Message) (int64, bool) {
				n, err := strconv.ParseInt(m.UUID, 10, 64)
				return n, err == nil
			}
		})
		msg := func(id string) *message.Message {
			m := from(t, id, delivery{})
			m.Metadata.Set(outbox.KeyMetadata, "k")
			return m
		}
		failing := func(*message.Message) ([]*message.Message, error) { return nil, errUndo }
		expectNoError(t, deliverMessage(t, in, msg("1"), effect))
		expectError(t, deliverMessage(t, in, msg("2"), failing), errUndo)
		for range 3 {
			expectError(t, deliverMessage(t, in, msg("3"), effect), inbox.ErrGap)
			testserver.Pause(t.Context(), 150*time.Millisecond) // longer than GapWait
		}
		expectError(t, deliverMessage(t, in, msg("2"), failing), errUndo)
		expectError(t, deliverMessage(t, in, msg("3"), effect), inbox.ErrGap)
		expectNoError(t, deliverMessage(t, in, msg("2"), effect))
		expectNoError(t, deliverMessage(t, in, msg("3"), effect))
		p.expect(t, 3, 3, 0)
		// One that has not come is not waited for, and one that fails meanwhile is kept.
		expectError(t, deliverMessage(t, in, msg("5"), effect), inbox.ErrGap)
		testserver.Pause(t.Context(), 150*time.Millisecond)
		in2, _ := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.Sequence = func(*message.Message) (int64, bool) { return 4, true }
			cfg.Classify = func(err error) error { // after the attempt
				expectNoError(t, deliverMessage(t, in, msg("5"), effect)) // it has waited for long enough
				return err
			}
		})
		runs := 0
		expectNoError(t, deliverMessage(t, in2, msg("4"), func(*message.Message) ([]*message.Message, error) {
			runs++
			return nil, errUndo
		}))
		if letter := dead.last(); runs != 1 || !strings.Contains(letter.Error, inbox.ErrOvertaken.Error()) || len(dead.all()) != 1 {
			t.Errorf("%d runs, letter %+v", runs, letter)
		}
	})
}

// What its handler needs is unavailable, maybe to all: it comes again, and nothing of its
// key overtakes it.
func TestSequence_WaitsForWhatFindsNothingThere(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		process := func() *inbox.Inbox {
			in, _ := p.withDeadLetters(t, func(cfg *inbox.Config) {
				cfg.GapWait = 100 * time.Millisecond
				cfg.Retry = inbox.Retry{Tries: 1, Deliveries: 5, Delay: 10 * time.Second}
				cfg.Sequence = func(m *message.Message) (int64, bool) {
					n, err := strconv.ParseInt(m.UUID, 10, 64)
					return n, err == nil
				}
			})
			return in
		}
		msg := func(id string) *message.Message {
			m := from(t, id, delivery{})
			m.Metadata.Set(outbox.KeyMetadata, "k")
			return m
		}
		lacking := func(*message.Message) ([]*message.Message, error) { return nil, inbox.Unavailable(errUndo) }
		expectNoError(t, deliverMessage(t, process(), msg("1"), effect))
		in := process() // has handled nothing yet
		expectError(t, deliverMessage(t, in, msg("2"), lacking), errUndo)
		for range 3 {
			expectError(t, deliverMessage(t, in, msg("3"), effect), inbox.ErrGap)
			testserver.Pause(t.Context(), 150*time.Millisecond) // longer than GapWait
		}
		expectNoError(t, deliverMessage(t, in, msg("2"), effect))
		expectNoError(t, deliverMessage(t, in, msg("3"), effect))
		p.expect(t, 3, 3, 0)
	})
}

// Those behind one that does not come go on in their order when they have waited for it
// for long enough.
func TestSequence_GoesOnInOrder(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.GapWait = 2 * time.Second
			cfg.Sequence = func(m *message.Message) (int64, bool) {
				n, err := strconv.ParseInt(m.UUID, 10, 64)
				return n, err == nil
			}
		})
		deliver := func(id int, nacks int) error {
			m := from(t, strconv.Itoa(id), delivery{nacks: nacks})
			m.Metadata.Set(outbox.KeyMetadata, "k")
			return deliverMessage(t, in, m, effect)
		}
		expectNoError(t, deliver(1, 0))
		const last = 10 // 2 does not come
		for n := 3; n <= last; n++ {
			expectError(t, deliver(n, 0), inbox.ErrGap)
		}
		for n := 3; n <= last; {
			for behind := last; behind > n; behind-- {
				expectError(t, deliver(behind, 1), inbox.ErrGap)
			}
			if err := deliver(n, 1); err == nil {
				n++
			} else {
				expectError(t, err, inbox.ErrGap)
				testserver.Pause(t.Context(), 50*time.Millisecond)
			}
		}
		if len(dead.all()) > 0 {
			t.Errorf("letter %+v", dead.last())
		}
		p.expect(t, last-1, last-1, 0)
	})
}

// A key that no database takes makes a letter, at the first delivery; and what was tried
// before, by whichever process, and is overtaken meanwhile is not dropped without a word.
func TestSequence_DropsNothingThatWasTried(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.Sequence = func(m *message.Message) (int64, bool) {
				n, err := strconv.ParseInt(m.UUID, 10, 64)
				return n, err == nil
			}
		})
		msg := func(id, key string, d delivery) *message.Message {
			m := from(t, id, d)
			m.Metadata.Set(outbox.KeyMetadata, key)
			return m
		}
		for i, key := range []string{"\xff", "\x00", strings.Repeat("k", 3000)} {
			expectNoError(t, deliverMessage(t, in, msg(strconv.Itoa(i+1), key, delivery{}), effect))
			if letter := dead.last(); len(dead.all()) != i+1 || letter.Reason != string(inbox.ReasonPermanent) {
				t.Errorf("%d letters, the last %+v", len(dead.all()), letter)
			}
		}
		expectNoError(t, deliverMessage(t, in, msg("15", "k", delivery{}), effect))
		expectNoError(t, deliverMessage(t, in, msg("14", "k", delivery{redelivered: true}), effect))
		if letter := dead.last(); len(dead.all()) != 4 || !strings.Contains(letter.Error, inbox.ErrOvertaken.Error()) {
			t.Errorf("%d letters, the last %+v", len(dead.all()), letter)
		}
	})
}

// A message that has waited for one that does not come, and then fails, fails like any other: it becomes a dead letter,
// and its key goes on.
func TestSequence_AFailureBehindAGapIsCounted(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.GapWait = 100 * time.Millisecond
			cfg.Retry = inbox.Retry{Tries: 3, Deliveries: 2, Backoff: time.Millisecond, Delay: time.Millisecond}
			cfg.Sequence = func(m *message.Message) (int64, bool) {
				n, err := strconv.ParseInt(m.UUID, 10, 64)
				return n, err == nil
			}
		})
		msg := func(id string) *message.Message {
			m := from(t, id, delivery{})
			m.Metadata.Set(outbox.KeyMetadata, "k")
			return m
		}
		runs := 0
		failing := func(*message.Message) ([]*message.Message, error) { runs++; return nil, errUndo }
		expectNoError(t, deliverMessage(t, in, msg("1"), effect))
		deliveries := 0
		for ; len(dead.all()) == 0 && deliveries < 20; deliveries++ {
			_ = deliverMessage(t, in, msg("3"), failing)
			testserver.Pause(t.Context(), 150*time.Millisecond) // longer than GapWait
		}
		if len(dead.all()) != 1 || runs != 6 {
			t.Fatalf("%d letters after %d deliveries and %d runs", len(dead.all()), deliveries, runs)
		}
		eventually(t, "the key goes on", func() bool { return deliverMessage(t, in, msg("4"), effect) == nil })
	})
}
