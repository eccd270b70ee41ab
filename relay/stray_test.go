package relay_test

import (
	"database/sql/driver"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// A worker that did not hear that it was given lanes gives them back and takes
// them again. Else nobody would work them, as long as it lives.
func TestRelay_GivesBackLeasesThatItDoesNotKnowOf(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		p.watchReturns(t)
		var upkeep, lanes atomic.Bool // was lost
		lose := func() error { return errors.New("connection reset after the commit") }
		db := p.tapped(t, func(c *tapConn, text string, args []driver.NamedValue) func() error {
			if c.matched && text == "commit" {
				c.matched = false
				return lose
			}
			if !strings.Contains(text, "set owner = ") || !strings.Contains(text, "crashes = ") {
				return nil
			}
			lost := &lanes
			if args[2].Value == int64(1) { // at most so many
				lost = &upkeep
			}
			if lost.Swap(true) {
				return nil
			}
			if !p.postgres() { // the statement is in a transaction
				c.matched = true
				return nil
			}
			return lose
		})
		box, w := p.boxOn(t, db, outbox.NoHistory), &wire{}
		msgs := spread(64, 2)
		commit(t, box, msgs...)
		r := start(t, box, &sink{name: "w", wire: w}, relay.Config{Lease: 9 * time.Second})
		eventually(t, "leases are given back", func() bool { return p.count(t, `select count(*) from returns`) == 33 })
		p.awaitNothingOwed(t)
		p.awaitShares(t, map[string]int{"w": 32})
		if n := p.count(t, `select count(*) from {{relay_leases}} where epoch <> 2`); n > 0 {
			t.Errorf("%d leases were not taken twice", n)
		}
		r.stop()
		w.check(t, msgs, 0)
	})
}

// watchReturns makes the database itself write down every lease that is given back.
func (p testDB) watchReturns(t testing.TB) {
	t.Helper()
	p.execute(t, `create table returns (lane integer not null)`)
	if !p.postgres() {
		p.execute(t, `create trigger returned after update of owner on {{relay_leases}} when old.owner <> '' and new.owner = ''
			begin insert into returns values (new.lane); end`)
		return
	}
	p.execute(t, `create function returned() returns trigger language plpgsql set search_path from current as $$
		begin
			insert into returns values (new.lane);
			return null;
		end $$`)
	p.execute(t, `create trigger returned after update on {{relay_leases}} for each row
		when (old.owner <> '' and new.owner = '') execute function returned()`)
}
