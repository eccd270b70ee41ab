package main

import (
	"context"
	"errors"
	"strings"

	"github.com/oncemill/oncemill/crucible/work"
	"github.com/oncemill/oncemill/steer"
)

// pauses are what an operator stops for a while.
func (h *hurt) pauses() []fault {
	return []fault{
		{alone("audit", kind("paused-topic", []string{"topic audit"}, short, long)), h.pause},
		{kind("paused-consumer", []string{"consumer " + work.RoleReceipts}, short, long), h.pause},
	}
}

// pause pauses a target and resumes it. Other faults may be in the way, so it insists.
func (h *hurt) pause(ctx context.Context, target string) (heal, error) {
	kind, name, _ := strings.Cut(target, " ")
	t := steer.Target{Kind: steer.Kind(kind), Name: name}
	act := steer.Act{By: "nemesis", Reason: "to see what stands still"}
	control, err := steer.New(h.site.db, steer.Config{Database: work.Database})
	if err != nil {
		return nil, err
	}
	err = insist(ctx, func(ctx context.Context) error {
		var paused *steer.PausedError // the answer to the last try was lost
		if err := control.Pause(ctx, t, act); !errors.As(err, &paused) {
			return err
		}
		return nil
	})
	return func(ctx context.Context) error {
		var not *steer.NotPausedError
		if err := control.Resume(ctx, t, act); !errors.As(err, &not) {
			return err
		}
		return nil
	}, err
}
