package work

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
)

const (
	tellers = 16 // transactions at a time

	// txTimeout bounds a transaction of a producer, but for its commit.
	txTimeout = 10 * time.Second

	// breath is how long a teller waits after a failure, on average. Without it, tellers keep a server
	// that has just become the primary busy with accepting connections.
	breath = 500 * time.Millisecond
)

var errChangedMind = errors.New("the teller rolls back")

func (w *worker) configureProducer(cfg *mill.Config) error {
	cfg.Outbox = &outbox.Config{Retries: 3, CommitTimeout: 3 * time.Second}
	return nil
}

// produce transfers money until ctx ends.
func (w *worker) produce(ctx context.Context, box way) error {
	var group sync.WaitGroup
	defer group.Wait()
	pace := make(chan uint64)
	for range tellers {
		group.Go(func() {
			for seed := range pace {
				r := rand.New(rand.NewPCG(seed, 1))
				if err := w.transact(ctx, box, newTransfer(r, w.Accounts)); err != nil {
					sleep.For(ctx, breath/2+time.Duration(r.Int64N(int64(breath))))
				}
			}
		})
	}
	defer close(pace)
	ticker := time.NewTicker(time.Duration(float64(time.Second) / w.Rate))
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
		select {
		case pace <- w.rand.Uint64():
		case <-ctx.Done():
			return nil
		}
	}
}

// transact runs a transaction, writes down what was intended and what came of it, and returns what
// failed.
func (w *worker) transact(ctx context.Context, box way, t *transferTx) error {
	begin := history.Record{Event: history.EventBegin, Tx: t.id}
	for _, m := range t.messages {
		begin.Messages = append(begin.Messages, history.Message{ID: m.id, Discarded: m.discarded})
	}
	if err := w.history.Add(begin); err != nil {
		w.log.Error("history not written", "error", err)
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), txTimeout)
	defer cancel()
	err := t.run(ctx, box)
	end := history.Record{Event: history.EventEnd, Tx: t.id, Outcome: history.Committed}
	switch {
	case errors.Is(err, outbox.ErrCommitUnknown):
		end.Outcome = history.Unknown
	case err != nil:
		end.Outcome = history.RolledBack
	}
	if err != nil && !errors.Is(err, errChangedMind) {
		end.Error = err.Error()
	}
	if err := w.history.Add(end); err != nil {
		w.log.Error("history not written", "error", err)
	}
	if errors.Is(err, errChangedMind) {
		return nil
	}
	return err
}

// transferTx is one transfer, with everything that chance decides.
type transferTx struct {
	id       string
	from, to int
	amount   int64
	messages []outgoing
	rollback bool
	panics   bool
	dawdle   time.Duration // before the commit
}

// outgoing is a message of a transfer.
type outgoing struct {
	id        string
	topic     string
	mood      string
	keyed     bool
	scheduled bool
	discarded bool // published behind a savepoint that is rolled back
	payload   []byte
	note      string
}

func newTransfer(r *rand.Rand, accounts int) *transferTx {
	t := &transferTx{
		id: watermill.NewUUID(), from: account(r, accounts), amount: 1 + r.Int64N(100),
		rollback: chance(r, 0.05), panics: chance(r, 0.01),
	}
	for t.to = t.from; t.to == t.from; {
		t.to = account(r, accounts)
	}
	if chance(r, 0.01) {
		t.dawdle = time.Duration(r.Int64N(int64(2 * time.Second)))
	}
	for i := range 1 + r.IntN(5) {
		m := outgoing{id: watermill.NewUUID(), topic: TopicAudit, keyed: chance(r, 0.8), payload: payload(r), note: notes[r.IntN(len(notes))]}
		if i == 0 {
			m.topic, m.keyed, m.mood = TopicTransfers, true, mood(r)
		} else {
			m.discarded = chance(r, 0.05)
			m.scheduled = !m.keyed && chance(r, 0.2)
			if m.keyed && t.from >= accounts*9/10 && chance(r, 0.1) { // the other keys never wait for a retry
				m.mood = MoodRefused
			}
		}
		t.messages = append(t.messages, m)
	}
	return t
}

// account draws an account. A few have most of the traffic.
func account(r *rand.Rand, accounts int) int {
	if chance(r, 0.3) {
		return r.IntN(3)
	}
	return r.IntN(accounts)
}

func chance(r *rand.Rand, p float64) bool { return r.Float64() < p }

// notes are metadata that is easily damaged.
var notes = []string{"", "plain", "ümläut and 漢字", `"quoted" \ back`, "trailing ", "a=b&c=d;e", "0", "null"}

// payload draws binary content: mostly small, sometimes empty, rarely up to 1 MiB.
func payload(r *rand.Rand) []byte {
	size := r.IntN(1024)
	switch p := r.Float64(); {
	case p < 0.02:
		size = 0
	case p < 0.025:
		size = 64<<10 + r.IntN(64<<10)
	case p < 0.0255:
		size = 1<<20 - r.IntN(1024)
	}
	content := make([]byte, size)
	for i := range content {
		content[i] = byte(r.Uint32())
	}
	return content
}

func (t *transferTx) run(ctx context.Context, box way) (err error) {
	defer func() {
		if p := recover(); p != nil {
			if p != errChangedMind { //nolint:errorlint // this very value
				panic(p)
			}
			err = errChangedMind
		}
	}()
	return box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error { return t.body(ctx, box, tx) })
}

func (t *transferTx) body(ctx context.Context, box way, tx oncemill.Tx) error {
	var last numbers
	if err := tx.QueryRowContext(ctx, lockAccounts, t.from, t.to).Scan(&last.account, &last.audit); err != nil {
		return err
	}
	audits := 0
	for _, m := range t.messages {
		if m.topic == TopicAudit && m.keyed && !m.discarded {
			audits++
		}
	}
	if _, err := tx.ExecContext(ctx, transfer, t.from, t.to, t.amount, audits); err != nil {
		return err
	}
	var sent []sentRow
	for _, m := range t.messages {
		row, err := t.publish(ctx, box, tx, m, &last)
		if err != nil {
			return err
		}
		if !m.discarded {
			sent = append(sent, row)
		}
	}
	if err := recordSent(ctx, tx, t.id, sent...); err != nil {
		return err
	}
	if t.dawdle > 0 && !sleep.For(ctx, t.dawdle) {
		return ctx.Err()
	}
	switch {
	case t.panics:
		panic(errChangedMind)
	case t.rollback:
		return errChangedMind
	}
	return nil
}

// numbers are the last numbers of the two keys of an account.
type numbers struct{ account, audit int64 }

// publish publishes a message and returns what is to be written down of it.
func (t *transferTx) publish(ctx context.Context, box way, tx oncemill.Tx, m outgoing, last *numbers) (row sentRow, err error) {
	if m.discarded {
		if _, err := tx.ExecContext(ctx, "savepoint maybe"); err != nil {
			return row, err
		}
		if err := box.Publish(ctx, tx, m.topic, message.NewMessage(m.id, m.payload)); err != nil {
			return row, err
		}
		_, err := tx.ExecContext(ctx, "rollback to savepoint maybe")
		return row, err
	}
	msg := message.NewMessage(m.id, m.payload)
	row = sentRow{MessageID: m.id, Topic: m.topic, Scheduled: m.scheduled, Mood: m.mood}
	switch {
	case m.topic == TopicTransfers:
		last.account++
		row.Key, row.Seq = "account-"+strconv.Itoa(t.from), last.account
	case m.keyed:
		last.audit++
		row.Key, row.Seq = "audit-"+strconv.Itoa(t.from), last.audit
	}
	msg.Metadata = message.Metadata{
		metaSeq: strconv.FormatInt(row.Seq, 10), metaMood: m.mood, "note": m.note,
		metaFrom: strconv.Itoa(t.from), metaTo: strconv.Itoa(t.to), metaAmount: strconv.FormatInt(t.amount, 10),
	}
	sum := history.SumOf(msg.Payload, msg.Metadata)
	row.Payload, row.Metadata = sum.Payload, sum.Metadata
	outbox.SetKey(msg, row.Key)
	if m.scheduled {
		outbox.SetDeliverAfter(msg, time.Second)
	}
	if err := box.Publish(ctx, tx, m.topic, msg); err != nil {
		return row, fmt.Errorf("publish: %w", err)
	}
	return row, nil
}
