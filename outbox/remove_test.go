package outbox_test

import (
	"bytes"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

func TestRemove_TakesOnlyTheRowsNamed(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, newMessage("1", "k"), newMessage("2", "k"), newMessage("3", "k"))
		rows := p.read(t)
		p.remove(t)
		expectIDs(t, p.read(t), "1", "2", "3")
		p.remove(t, rows[1].Ref)
		expectIDs(t, p.read(t), "1", "3")
		p.remove(t, rows[2].Ref, rows[0].Ref) // in any order
		expectIDs(t, p.read(t))
	})
}

func TestRemove_NeedsTheWholeIdentity(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, newMessage("a", "k"))
		ref := p.read(t)[0].Ref
		other := map[string]outboxstore.Ref{}
		for _, name := range []string{"lane", "id", "message id", "created later", "created earlier"} {
			other[name] = ref
		}
		change := func(name string, fn func(r *outboxstore.Ref)) {
			r := other[name]
			fn(&r)
			other[name] = r
		}
		change("lane", func(r *outboxstore.Ref) { r.Lane = (r.Lane + 1) % outbox.Lanes })
		change("id", func(r *outboxstore.Ref) { r.ID++ })
		change("message id", func(r *outboxstore.Ref) { r.MessageID = "b" })
		change("created later", func(r *outboxstore.Ref) { r.CreatedAt = r.CreatedAt.Add(time.Microsecond) })
		change("created earlier", func(r *outboxstore.Ref) { r.CreatedAt = r.CreatedAt.Add(-time.Microsecond) })
		for name, r := range other {
			p.remove(t, r)
			if n := len(p.read(t)); n != 1 {
				t.Fatalf("another %s: the row was removed", name)
			}
			if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 0 {
				t.Fatalf("another %s: the row went into the history", name)
			}
		}
		// The same instant in another zone is the same identity.
		ref.CreatedAt = ref.CreatedAt.In(time.FixedZone("elsewhere", -9*3600-1800))
		p.remove(t, ref)
		expectIDs(t, p.read(t))
	})
}

// The time is part of the identity; on its way to the relay and back not a
// microsecond may get lost.
func TestRemove_MatchesEveryMicrosecond(t *testing.T) {
	const n = 2000
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		text := `insert into {{outbox}} (lane, topic, message_id, payload, created_at)
			select i % 32, 'orders', 'm' || i, '', timestamptz '2000-01-01' + floor(random() * 3.15e15) * interval '1 microsecond'
			from generate_series(1, $1::int) i`
		if p.isSQLite() {
			text = `with recursive n (i) as (select 1 union all select i + 1 from n where i < $1)
				insert into {{outbox}} (lane, topic, message_id, payload, created_at)
				select i % 32, 'orders', 'm' || i, x'', abs(random()) % 4000000000000000 from n`
		}
		p.exec(t, text, n)
		rows := p.read(t)
		if len(rows) != n {
			t.Fatalf("%d rows", len(rows))
		}
		p.remove(t, refs(rows)...)
		if left := p.read(t); len(left) != 0 {
			t.Errorf("%d rows were not recognised, for example that of %v", len(left), left[0].CreatedAt)
		}
	})
}

func TestRemove_TwiceIsHarmless(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, messages("m", 50)...)
		all := refs(p.read(t))
		p.remove(t, all[:30]...)
		p.remove(t, all...)
		p.remove(t, all...)
		p.remove(t, all[0], all[0])
		expectIDs(t, p.read(t))
		if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 50 {
			t.Errorf("%d rows in the history, want 50", n)
		}
	})
}

// After a takeover two workers may confirm the same rows at once.
func TestRemove_ByTwoAtOnceLeavesOneCopyInTheHistory(t *testing.T) {
	sizes := map[bool]int{false: 2000, true: 100}
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		n := sizes[p.isSQLite()]
		p.publish(t, messages("m", n)...)
		all := refs(p.read(t))
		var workers sync.WaitGroup
		for i := range 4 {
			mine := slices.Clone(all)
			if i%2 == 1 {
				slices.Reverse(mine)
			}
			workers.Go(func() {
				for chunk := range slices.Chunk(mine, 300) {
					for {
						_, err := p.queue.Remove(t.Context(), chunk)
						if err == nil {
							break
						}
						if !sqlerr.Retryable(err) {
							t.Error(err)
							return
						}
					}
				}
			})
		}
		workers.Wait()
		expectIDs(t, p.read(t))
		if got := p.count(t, `select count(*) from {{outbox_history}}`); got != n {
			t.Errorf("%d rows in the history, want %d", got, n)
		}
	})
}

func TestRemove_KeepsTheRowInTheHistory(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		msg := message.NewMessage("Zoë's \"first\"", everyByte())
		outbox.SetKey(msg, "日本語")
		msg.Metadata.Set("note", "🚀")
		p.publish(t, msg, newMessage("stays", "other"))
		var r outboxstore.Row
		for _, r = range p.read(t) {
			if r.MessageID == msg.UUID {
				break
			}
		}
		p.remove(t, r.Ref)
		var got outboxstore.Row
		var created, relayed any
		err := p.db.QueryRowContext(t.Context(),
			p.expand(t, `select lane, id, message_id, topic, key, payload, metadata, created_at, relayed_at from {{outbox_history}}`)).
			Scan(&got.Lane, &got.ID, &got.MessageID, &got.Topic, &got.Key, &got.Payload, &got.Metadata, &created, &relayed)
		if err != nil {
			t.Fatal(err)
		}
		got.CreatedAt = asTime(t, created)
		if got.Lane != r.Lane || got.ID != r.ID || got.MessageID != r.MessageID || got.Topic != r.Topic || got.Key != r.Key ||
			!bytes.Equal(got.Payload, r.Payload) || !bytes.Equal(got.Metadata, r.Metadata) || !got.CreatedAt.Equal(r.CreatedAt) {
			t.Errorf("got %+v\nwant %+v", got, r)
		}
		if at := asTime(t, relayed); at.Before(got.CreatedAt) || time.Since(at) > time.Minute {
			t.Errorf("relayed at %v", at)
		}
		expectIDs(t, p.read(t), "stays")
	})
}

func asTime(t *testing.T, v any) time.Time {
	t.Helper()
	switch v := v.(type) {
	case time.Time:
		return v
	case int64:
		return time.UnixMicro(v)
	}
	t.Fatalf("%T is not a time", v)
	return time.Time{}
}

func TestRemove_WithoutHistoryKeepsNothing(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.History = outbox.NoHistory })
		p.publish(t, messages("m", 20)...)
		rows := p.read(t)
		p.remove(t, refs(rows[:19])...)
		expectIDs(t, p.read(t), rows[19].MessageID)
		if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 0 {
			t.Errorf("%d rows in the history", n)
		}
	})
}

// A restart changes whether a history is kept; what is owed is not concerned.
func TestRemove_OneProcessWithAHistoryOneWithout(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, messages("m", 2)...)
		rows := p.read(t)
		p.remove(t, rows[0].Ref)
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.History = outbox.NoHistory })
		p.remove(t, refs(rows)...)
		expectIDs(t, p.read(t))
		if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 1 {
			t.Errorf("%d rows in the history", n)
		}
	})
}

// On PostgreSQL one statement moves any number of rows, in a transaction with limits.
func TestRemove_IsOneStatement(t *testing.T) {
	t.Parallel()
	for name, history := range map[string]time.Duration{"move": time.Hour, "delete": outbox.NoHistory} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := onPostgres(t, "binary_parameters=yes")
			p.use(t, p.db, func(cfg *outbox.Config) { cfg.History = history })
			p.publish(t, messages("m", 1000)...)
			all := refs(p.read(t))
			p.tap.sent()
			p.remove(t, all...)
			if sent := firstWords(p.tap.sent()); sent != map[string]string{"move": "BEGIN set with COMMIT", "delete": "BEGIN set delete COMMIT"}[name] {
				t.Errorf("sent %s", sent)
			}
			expectIDs(t, p.read(t))
		})
	}
}
