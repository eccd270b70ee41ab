package relay

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// taskRunner runs the tasks that the loop requests.
func (w *worker) taskRunner(ctx context.Context) error {
	retry := newBackOff()
	large := pieces{read: func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
		return ask(ctx, w, opTask, func(ctx context.Context) ([]byte, error) { return w.store.ReadPiece(ctx, of, offset, most) })
	}}
	type work struct {
		found   func()
		lacking []*outboxstore.Row
		space   *space
	}
	for {
		var c *task
		select {
		case <-ctx.Done():
			return nil
		case c = <-w.tasks:
		}
		var answer taskAnswer
		did, err := ask(ctx, w, opTask, func(ctx context.Context) (did work, err error) {
			did.found, err = c.do(taskContext{
				Context: ctx, store: w.store, clock: time.Now,
				bring: func(rows []*outboxstore.Row, s *space) { did.lacking, did.space = rows, s },
				moveOrDelete: func(remove func(ctx context.Context, move bool) (int, error)) error {
					missed, err := w.queue.MoveOrDelete(ctx, remove)
					if missed > 0 {
						w.met.missed.Add(ctx, int64(missed))
					}
					return err
				},
			})
			return did, err
		})
		answer.found, answer.err = did.found, err
		if err == nil {
			large.complete(ctx, w, did.lacking, did.space)
		}
		switch {
		case answer.err == nil:
			retry.Reset()
			if attrs, report := w.failing.tasks.Over(); report {
				w.log.InfoContext(ctx, "retrying messages and dead letters are read and written again", attrs...)
			}
			w.reportFailures(ctx, c.failures)
		case errors.Is(answer.err, relaystore.ErrFenced):
			w.log.WarnContext(ctx, "lane taken by another worker; nothing was written", "lane", c.lane.number)
		case ctx.Err() == nil:
			answer.retryIn, answer.kind = retry.NextBackOff(), taskErrorOf(answer.err)
			w.doubt(answer.err)
			level, attrs := w.failed(&w.failing.tasks, slog.LevelWarn, answer.err)
			w.log.Log(ctx, level, "reading or writing retrying messages or dead letters failed; trying again", append(attrs, "error", answer.err)...)
		}
		w.taskAnswers <- answer // has room: one task at a time
	}
}

func taskErrorOf(err error) taskError {
	switch {
	case sqlerr.Retryable(err):
		return taskCollided
	case unanswered(err):
		return taskLost
	}
	return taskImpossible
}

// reportFailures logs and counts failures that have been recorded.
func (w *worker) reportFailures(ctx context.Context, failures []relaystore.Failure) {
	for _, f := range failures {
		if f.Uncharged {
			w.met.setAside.Add(ctx, 1)
			continue
		}
		attrs := []any{"topic", f.Topic, "key", f.Key, "lane", f.Lane, "id", f.ID, "message_id", f.MessageID, "attempt", f.Attempt, "reason", f.Class, "error", f.Text}
		if f.Stack != "" {
			attrs = append(attrs, "stack", f.Stack)
		}
		switch f.Fate {
		case relaystore.FateRetry:
			w.met.retries.Add(ctx, 1)
			w.happened.retries.Add(1)
			w.log.DebugContext(ctx, "message refused; retrying later", append(attrs, "retry_in", f.RetryIn)...)
		case relaystore.FateDeadLetter:
			w.met.dead.Add(ctx, 1)
			w.happened.dead.Add(1)
			level, more := w.failing.letters.Event(slog.LevelError, f.Class+" "+f.Topic)
			w.log.Log(ctx, level, "message dead-lettered", append(attrs, more...)...)
		case relaystore.FateHoldKey:
			w.met.dead.Add(ctx, 1)
			w.happened.dead.Add(1)
			level, more := w.failing.letters.Event(slog.LevelError, f.Class+" "+f.Topic)
			w.log.Log(ctx, level, "message dead-lettered; its key is held", append(attrs, more...)...)
		}
	}
}
