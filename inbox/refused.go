package inbox

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/group"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// refusals writes the dead letters of refused messages. Anybody can send any number of them,
// so it writes many in one transaction, and at most Config.KeepRefused a day for each topic
// and reason. Further ones are only counted.
type refusals struct {
	in       *Inbox
	gather   *group.Group[*dlqstore.Letter, written]
	count    atomic.Uint64
	warnings seldom
}

// written is the outcome of writing a dead letter.
type written struct{ err error }

// refusedFor is how long refused messages count towards Config.KeepRefused.
const refusedFor = 24 * time.Hour

func newRefusals(in *Inbox) *refusals {
	r := &refusals{in: in}
	r.gather = group.New(group.Limits{Size: 500, Bytes: 16 << 20, Writers: 1}, r)
	return r
}

func (in *Inbox) refuseLetter(ctx context.Context, w *work, letter *dlqstore.Letter) error {
	detached, cancel := in.detach(ctx)
	defer cancel()
	id := strconv.FormatUint(in.refused.count.Add(1), 10) // no two are the same
	result, done := in.refused.gather.Do(detached, &group.Member[*dlqstore.Letter, written]{Work: letter, ID: id, Bytes: len(letter.Payload), Since: time.Now()})
	err := result.err
	// The context of a group is canceled once the time of all its members is up.
	if ended := detached.Err(); ended != nil && (!done || sqlerr.Canceled(err)) {
		err = ended
	}
	if err != nil {
		delayNack(ctx, in.delay(1))
		return fmt.Errorf("%s: dead letter: %w", letter.Error, err)
	}
	in.telemetry.record(ctx, w, outcomeDeadLetter)
	return nil
}

// Alone writes one dead letter.
func (r *refusals) Alone(ctx context.Context, letter *dlqstore.Letter) (written, group.Result) {
	err := r.write(ctx, []*dlqstore.Letter{letter})
	return written{err}, resultOf(err)
}

// Together writes several, all or none, and again by halves until a dead letter that cannot
// be written is alone. One of 500 costs some 20 transactions; alone in one each, the others
// would wait past their time for a slow disk.
func (r *refusals) Together(ctx context.Context, members []*group.Member[*dlqstore.Letter, written]) ([]*group.Member[*dlqstore.Letter, written], group.Result) {
	letters := make([]*dlqstore.Letter, len(members))
	for i, m := range members {
		letters[i] = m.Work
	}
	err := r.write(ctx, letters)
	result := resultOf(err)
	if result == group.Contended {
		return members, result
	}
	if n := len(members); n > 1 && blamesALetter(ctx, err) {
		again, first := r.Together(ctx, members[:n/2])
		more, second := r.Together(ctx, members[n/2:])
		if first == group.Contended || second == group.Contended {
			result = group.Contended
		}
		return append(again, more...), result
	}
	for _, m := range members {
		m.Finish(written{err})
	}
	return nil, result
}

// blamesALetter reports whether a write may have failed because of one dead letter. Without
// the database each half would fail too.
func blamesALetter(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && !sqlerr.Connection(err) && !noAnswer(err) && !errors.Is(err, ErrCommitUnknown)
}

func resultOf(err error) group.Result {
	switch {
	case err == nil:
		return group.Clean
	case contended(err):
		return group.Contended
	}
	return group.Failed
}

// origin is the topic and reason by which refused messages are counted. There are few, since
// only subscribed topics occur.
type origin struct {
	topic  string
	reason string
}

func (o origin) compare(other origin) int {
	return cmp.Or(cmp.Compare(o.topic, other.topic), cmp.Compare(o.reason, other.reason))
}

func (r *refusals) write(ctx context.Context, letters []*dlqstore.Letter) error {
	in := r.in
	byOrigin := map[origin][]*dlqstore.Letter{}
	for _, l := range letters {
		o := origin{l.Topic, l.Reason}
		byOrigin[o] = append(byOrigin[o], l)
	}
	origins := slices.SortedFunc(maps.Keys(byOrigin), origin.compare) // counts are locked in one order
	tx, err := in.store.Begin(ctx, in.calls)
	if err != nil {
		return err
	}
	defer tx.Rollback() // as in alone
	counts := map[origin]int64{}
	_, err = within(ctx, tx, func(ctx context.Context, tx *sql.Tx) (struct{}, error) {
		if err := in.store.LimitLockWait(ctx, tx); err != nil {
			return struct{}{}, err
		}
		for _, o := range origins {
			of := byOrigin[o]
			counted, err := in.store.CountRefused(ctx, tx, o.topic, o.reason, len(of), refusedFor)
			if err != nil {
				return struct{}{}, fmt.Errorf("count: %w", err)
			}
			counts[o] = counted
			room := int64(in.cfg.KeepRefused) - (counted - int64(len(of)))
			for _, l := range of[:max(0, min(room, int64(len(of))))] {
				if err := in.letters.Add(ctx, tx, l); err != nil {
					return struct{}{}, fmt.Errorf("add: %w", err)
				}
			}
		}
		return struct{}{}, nil
	})
	if err == nil {
		_, err = in.commit(tx)
	}
	if err != nil {
		return err
	}
	r.warnings.do(func(more int) {
		for _, o := range origins {
			of := byOrigin[o]
			in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "messages refused", slog.String("consumer", in.cfg.Consumer),
				slog.String("topic", o.topic), slog.String("reason", o.reason), slog.String("error", of[0].Error),
				slog.Int64("in_a_day", counts[o]), slog.Int("kept_at_most", in.cfg.KeepRefused), slog.Int("more_warnings", more))
		}
	})
	return nil
}

// nameOf returns the id that a refused message claims, if it is a valid one.
func (in *Inbox) nameOf(w *work) string {
	var id string
	if nopanic.Call(func() error { id = in.cfg.ID(w.msg); return nil }) != nil || checkMessageID(id) != nil {
		return ""
	}
	return id
}

// seldom limits warnings that untrusted senders can cause to one a second.
type seldom struct {
	mu   sync.Mutex
	last time.Time
	left int
}

func (s *seldom) do(warn func(more int)) {
	s.mu.Lock()
	if time.Since(s.last) < time.Second {
		s.left++
		s.mu.Unlock()
		return
	}
	more := s.left
	s.last, s.left = time.Now(), 0
	s.mu.Unlock()
	warn(more)
}
