package relay

import (
	"context"
	"log/slog"

	"github.com/oncemill/oncemill/internal/repeats"
)

// failing holds what fails again and again in an outage, so that an outage is a dozen lines.
type failing struct {
	heartbeats, reads, removes, tasks, upkeep, moves, gauges, archive, jobs, pauses, commands repeats.Series

	letters repeats.Series // dead letters
	topics  topicLog
}

// failed counts a failure of a call of the database, and returns the level and further
// attributes of its line. While heartbeats fail too, their lines stand for all.
func (w *worker) failed(s *repeats.Series, at slog.Level, err error) (slog.Level, []any) {
	if w.failing.heartbeats.Failing() {
		at = slog.LevelDebug
	}
	return s.Failed(at, err.Error())
}

// topicLog logs which topics are unavailable. Thousands may be at once (reply.<id>), so it
// names a few, and counts the rest. It belongs to the loop.
type topicLog struct {
	named map[string]*repeats.Series
	rest  repeats.Series
}

const mostNamed = 8

// of returns the series of a topic, nil if it is one of the rest.
func (l *topicLog) of(topic string) *repeats.Series {
	if s := l.named[topic]; s != nil {
		return s
	}
	if len(l.named) >= mostNamed {
		for name, s := range l.named {
			if s.Calm() { // or a topic that fails now and then would be news each time
				delete(l.named, name)
				break
			}
		}
	}
	if len(l.named) >= mostNamed {
		return nil
	}
	if l.named == nil {
		l.named = map[string]*repeats.Series{}
	}
	s := &repeats.Series{}
	l.named[topic] = s
	return s
}

// changed logs that a topic became unavailable or, with a nil cause, available again.
func (l *topicLog) changed(ctx context.Context, log *slog.Logger, topic string, cause error) {
	if cause == nil {
		if s := l.named[topic]; s != nil {
			if attrs, report := s.Over(); report {
				log.InfoContext(ctx, "topic available again", append(attrs, "topic", topic)...)
				return
			}
		}
		log.DebugContext(ctx, "topic available again", "topic", topic)
		return
	}
	if s := l.of(topic); s != nil {
		level, attrs := s.Failed(slog.LevelWarn, cause.Error())
		log.Log(ctx, level, "topic unavailable; its messages wait", append(attrs, "topic", topic, "error", cause)...)
		return
	}
	level, attrs := l.rest.Event(slog.LevelWarn, cause.Error())
	log.Log(ctx, level, "more topics unavailable; their messages wait", append(attrs, "topic", topic, "error", cause)...)
}
