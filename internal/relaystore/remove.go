package relaystore

import (
	"context"
	"fmt"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

// removeWith removes rows by remove: into the history, or else, if that cannot be
// written, without it. The history must never stop delivery.
func removeWith(ctx context.Context, history bool, remove func(history bool) (ended []Key, removed int, err error)) (Removal, error) {
	var broken error
	if history {
		ended, _, err := remove(true)
		switch {
		case err == nil:
			return Removal{Ended: ended}, nil
		case ctx.Err() != nil, sqlerr.Connection(err), sqlerr.Retryable(err), sqlerr.Full(err):
			return Removal{}, fmt.Errorf("move retried messages into the history: %w", err)
		}
		broken = err
	}
	ended, removed, err := remove(false)
	if err != nil {
		return Removal{}, fmt.Errorf("remove retried messages: %w", err)
	}
	if broken == nil || removed == 0 {
		return Removal{Ended: ended}, nil
	}
	return Removal{Ended: ended, Missed: removed, Broken: broken}, nil
}
