package main

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/oncemill/oncemill/crucible/work"
	"github.com/oncemill/oncemill/dlq"
)

// operator looks after the dead letters: most are healed and replayed, some discarded, some left.
type operator struct {
	site *site
	rand *rand.Rand
	left map[int64]bool
}

// run acts until ctx ends.
func (o *operator) run(ctx context.Context) error {
	letters, err := dlq.New(o.site.db, dlq.Config{Database: work.Database})
	if err != nil {
		return err
	}
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			_ = o.act(ctx, letters) // the database may be away; the next second tries again
		case <-ctx.Done():
			return nil
		}
	}
}

func (o *operator) act(ctx context.Context, letters *dlq.Store) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	dead, err := letters.List(ctx, dlq.Filter{States: []dlq.State{dlq.StateDead}})
	if err != nil {
		return err
	}
	for _, l := range dead {
		if o.left[l.ID] {
			continue
		}
		switch p := o.rand.Float64(); {
		case p < 0.2:
			o.left[l.ID] = true
		case p < 0.4:
			err = letters.Discard(ctx, l.ID, dlq.Act{By: "crucible", Reason: "chance"})
		default:
			if _, err = o.site.db.ExecContext(ctx, "insert into app.healed values ($1)", l.MessageID); err == nil {
				_, err = letters.Replay(ctx, []int64{l.ID}, dlq.Act{By: "crucible"})
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
