package relay_test

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

// The answer to the record of a release may be lost: the command stands, and the lane is still
// held.
func TestSteer_AReleaseWhoseRecordHadNoAnswerIsCarriedOut(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		p.control(t)
		cfg := p.unhurried()
		cfg.Name = "one"
		start(t, p.box(t), newCounting(), cfg)
		eventually(t, "it has all lanes", func() bool { return p.leasesOf(t, "one") == outbox.Lanes+1 })
		epoch := p.count(t, `select epoch from {{relay_leases}} where lane = 5`)
		p.execute(t, `insert into {{lane_commands}} (action, lane, worker) select 'release', 5, owner from {{relay_leases}} where lane = 5`)
		eventually(t, "the command is carried out", func() bool { return p.count(t, `select count(*) from {{lane_commands}}`) == 0 })
		if p.count(t, `select epoch from {{relay_leases}} where lane = 5`) == epoch {
			t.Error("the lane was not given back")
		}
	})
}

// Messages that fail again have their usual time until the next try.
func TestSteer_RetryNowUsesUpOneAttempt(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		control, sink := p.control(t), newCounting()
		box := p.boxOn(t, p.tapped(t, func(_ *tapConn, text string, _ []driver.NamedValue) func() error {
			if strings.Contains(text, "next_at > ") && strings.Contains(text, "update") {
				time.Sleep(300 * time.Millisecond) // the first ones fail meanwhile
			}
			return nil
		}), outbox.NoHistory)
		sink.refuse.Store(true)
		cfg := p.unhurried()
		cfg.Retry = relay.Retry{Initial: 24 * time.Hour, Max: 24 * time.Hour}
		start(t, box, sink, cfg)
		const messages = 40
		msgs := make([]*message.Message, messages)
		for i, n := 0, 0; i < messages; n++ { // of one lane
			if key := fmt.Sprint("k", n); outbox.Lane(key, "") == 3 {
				msgs[i] = message.NewMessage(watermill.NewUUID(), nil)
				outbox.SetKey(msgs[i], key)
				i++
			}
		}
		commitTo(t, box, "a", msgs...)
		eventually(t, "they are retrying", func() bool {
			return p.count(t, `select count(*) from {{parked}} where attempts = 1`) == messages
		})
		do(t, control.Retry(t.Context(), steer.Selection{Topic: "a"}, ada))
		eventually(t, "all fail again", func() bool {
			return p.count(t, `select count(*) from {{parked}} where attempts = 1`) == 0
		})
		if n := p.count(t, `select max(attempts) from {{parked}}`); n != 2 {
			t.Errorf("one has used up %d attempts", n)
		}
	})
}

// Commands that wait for what somebody has locked keep no worker from learning of pauses.
func TestSteer_PausesAreReadWhileCommandsWait(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	control := p.control(t)
	var waited, reads atomic.Int64
	box := p.boxOn(t, p.tapped(t, func(_ *tapConn, text string, _ []driver.NamedValue) func() error {
		switch {
		case strings.Contains(text, "hastened"):
			waited.Add(1)
		case strings.Contains(text, "pauses") && strings.Contains(text, "order by kind, name"):
			reads.Add(1)
		}
		return nil
	}), outbox.NoHistory)
	cfg := p.unhurried()
	cfg.Name = "one"
	start(t, box, newCounting(), cfg)
	eventually(t, "it has all lanes", func() bool { return p.leasesOf(t, "one") == outbox.Lanes+1 })
	p.lock(t, `lock table {{parked}} in share mode`)
	do(t, control.Retry(t.Context(), steer.Selection{All: true}, ada))
	eventually(t, "a command waits", func() bool { return waited.Load() > 0 })
	before := reads.Load()
	until(t, "commands wait", func() bool { return waited.Load() > 16 }, waited.Load)
	if n := reads.Load() - before; n < 4 {
		t.Errorf("the pauses were read %d times while %d commands waited", n, waited.Load())
	}
}

// The former owner leaves a lane to the others, even if they learn of its release later.
func TestSteer_AReleasedLaneWaitsForWorkersThatLearnOfItLater(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		control := p.control(t)
		var looks atomic.Int64
		one := p.boxOn(t, p.tapped(t, func(_ *tapConn, text string, _ []driver.NamedValue) func() error {
			if strings.Contains(text, "select -2, owner") {
				looks.Add(1) // at all leases, before it takes any
			}
			return nil
		}), outbox.NoHistory)
		var unaware atomic.Bool
		two := p.boxOn(t, p.tapped(t, func(_ *tapConn, text string, _ []driver.NamedValue) func() error {
			if unaware.Load() && strings.Contains(text, "lane_commands") {
				return func() error { return errors.New("no answer") }
			}
			return nil
		}), outbox.NoHistory)
		cfg := p.unhurried()
		cfg.Lease, cfg.Name = 10*time.Second, "one"
		start(t, one, newCounting(), cfg)
		eventually(t, "it has all lanes", func() bool { return p.leasesOf(t, "one") == outbox.Lanes+1 })
		cfg.Name = "two"
		start(t, two, newCounting(), cfg)
		eventually(t, "they share", func() bool { return p.leasesOf(t, "two") >= outbox.Lanes/2 })
		unaware.Store(true)
		lane := p.count(t, `select min(l.lane) from {{relay_leases}} l join {{relay_workers}} w on w.owner = l.owner where w.name = 'one' and l.lane >= 0`)
		owner := `select count(*) from {{relay_leases}} l join {{relay_workers}} w on w.owner = l.owner where l.lane = $1 and w.name = $2`
		do(t, control.ReleaseLane(t.Context(), lane, ada))
		eventually(t, "it is given back", func() bool { return p.count(t, owner, lane, "one") == 0 })
		before := looks.Load()
		until(t, "the former owner has looked for lanes", func() bool { return looks.Load() > before+2 }, looks.Load)
		if p.count(t, owner, lane, "one") != 0 {
			t.Error("the former owner took the lane again")
		}
		unaware.Store(false)
		eventually(t, "the other one takes it", func() bool {
			return p.count(t, owner, lane, "two") == 1 && p.count(t, `select count(*) from {{lane_commands}}`) == 0
		})
	})
}
