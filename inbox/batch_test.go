package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
)

// batches is a batch handler that leaves an effect of each message and a note of each
// call. It fails, in its own way, where one of bad is among them.
type batches struct {
	mu    sync.Mutex
	calls [][]string

	bad  []string
	fail func(ctx context.Context) error
}

func (b *batches) handle(ctx context.Context, msgs []*message.Message) error {
	var ids []string
	for _, msg := range msgs {
		ids = append(ids, msg.UUID)
	}
	b.mu.Lock()
	b.calls = append(b.calls, ids)
	b.mu.Unlock()
	tx, err := handlerTx(ctx)
	if err != nil {
		return err
	}
	for _, msg := range msgs {
		// By the context of the message and by that of the batch: it is one transaction.
		if err := addEffect(msg); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `update effects set note = 'batch' where message_id = $1`, msg.UUID); err != nil {
			return err
		}
		if slices.Contains(b.bad, msg.UUID) {
			return b.fail(ctx)
		}
	}
	return nil
}

func (b *batches) taken() [][]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	calls := b.calls
	b.calls = nil
	return calls
}

func TestBatch_HandlesTheNewOnesTogether(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.grouping(t, 20)
		b := new(batches)
		handle := in.Batch(b.handle)
		p.tap.sent()
		expectNoErrors(t, deliverTo(handle, newMessages(t, numbered(20)...)...))
		p.expect(t, 20, 20, 0)
		if calls := b.taken(); len(calls) != 1 || len(calls[0]) != 20 || !slices.IsSorted(calls[0]) {
			t.Errorf("calls: %q", calls)
		}
		if n := p.count(t, `select count(*) from effects where note = 'batch'`); n != 20 {
			t.Errorf("%d effects are noted", n)
		}
		// Of known and new ones, it gets the new ones; of known ones, it is not called.
		letters := strings.Split("abcdefghij", "")
		expectNoErrors(t, deliverTo(handle, newMessages(t, append(numbered(10), letters...)...)...))
		if calls := b.taken(); len(calls) != 1 || !slices.Equal(calls[0], letters) {
			t.Errorf("calls: %q", calls)
		}
		expectNoErrors(t, deliverTo(handle, newMessages(t, numbered(20)...)...))
		if calls := b.taken(); len(calls) != 0 {
			t.Errorf("calls: %q", calls)
		}
		p.expect(t, 30, 30, 0)
	})
}

func expectNoErrors(t *testing.T, errs map[string]error) {
	t.Helper()
	for id, err := range errs {
		if err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
}

// The one that a batch fails for is found in few calls, whatever it does, and the
// others are handled.
func TestBatch_FindsTheBadOne(t *testing.T) {
	ways := map[string]func(ctx context.Context) error{
		"fails":  func(context.Context) error { return errUndo },
		"panics": func(context.Context) error { panic(errUndo) },
		"bad statement": func(ctx context.Context) error {
			tx, _ := handlerTx(ctx)
			_, err := tx.ExecContext(ctx, `insert into nowhere values (1)`)
			return err
		},
		"commits by text": func(ctx context.Context) error {
			tx, _ := handlerTx(ctx)
			_, _ = tx.ExecContext(ctx, `commit`)
			return nil
		},
		"commits unseen": func(ctx context.Context) error {
			tx, _ := handlerTx(ctx)
			_, err := tx.ExecContext(ctx, `select 'innocent'`)
			return err
		},
	}
	for way, fail := range ways {
		t.Run(way, func(t *testing.T) {
			onEachDB(t, func(t *testing.T, p *testDB) {
				in := p.grouping(t, 20)
				p.tap.rewrite(`select 'innocent'`, `commit`)
				ids := numbered(20)
				b := &batches{bad: ids[13:14], fail: fail}
				for id, err := range deliverTo(in.Batch(b.handle), newMessages(t, ids...)...) {
					if (err != nil) != (id == ids[13]) {
						t.Errorf("%s: %v", id, err)
					}
				}
				p.expect(t, 19, 19, 0)
				// All, then two parts each of 20, 10, 5, 3 or 2, 2; then it alone.
				if calls := b.taken(); len(calls) > 1+2*5+1 {
					t.Errorf("%d calls: %q", len(calls), calls)
				}
			})
		})
	}
}

func TestBatch_TriesEachAloneWhereAllFail(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.grouping(t, 20)
		ids := numbered(20)
		b := &batches{bad: ids, fail: func(context.Context) error { return errUndo }}
		for id, err := range deliverTo(in.Batch(b.handle), newMessages(t, ids...)...) {
			if !errors.Is(err, errUndo) {
				t.Errorf("%s: %v", id, err)
			}
		}
		p.expect(t, 0, 0, 0)
		if calls := b.taken(); len(calls) != 1+2+20 {
			t.Errorf("%d calls: %q", len(calls), calls)
		}
	})
}

// What has failed once is tried again without the others, so that it fails them no more.
func TestBatch_TriesAFailedOneAgainAlone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.Group = inbox.Group{Size: 2, Wait: 200e6}
			cfg.Retry = inbox.Retry{Tries: 3, Backoff: 1e6}
		})
		b := &batches{bad: []string{"bad"}, fail: func(context.Context) error { return errUndo }}
		for id, err := range deliverTo(in.Batch(b.handle), newMessages(t, "bad", "good")...) {
			if (err != nil) != (id == "bad") {
				t.Errorf("%s: %v", id, err)
			}
		}
		var got []string
		for _, call := range b.taken() {
			got = append(got, strings.Join(call, "+"))
		}
		// Together; in halves; and alone, three times.
		slices.Sort(got)
		if want := "[bad bad bad bad bad+good good]"; fmt.Sprint(got) != want {
			t.Errorf("calls: got %v, want %v", got, want)
		}
		p.expect(t, 1, 1, 0)
	})
}

func TestBatch_PublishesWithItsEffects(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.grouping(t, 5)
		publisher := p.box.ContextPublisher()
		handle := in.Batch(func(ctx context.Context, msgs []*message.Message) error {
			for _, msg := range msgs {
				if err := addEffect(msg); err != nil {
					return err
				}
				produced := message.NewMessageWithContext(ctx, "of "+msg.UUID, []byte("x"))
				if err := publisher.Publish("results", produced); err != nil {
					return err
				}
				if msg.UUID == "bad" {
					return errUndo
				}
			}
			return nil
		})
		for id, err := range deliverTo(handle, newMessages(t, "a", "b", "bad", "c", "d")...) {
			if (err != nil) != (id == "bad") {
				t.Errorf("%s: %v", id, err)
			}
		}
		p.expect(t, 4, 4, 4)
	})
}

// A message that has to wait for one before it does not keep the others.
func TestBatch_LeavesOutWhatMayNotRunYet(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.Group = inbox.Group{Size: 4, Wait: 1e9}
			cfg.Sequence = func(msg *message.Message) (int64, bool) {
				var n int64
				_, err := fmt.Sscanf(msg.UUID, "%d", &n)
				return n, err == nil
			}
			cfg.Key = func(msg *message.Message) string { return strings.TrimLeft(msg.UUID, "0123456789") }
		})
		b := new(batches)
		handle := in.Batch(b.handle)
		expectNoErrors(t, deliverTo(handle, newMessages(t, "1a", "1b", "3c", "1d")...)) // they begin anywhere
		b.taken()
		for id, err := range deliverTo(handle, newMessages(t, "2a", "3b", "4c", "2d")...) {
			if late := id == "3b"; late != errors.Is(err, inbox.ErrGap) {
				t.Errorf("%s: %v", id, err)
			}
		}
		if calls := b.taken(); len(calls) != 1 || !slices.Equal(calls[0], []string{"2a", "4c", "2d"}) {
			t.Errorf("calls: %q", calls)
		}
	})
}
