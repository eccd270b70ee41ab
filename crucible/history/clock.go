package history

import (
	"context"
	"time"
)

const (
	tick = 100 * time.Millisecond

	// late is how late a tick may be before the process counts as starved.
	late = 400 * time.Millisecond
)

// WatchClock writes down, until ctx ends, each time in which the process did not get to run: the
// machine is busy with something else, or the process was frozen. target says who suffers.
func (w *Writer) WatchClock(ctx context.Context, target string) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
		now := time.Now()
		if now.Sub(last) > tick+late {
			err := w.Add(Record{At: now, Event: EventSlow, Fault: &Fault{Kind: "starved", Target: target, Since: last}})
			if err != nil {
				return err
			}
		}
		last = now
	}
}
