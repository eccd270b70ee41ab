package dlq_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/dlq"
)

var ada = dlq.Act{By: "ada", Reason: "the queue is there now"}

func TestStore_AReplayIsACommandThatIsGivenOnce(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		dead, held := p.write(t, letter{}), p.write(t, letter{state: "held"})
		consumers := p.write(t, letter{source: "consumer", consumer: "stock"})
		other := p.write(t, letter{})
		ids := []int64{held, dead, consumers, dead}
		accepted, err := p.Replay(t.Context(), ids, ada)
		must(t, err)
		if !slices.Equal(accepted, []int64{dead, held, consumers}) {
			t.Errorf("accepted %v of %v", accepted, ids)
		}
		p.expectStates(t, []int64{dead, held, consumers, other}, dlq.StateReplaying, dlq.StateReplaying, dlq.StateReplaying, dlq.StateDead)
		l, err := p.Get(t.Context(), dead)
		must(t, err)
		if l.Version != 2 || l.Act != ada || l.ActedAt.Before(l.DiedAt) || !l.ClosedAt.IsZero() {
			t.Errorf("after the command: %+v", l)
		}
		// Again, by another one, with one that is not there and one that is new.
		accepted, err = p.Replay(t.Context(), []int64{dead, 99, other}, dlq.Act{By: "bob"})
		var state *dlq.StateError
		if !errors.As(err, &state) || *state != (dlq.StateError{ID: dead, State: dlq.StateReplaying, Action: "replayed"}) || !errors.Is(err, dlq.ErrNotFound) || !slices.Equal(accepted, []int64{other}) {
			t.Errorf("accepted %v, %v", accepted, err)
		}
		if l, err := p.Get(t.Context(), dead); err != nil || l.Act != ada || l.Version != 2 {
			t.Errorf("the second command left %+v, %v", l, err)
		}
		if err := p.Discard(t.Context(), held, ada); !errors.As(err, &state) || state.State != dlq.StateReplaying || state.Action != "discarded" {
			t.Errorf("a discard of what is being replayed: %v", err)
		}
	})
}

// More dead letters than a statement takes.
func TestStore_ACommandForManyReportsEach(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		ids := make([]int64, 1001)
		for i := range ids {
			ids[i] = int64(i + 1)
		}
		p.exec(t, `insert into {{dead_letters}} (source, consumer, topic, message_id, payload, reason, error, fingerprint)
			with recursive n (i) as (select 1 union all select i + 1 from n where i < $1)
			select 'consumer', 'stock', 'orders', 'm', '', 'refused', '', 'f' from n`, len(ids))
		accepted, err := p.Replay(t.Context(), append(ids, 5000), ada)
		if !slices.Equal(accepted, ids) || !errors.Is(err, dlq.ErrNotFound) {
			t.Errorf("accepted %d of %d, %v", len(accepted), len(ids), err)
		}
	})
}

func TestStore_TheReplayOfAConsumersLetterIsEnded(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		replaying, dead := p.write(t, letter{source: "consumer", consumer: "stock"}), p.write(t, letter{source: "consumer", consumer: "stock"})
		relays := p.write(t, letter{})
		_, err := p.Replay(t.Context(), []int64{replaying, relays}, ada)
		must(t, err)
		for _, c := range []struct {
			id       int64
			consumer string
			ended    bool
		}{{replaying, "mail", false}, {replaying, "stock", true}, {replaying, "stock", false}, {dead, "stock", false}, {relays, "", false}, {99, "stock", false}} {
			if ended := p.endReplay(t, c.consumer, c.id); ended != c.ended {
				t.Errorf("letter %d of %q: ended %v", c.id, c.consumer, ended)
			}
		}
		p.expectStates(t, []int64{replaying, dead, relays}, dlq.StateReplayed, dlq.StateDead, dlq.StateReplaying)
		l, err := p.Get(t.Context(), replaying)
		must(t, err)
		if l.Version != 3 || l.Act != ada || l.ClosedAt.IsZero() {
			t.Errorf("after the replay: %+v", l)
		}
	})
}

func TestStore_DiscardsAtOnceWhatIsNotHeld(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		dead, held := p.write(t, letter{}), p.write(t, letter{state: "held"})
		consumers := p.write(t, letter{source: "consumer", consumer: "stock"})
		ids := []int64{dead, held, consumers}
		for _, id := range ids {
			if err := p.Discard(t.Context(), id, dlq.Act{By: "ada", Reason: " "}); !errors.Is(err, dlq.ErrNoReason) {
				t.Errorf("without a reason: %v", err)
			}
			if err := p.Discard(t.Context(), id, dlq.Act{Reason: "test"}); !errors.Is(err, dlq.ErrNoActor) {
				t.Errorf("by nobody: %v", err)
			}
		}
		if _, err := p.Replay(t.Context(), ids, dlq.Act{}); !errors.Is(err, dlq.ErrNoActor) {
			t.Errorf("by nobody: %v", err)
		}
		p.expectStates(t, ids, dlq.StateDead, dlq.StateHeld, dlq.StateDead)
		for _, id := range ids {
			must(t, p.Discard(t.Context(), id, ada))
		}
		p.expectStates(t, ids, dlq.StateDiscarded, dlq.StateDiscarding, dlq.StateDiscarded)
		for _, id := range ids {
			l, err := p.Get(t.Context(), id)
			must(t, err)
			if l.Act != ada || l.ClosedAt.IsZero() != (l.State == dlq.StateDiscarding) {
				t.Errorf("after the discard: %+v", l)
			}
			var state *dlq.StateError
			if err := p.Discard(t.Context(), id, ada); !errors.As(err, &state) || state.State != l.State {
				t.Errorf("a second discard: %v", err)
			}
			if _, err := p.Replay(t.Context(), []int64{id}, ada); !errors.As(err, &state) || state.State != l.State {
				t.Errorf("a replay of what is discarded: %v", err)
			}
		}
		if err := p.Discard(t.Context(), 99, ada); !errors.Is(err, dlq.ErrNotFound) {
			t.Errorf("a letter that is not there: %v", err)
		}
	})
}

func TestStore_FiftyOperatorsAtOnceHaveOneEffect(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		ids := make([]int64, 20)
		for i := range ids {
			ids[i] = p.write(t, letter{})
		}
		var accepted, discarded atomic.Int64
		var group sync.WaitGroup
		for i := range 50 {
			group.Go(func() {
				mine := slices.Clone(ids)
				if i%2 == 1 {
					slices.Reverse(mine)
				}
				if i%10 == 9 { // some want something else
					if p.Discard(t.Context(), ids[3], dlq.Act{By: fmt.Sprint(i), Reason: "test"}) == nil {
						discarded.Add(1)
					}
				}
				got, err := p.Replay(t.Context(), mine, dlq.Act{By: fmt.Sprint(i)})
				accepted.Add(int64(len(got)))
				var state *dlq.StateError
				if len(got) < len(ids) && !errors.As(err, &state) {
					t.Errorf("operator %d: %v", i, err)
				}
			})
		}
		group.Wait()
		if n := accepted.Load() + discarded.Load(); n != int64(len(ids)) {
			t.Errorf("%d replays and %d discards of %d letters", accepted.Load(), discarded.Load(), len(ids))
		}
		for _, id := range ids {
			if l, err := p.Get(t.Context(), id); err != nil || l.Version != 2 {
				t.Errorf("letter %+v, %v", l, err)
			}
		}
	})
}

func TestStore_PurgesWhatEndedLongAgo(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		const old, young = 31 * 24 * time.Hour, 29 * 24 * time.Hour
		var kept []int64
		for _, state := range []string{"dead", "held", "replaying", "discarding"} {
			kept = append(kept, p.write(t, letter{state: state, died: old}))
		}
		for _, state := range []string{"replayed", "discarded"} {
			kept = append(kept, p.write(t, letter{state: state, died: young}))
			p.write(t, letter{state: state, died: old})
		}
		const many = 1200
		p.exec(t, `insert into {{dead_letters}} (state, source, consumer, topic, message_id, payload, reason, error, fingerprint, closed_at)
			with recursive n (i) as (select 1 union all select i + 1 from n where i < $1)
			select 'replayed', 'consumer', 'stock', 'orders', 'm', '', 'refused', '', 'f', `+p.ago(old)+` from n`, many)
		n, err := p.Purge(t.Context())
		if err != nil || n != many+2 {
			t.Errorf("purged %d, %v; want %d", n, err, many+2)
		}
		p.states(t, kept...)
		if n, err := p.Purge(t.Context()); n != 0 || err != nil {
			t.Errorf("purged %d more, %v", n, err)
		}
	})
}

func (p *testDB) endReplay(t *testing.T, consumer string, id int64) bool {
	t.Helper()
	token, err := p.stored.ReplayToken(t.Context(), id)
	if errors.Is(err, dlq.ErrNotFound) {
		return false
	}
	must(t, err)
	l, err := p.Get(t.Context(), id)
	must(t, err)
	tx, err := p.db.BeginTx(t.Context(), nil)
	must(t, err)
	defer tx.Rollback()
	for _, forged := range []struct{ token, payload string }{{"", string(l.Payload)}, {token + "0", string(l.Payload)}, {token, string(l.Payload) + "x"}} {
		if ended, err := p.stored.EndReplay(t.Context(), tx, consumer, id, forged.token, []byte(forged.payload)); ended || err != nil {
			t.Errorf("ended by token %q, payload %q: %v", forged.token, forged.payload, err)
		}
	}
	ended, err := p.stored.EndReplay(t.Context(), tx, consumer, id, token, l.Payload)
	must(t, err)
	must(t, tx.Commit())
	return ended
}
