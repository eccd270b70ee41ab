package relay_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// The worker that does the upkeep measures what waits, while somebody collects the metrics.
// Another one that takes over goes on.
func TestRelay_MeasuresWhatWaits(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		box, w := p.box(t), &wire{}
		// Nothing is confirmed, and some are refused.
		handle := func(ctx context.Context, m *relay.Message) error {
			if m.Topic == "refused" {
				return relay.Refused(errors.New("not to my liking"))
			}
			<-ctx.Done()
			return relay.Unavailable(ctx.Err())
		}
		cfg := p.unhurried()
		cfg.Retry = relay.Retry{MaxAttempts: 1}
		first := start(t, box, &sink{name: "a", wire: w, handle: handle}, cfg)
		var waiting, refused []*message.Message
		for i := range 7 {
			waiting = append(waiting, ofLane("waits", i, 1, 10)...)
		}
		refused = append(refused, ofLane("refused", 11, 3, 10)...)
		commitTo(t, box, "orders", waiting...)
		commitTo(t, box, "refused", refused...)
		later := message.NewMessage("later", nil)
		outbox.SetDeliverAfter(later, time.Hour)
		commitTo(t, box, "orders", later)

		expect := func(what string, r running) {
			t.Helper()
			testserver.Eventually(t, what, func() bool {
				got := map[string]float64{}
				for _, name := range []string{
					"oncemill.outbox.depth", "oncemill.scheduled.depth", "oncemill.scheduled.due", "oncemill.relay.workers",
					"oncemill.relay.unowned_lanes", "oncemill.dead_letters.open",
				} {
					value, found := r.gaugeSum(t, name)
					if !found {
						return false
					}
					got[name] = value
				}
				age, _ := r.gaugeSum(t, "oncemill.outbox.oldest_age")
				return got["oncemill.outbox.depth"] == 7 && got["oncemill.scheduled.depth"] == 1 && got["oncemill.scheduled.due"] == 0 &&
					got["oncemill.relay.workers"] == 1 && got["oncemill.relay.unowned_lanes"] == 0 && got["oncemill.dead_letters.open"] == 3 && age > 0
			})
		}
		expect("the first measures", first)
		first.stop()
		if _, found := first.gaugeSum(t, "oncemill.outbox.depth"); found {
			t.Error("a worker that has stopped still tells what waits")
		}
		expect("the second measures", start(t, box, &sink{name: "b", wire: w, handle: handle}, cfg))
	})
}

// Somebody else's lock on a table that is measured does not hold up the upkeep. What cannot be
// measured has no value.
func TestRelay_KeepsTheTablesWhileTheBacklogCannotBeMeasured(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	r := start(t, p.box(t), &sink{name: "a", wire: &wire{}}, unhurried)
	measured := func() bool { _, found := r.gaugeSum(t, "oncemill.outbox.depth"); return found }
	testserver.Eventually(t, "the backlog is measured", measured)
	lock, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Rollback()
	if _, err := lock.ExecContext(t.Context(), database.Of(p.cfg).Expand(`lock table {{scheduled}} in access exclusive mode`)); err != nil {
		t.Fatal(err)
	}
	testserver.Eventually(t, "what cannot be measured is not reported", func() bool { return !measured() })
	if err := lock.Rollback(); err != nil {
		t.Fatal(err)
	}
	testserver.Eventually(t, "the backlog is measured again", measured)
}
