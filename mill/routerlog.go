package mill

import (
	"fmt"
	"log/slog"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/oncemill/oncemill/internal/repeats"
	"github.com/oncemill/oncemill/internal/text"
)

// routerLog is the log of a consumer's router. Its errors of handlers repeat in an outage:
// the first is a warning, then one at growing intervals; all are there at level debug.
type routerLog struct {
	watermill.LoggerAdapter
	log      *slog.Logger
	failures *repeats.Series
}

func newRouterLog(log *slog.Logger) routerLog {
	level := map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelDebug}
	return routerLog{watermill.NewSlogLoggerWithLevelMapping(log, level), log, &repeats.Series{}}
}

// Error is called by the router. The text is Watermill's.
func (l routerLog) Error(event string, err error, fields watermill.LogFields) {
	if event != "Handler returned error" {
		l.LoggerAdapter.Error(event, err, fields)
		return
	}
	topic, ok := fields["subscribe_topic"]
	level, attrs := l.failures.Event(slog.LevelWarn, fmt.Sprint(topic, " ", err))
	attrs = append(attrs, "error", err)
	if id, ok := fields["message_uuid"]; ok {
		attrs = append(attrs, "message_id", shown(fmt.Sprint(id)))
	}
	if ok {
		attrs = append(attrs, "topic", topic)
	}
	if level == slog.LevelDebug {
		l.log.Debug("handler failed", attrs...)
		return
	}
	l.log.Warn("handler failed", attrs...)
}

// shown returns an id that anybody may have chosen.
func shown(id string) string {
	const longest = 255
	if len(id) > longest {
		return text.Shorten(id)
	}
	return id
}

// With keeps the limit.
func (l routerLog) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return routerLog{l.LoggerAdapter.With(fields), l.log, l.failures}
}
