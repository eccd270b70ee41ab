package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/sleep"
)

const (
	healthStall = 90 * time.Second // without a change, until nodes count as lost
	healthLook  = 200 * time.Millisecond
)

var errUnchanged = fmt.Errorf("nothing has changed for %s", healthStall)

// untilWell waits until the nodes of a cluster are well. look describes them.
func untilWell(ctx context.Context, nodes string, look func() (state string, well bool, err error)) error {
	last := ""
	for changed := time.Now(); ; {
		state, well, err := look()
		switch {
		case well:
			return nil
		case state != last:
			last, changed = state, time.Now()
		case time.Since(changed) > healthStall:
			return fmt.Errorf("%s's nodes are not well: %s: %w", nodes, state, errors.Join(errUnchanged, err))
		}
		if !sleep.For(ctx, healthLook) {
			return fmt.Errorf("%s's nodes are not well: %s: %w", nodes, state, errors.Join(ctx.Err(), err))
		}
	}
}
