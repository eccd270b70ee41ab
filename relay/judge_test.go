package relay_test

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// published is a row of the journal.
type published struct {
	id      int64
	key     string
	n       int
	message string
}

func (b *business) journal(t testing.TB, after int64, limit int) []published {
	t.Helper()
	rows, err := b.db.QueryContext(t.Context(), `select id, key, n, message_id from journal where id > $1 order by id limit $2`, after, limit)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var all []published
	for rows.Next() {
		var p published
		if err := rows.Scan(&p.id, &p.key, &p.n, &p.message); err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// takeover is a lane that changed its owner without having been given back.
type takeover struct {
	lane int
	at   time.Time
}

// watchTakeovers makes the database itself write down every takeover.
func (p testDB) watchTakeovers(t testing.TB) {
	t.Helper()
	if !p.postgres() {
		p.execute(t, `create table takeovers (lane integer not null, at integer not null)`)
		p.execute(t, `create trigger watch after update of epoch on {{relay_leases}}
			when new.epoch <> old.epoch and new.owner <> old.owner and old.owner <> ''
			begin
				insert into takeovers values (new.lane, cast(unixepoch('subsec') * 1000000 as integer));
			end`)
		return
	}
	p.execute(t, `create table takeovers (lane smallint not null, at bigint not null)`)
	p.execute(t, `create function watch() returns trigger language plpgsql set search_path from current as $$
		begin
			insert into takeovers values (new.lane, extract(epoch from clock_timestamp()) * 1000000);
			return null;
		end $$`)
	p.execute(t, `create trigger watch after update on {{relay_leases}} for each row
		when (new.epoch <> old.epoch and new.owner <> old.owner and old.owner <> '')
		execute function watch()`)
}

func (p testDB) takeovers(t testing.TB) []takeover {
	t.Helper()
	rows, err := p.db.QueryContext(t.Context(), `select lane, at from takeovers where lane >= 0 order by at`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var all []takeover
	for rows.Next() {
		var lane int
		var micros int64
		if err := rows.Scan(&lane, &micros); err != nil {
			t.Fatal(err)
		}
		all = append(all, takeover{lane, time.UnixMicro(micros)})
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// finding says what is wrong with a wire.
type finding struct {
	lost, invented, reordered int
	repeated, unexplained     int
	examples                  []string
}

func (v *finding) note(format string, args ...any) {
	if len(v.examples) < 5 {
		v.examples = append(v.examples, fmt.Sprintf(format, args...))
	}
}

func (v finding) String() string {
	return fmt.Sprintf("lost=%d invented=%d reordered=%d repeated=%d unexplained=%d %v",
		v.lost, v.invented, v.reordered, v.repeated, v.unexplained, v.examples)
}

// judge compares what arrived with what was committed. A repeat is explained by
// a takeover of its lane before it, from another process or after the same one had
// sent it, or by a confirm that came too late.
func judge(journal []published, wire []delivery, takeovers []takeover) finding {
	var v finding
	committed := map[string]published{}
	want := map[string][]int{}
	for _, p := range journal {
		committed[p.message] = p
		want[p.key] = append(want[p.key], p.n)
	}
	earlier := map[string][]delivery{}
	got := map[string][]int{}
	for _, d := range wire {
		p, ok := committed[d.MessageID]
		if !ok || d.Key != p.key || d.Body != fmt.Sprint(p.key, ":", p.n) {
			v.invented++
			v.note("invented %+v", d)
			continue
		}
		before := earlier[d.MessageID]
		earlier[d.MessageID] = append(before, d)
		if len(before) == 0 {
			got[d.Key] = append(got[d.Key], p.n)
			continue
		}
		v.repeated++
		if !explained(d, before, takeovers) {
			v.unexplained++
			v.note("unexplained %+v after %+v", d, before)
		}
	}
	for key, ns := range want {
		slices.Sort(ns) // the writers of a key count, so their order is that of the numbers
		switch {
		case len(got[key]) != len(ns):
			v.lost += len(ns) - len(got[key])
			v.note("key %q: %d of %d arrived", key, len(got[key]), len(ns))
		case key == "":
		case !slices.Equal(ns, got[key]):
			v.reordered++
			v.note("key %q: %v", key, got[key])
		}
	}
	return v
}

// explained reports whether there is a reason for a copy: its lane was taken over, or a
// confirm came too late. That may be of the copy which arrived last: a worker that has
// given it up gives its lane back, and the next one is faster than what is on the wire.
func explained(d delivery, before []delivery, takeovers []takeover) bool {
	taken := slices.ContainsFunc(takeovers, func(t takeover) bool { return t.lane == d.Lane && !t.at.After(d.at) })
	return slices.ContainsFunc(before, func(b delivery) bool {
		lost := func(t takeover) bool { return t.lane == d.Lane && t.at.After(b.at) && !t.at.After(d.at) }
		return b.expired || b.By != d.By && (d.expired || taken) || b.By == d.By && slices.ContainsFunc(takeovers, lost)
	})
}

// naiveReader is a second consumer of the same commits, one that remembers the
// last id and goes on behind it.
type naiveReader struct {
	*business
	last int64
	read []published
}

// step reads until it finds nothing more.
func (n *naiveReader) step(t testing.TB) {
	for {
		rows := n.journal(t, n.last, 100)
		if len(rows) == 0 {
			return
		}
		n.read = append(n.read, rows...)
		n.last = rows[len(rows)-1].id
	}
}

// deliveries are what the reader would have put on the wire.
func (n *naiveReader) deliveries() []delivery {
	var all []delivery
	for _, p := range n.read {
		all = append(all, delivery{frame: frame{By: "naive", MessageID: p.message, Key: p.key, Body: fmt.Sprint(p.key, ":", p.n)}})
	}
	return all
}
