package dlqstore_test

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/dlqstore"
)

// audited returns the audit, the oldest entry first, as "action subject by reason".
func (f *fixture) audited(t *testing.T) (entries []string) {
	t.Helper()
	list, err := auditstore.Open(f.db, f.where).List(t.Context(), auditstore.Filter{Limit: 1000, OldestFirst: true})
	must(t, err)
	for _, e := range list {
		entries = append(entries, e.Action+" "+e.Subject+" "+e.By+" "+e.Reason)
	}
	return entries
}

func TestStore_EachActIsAuditedOnceForEachLetter(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		a, b := f.add(t, dlqstore.Letter{}), f.add(t, dlqstore.Letter{})
		sub := func(id int64) string { return " dead_letter " + strconv.FormatInt(id, 10) + " " }
		var want []string
		for _, act := range []struct {
			do    func(ids []int64) ([]int64, error)
			entry string
			ids   []int64
		}{
			{func(ids []int64) ([]int64, error) { return f.Replay(t.Context(), ids, "ada", "r") }, "dead_letter.replay", []int64{a, b}},
			{func(ids []int64) ([]int64, error) { return f.Discard(t.Context(), ids, "bob", "d") }, "dead_letter.discard", []int64{a, b}},
			{func(ids []int64) ([]int64, error) { return f.Restore(t.Context(), ids, "cyd", "u") }, "dead_letter.restore", []int64{a}},
		} {
			for range 2 { // the second time nothing is done, and nothing is audited
				did, err := act.do(append(slices.Clone(act.ids), 999))
				must(t, err)
				for _, id := range did {
					by := map[string]string{"dead_letter.replay": "ada r", "dead_letter.discard": "bob d", "dead_letter.restore": "cyd u"}[act.entry]
					want = append(want, act.entry+sub(id)+by)
				}
			}
		}
		if accepted, err := f.ReplayEdited(t.Context(), a, dlqstore.Edit{Payload: []byte("x"), By: "eve", Reason: "e"}); err != nil || !accepted {
			t.Errorf("edited %v, %v", accepted, err)
		}
		if added, err := f.AddNote(t.Context(), b, "flo", "n"); err != nil || !added {
			t.Errorf("noted %v, %v", added, err)
		}
		if added, err := f.AddNote(t.Context(), 999, "flo", "n"); err != nil || added {
			t.Errorf("noted %v, %v", added, err)
		}
		want = append(want, "dead_letter.replay_edited"+sub(a)+"eve e", "dead_letter.note"+sub(b)+"flo n")
		if got := f.audited(t); len(want) != 7 || !slices.Equal(got, want) {
			t.Errorf("audited\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}

// An act that cannot be audited does not happen.
func TestStore_NoActWithoutItsAudit(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		dead, discarded := f.add(t, dlqstore.Letter{}), f.add(t, dlqstore.Letter{})
		must(t, discard(t, f, discarded))
		f.exec(t, `drop table {{audit}}`)
		for name, do := range map[string]func() error{
			"replay":  func() error { _, err := f.Replay(t.Context(), []int64{dead}, "ada", ""); return err },
			"discard": func() error { _, err := f.Discard(t.Context(), []int64{dead}, "ada", "d"); return err },
			"restore": func() error { _, err := f.Restore(t.Context(), []int64{discarded}, "ada", "d"); return err },
			"edit": func() error {
				_, err := f.ReplayEdited(t.Context(), dead, dlqstore.Edit{By: "ada", Reason: "e"})
				return err
			},
			"note": func() error { _, err := f.AddNote(t.Context(), dead, "ada", "n"); return err },
			"import": func() error {
				_, err := f.Import(t.Context(), &dlqstore.Letter{State: "dead", Source: "consumer", Consumer: "mail", DiedAt: time.Now()}, "ada", "i")
				return err
			},
		} {
			if err := do(); !errors.Is(err, auditstore.ErrNotMigrated) {
				t.Errorf("%s: %v", name, err)
			}
		}
		f.expectStates(t, map[int64]string{dead: "dead", discarded: "discarded"})
		if notes, err := f.Notes(t.Context(), dead, 10); err != nil || len(notes) > 0 {
			t.Errorf("%+v, %v", notes, err)
		}
		if all, err := f.List(t.Context(), dlqstore.Filter{Limit: 10}); err != nil || len(all) != 2 {
			t.Errorf("%d letters, %v", len(all), err)
		}
	})
}

func TestStore_RestoresWhatIsStillThere(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		id, replaying := f.add(t, dlqstore.Letter{}), f.add(t, dlqstore.Letter{})
		removing, removed := f.add(t, dlqstore.Letter{}), f.add(t, dlqstore.Letter{})
		_, err := f.Replay(t.Context(), []int64{replaying}, "ada", "")
		must(t, err)
		f.exec(t, `update {{dead_letters}} set state = 'held', held = $1 where id in ($2, $3)`, true, removing, removed)
		ids := []int64{id, replaying, removing, removed}
		if _, err := f.Restore(t.Context(), ids, "ada", "u"); err != nil {
			t.Fatal(err)
		}
		f.expectStates(t, map[int64]string{id: "dead", replaying: "replaying", removing: "held", removed: "held"})
		_, err = f.Discard(t.Context(), ids, "ada", "d")
		must(t, err)
		f.exec(t, `update {{dead_letters}} set state = 'discarded', closed_at = died_at where id = $1`, removed) // as its relay does
		did, err := f.Restore(t.Context(), ids, "bob", "u")
		if slices.Sort(did); err != nil || !slices.Equal(did, []int64{id, replaying, removing}) {
			t.Errorf("restored %v, %v", did, err)
		}
		f.expectStates(t, map[int64]string{id: "dead", replaying: "dead", removing: "held", removed: "discarded"})
		l, err := f.Get(t.Context(), id)
		if err != nil || l.ActedBy != "bob" || l.ActedReason != "u" || !l.ClosedAt.IsZero() || l.Version != 3 {
			t.Errorf("%+v, %v", l, err)
		}
		if did, err := f.Restore(t.Context(), ids, "eve", "u"); err != nil || len(did) > 0 {
			t.Errorf("restored again: %v, %v", did, err)
		}
	})
}

func TestStore_AnEditedReplayEndsWithItsOwnContentAndToken(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		id := f.add(t, dlqstore.Letter{Payload: []byte("p"), Metadata: map[string]string{"a": "b"}, MessageID: "m"})
		edit := dlqstore.Edit{Payload: []byte("q"), Metadata: map[string]string{"c": "d"}, By: "ada", Reason: "e"}
		if accepted, err := f.ReplayEdited(t.Context(), id, edit); err != nil || !accepted {
			t.Fatalf("%v, %v", accepted, err)
		}
		if accepted, err := f.ReplayEdited(t.Context(), id, edit); err != nil || accepted {
			t.Errorf("a second time: %v, %v", accepted, err)
		}
		l, err := f.Get(t.Context(), id)
		must(t, err)
		payload, metadata := l.Delivered()
		if string(l.Payload) != "p" || l.Metadata["a"] != "b" || !l.Edited || string(payload) != "q" || !maps.Equal(metadata, edit.Metadata) || l.Edit.By != "ada" || l.Edit.Reason != "e" || l.EditedAt.IsZero() {
			t.Errorf("%+v", l)
		}
		token, err := f.ReplayToken(t.Context(), id)
		must(t, err)
		// An inbox that knows no edits finds no token, and so delivers nothing.
		var old string
		must(t, f.db.QueryRowContext(t.Context(), f.where.Expand(`select token from {{dead_letters}} where id = $1`), id).Scan(&old))
		if old != "" || len(token) != 32 {
			t.Errorf("tokens %q and %q", old, token)
		}
		if checked, err := f.CheckReplay(t.Context(), id, token); err != nil || !checked.Edited || string(checked.Edit.Payload) != "q" {
			t.Errorf("%+v, %v", checked, err)
		}
		for _, payload := range []string{"p", "", "q"} {
			tx, err := f.db.BeginTx(t.Context(), nil)
			must(t, err)
			ended, err := f.EndReplay(t.Context(), tx, "stock", id, token, []byte(payload))
			must(t, errors.Join(err, tx.Commit()))
			if ended != (payload == "q") {
				t.Errorf("ended by %q: %v", payload, ended)
			}
		}
		f.expectStates(t, map[int64]string{id: "replayed"})
		if l, err := f.Get(t.Context(), id); err != nil || !l.Edited || string(l.Payload) != "p" {
			t.Errorf("%+v, %v", l, err)
		}
	})
}

func TestStore_AnEditIsForOneReplay(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		id := f.add(t, dlqstore.Letter{Payload: []byte("p")})
		_, err := f.ReplayEdited(t.Context(), id, dlqstore.Edit{Payload: []byte("q"), By: "ada", Reason: "e"})
		must(t, err)
		first, err := f.ReplayToken(t.Context(), id)
		must(t, err)
		must(t, discard(t, f, id))
		if l, err := f.Get(t.Context(), id); err != nil || l.Edited || string(l.Edit.Payload) != "q" {
			t.Errorf("discarded: %+v, %v", l, err)
		}
		_, err = f.Restore(t.Context(), []int64{id}, "ada", "u")
		must(t, err)
		_, err = f.Replay(t.Context(), []int64{id}, "ada", "")
		must(t, err)
		l, err := f.Get(t.Context(), id)
		must(t, err)
		if payload, _ := l.Delivered(); string(payload) != "p" || l.Edited || string(l.Edit.Payload) != "q" {
			t.Errorf("%+v", l)
		}
		second, err := f.ReplayToken(t.Context(), id)
		if err != nil || second == first {
			t.Errorf("tokens %q and %q, %v", first, second, err)
		}
		if _, err := f.CheckReplay(t.Context(), id, first); !errors.Is(err, dlqstore.ErrNotFound) {
			t.Errorf("the token of the edit: %v", err)
		}
	})
}

// A token is known after the replays that followed it, but ends none of them.
func TestStore_KnowsTheTokensOfFormerReplays(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		id, other := f.add(t, dlqstore.Letter{MessageID: "m", Payload: []byte("p"), Metadata: map[string]string{"a": "b"}}), f.add(t, dlqstore.Letter{})
		var tokens []string
		for round := range 102 {
			var err error
			if round%2 == 0 {
				_, err = f.Replay(t.Context(), []int64{id}, "ada", "")
			} else {
				_, err = f.ReplayEdited(t.Context(), id, dlqstore.Edit{Payload: []byte("p"), By: "ada", Reason: "e"})
			}
			must(t, err)
			token, err := f.ReplayToken(t.Context(), id)
			must(t, err)
			tokens = append(tokens, token)
			if round == 101 {
				break
			}
			must(t, discard(t, f, id))
			_, err = f.Restore(t.Context(), []int64{id}, "ada", "u")
			must(t, err)
		}
		for i, token := range tokens {
			l, err := f.FormerReplay(t.Context(), id, token)
			if i == 0 || i == 101 { // forgotten, and the last one
				if !errors.Is(err, dlqstore.ErrNotFound) {
					t.Errorf("token %d: %+v, %v", i, l, err)
				}
			} else if err != nil || l.Consumer != "stock" || l.MessageID != "m" || l.Metadata["a"] != "b" {
				t.Errorf("token %d: %+v, %v", i, l, err)
			}
		}
		tx, err := f.db.BeginTx(t.Context(), nil)
		must(t, err)
		defer tx.Rollback()
		if ended, err := f.EndReplay(t.Context(), tx, "stock", id, tokens[100], []byte("p")); err != nil || ended {
			t.Errorf("ended by a former token: %v, %v", ended, err)
		}
		must(t, tx.Rollback())
		for _, c := range []struct {
			id    int64
			token string
		}{{other, tokens[100]}, {id, ""}, {id, tokens[100][:31]}, {id, tokens[100] + tokens[99]}, {id, strings.Repeat("0", 32)}} {
			if l, err := f.FormerReplay(t.Context(), c.id, c.token); !errors.Is(err, dlqstore.ErrNotFound) {
				t.Errorf("%+v: %+v, %v", c, l, err)
			}
		}
	})
}

func TestStore_NotesGoWithTheirLetter(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		id, other := f.add(t, dlqstore.Letter{}), f.add(t, dlqstore.Letter{})
		for _, text := range []string{"one", "two", "three\x00" + strings.Repeat("x", 5000)} {
			for _, on := range []int64{id, other} {
				_, err := f.AddNote(t.Context(), on, "ada", text)
				must(t, err)
			}
		}
		notes, err := f.Notes(t.Context(), id, 2)
		if err != nil || len(notes) != 2 || notes[0].Text != "two" || !strings.HasPrefix(notes[1].Text, "three\uFFFDx") || len(notes[1].Text) > 4200 || notes[0].By != "ada" || notes[0].At.IsZero() {
			t.Errorf("%+v, %v", notes, err)
		}
		must(t, discard(t, f, id))
		hours := map[oncemill.Dialect]string{oncemill.SQLite: "7200000000", oncemill.PostgreSQL: "interval '2 hours'"}[f.where.Dialect]
		f.exec(t, `update {{dead_letters}} set closed_at = closed_at - `+hours+` where id = $1`, id)
		if n, err := f.Purge(t.Context(), time.Hour); err != nil || n != 1 {
			t.Errorf("purged %d, %v", n, err)
		}
		for on, want := range map[int64]int{id: 0, other: 3} {
			if notes, err := f.Notes(t.Context(), on, 10); err != nil || len(notes) != want {
				t.Errorf("letter %d: %d notes, %v", on, len(notes), err)
			}
		}
	})
}

func TestStore_AReplayThatFailsAgainNamesItsNewLetter(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		end := func(l dlqstore.Letter) int64 {
			id := f.add(t, l)
			_, err := f.Replay(t.Context(), []int64{id}, "ada", "")
			must(t, err)
			f.exec(t, `update {{dead_letters}} set state = 'replayed', closed_at = acted_at where id = $1`, id)
			return id
		}
		expect := func(id, want int64) {
			t.Helper()
			if l, err := f.Get(t.Context(), id); err != nil || l.FailedAgain != want {
				t.Errorf("letter %d failed again as %d, want %d, %v", id, l.FailedAgain, want, err)
			}
		}
		f.add(t, dlqstore.Letter{MessageID: "m", Reason: "failed"}) // before
		first := end(dlqstore.Letter{MessageID: "m", Reason: "failed"})
		f.add(t, dlqstore.Letter{MessageID: "other", Reason: "failed"})
		f.add(t, dlqstore.Letter{MessageID: "m", Reason: "conflict", Payload: []byte("p")}) // another message
		expect(first, 0)
		second := end(dlqstore.Letter{MessageID: "m", Reason: "permanent"})
		third := f.add(t, dlqstore.Letter{MessageID: "m", Reason: "failed"})
		expect(first, second)
		expect(second, third)
		expect(third, 0)
		none := end(dlqstore.Letter{Reason: "no-message-id"})
		again := f.add(t, dlqstore.Letter{MessageID: "letter-" + strconv.FormatInt(none, 10), Reason: "failed"})
		expect(none, again)
		// A relay's: of the same row.
		relays := end(dlqstore.Letter{MessageID: "r", Reason: "refused"})
		wrong, right := f.add(t, dlqstore.Letter{MessageID: "r", Reason: "refused"}), f.add(t, dlqstore.Letter{MessageID: "r", Reason: "refused"})
		f.exec(t, `update {{dead_letters}} set source = 'relay', consumer = '', created_at = died_at, lane = 3, row_id = case when id = $1 then 8 else 7 end where id in ($1, $2, $3)`, wrong, relays, right)
		expect(relays, right)
	})
}

func TestStore_CountsWhatNobodyCarriesOut(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		var ids []int64
		for range 4 {
			ids = append(ids, f.add(t, dlqstore.Letter{}))
		}
		_, err := f.Replay(t.Context(), ids[:3], "ada", "")
		must(t, err)
		ago := map[oncemill.Dialect]string{oncemill.SQLite: "300000000", oncemill.PostgreSQL: "interval '5 minutes'"}[f.where.Dialect]
		f.exec(t, `update {{dead_letters}} set acted_at = acted_at - `+ago+` where id in ($1, $2)`, ids[0], ids[1])
		stuck, err := f.Stuck(t.Context(), time.Minute, 10)
		if err != nil || len(stuck) != 1 || stuck[0].N != 2 || stuck[0].State != "replaying" || stuck[0].Consumer != "stock" || stuck[0].Oldest < 5*time.Minute || stuck[0].Oldest > 10*time.Minute {
			t.Errorf("%+v, %v", stuck, err)
		}
		if stuck, err := f.Stuck(t.Context(), time.Minute, 1); err != nil || len(stuck) != 1 || stuck[0].N != 1 {
			t.Errorf("of one: %+v, %v", stuck, err)
		}
		f.exec(t, `update {{dead_letters}} set state = 'held', held = $2 where id = $1`, ids[0], true)
		must(t, discard(t, f, ids[0]))
		f.exec(t, `update {{dead_letters}} set acted_at = acted_at - `+ago+` where id = $1`, ids[0])
		if stuck, err := f.Stuck(t.Context(), time.Minute, 10); err != nil || len(stuck) != 2 || stuck[0].State != "discarding" {
			t.Errorf("with a discard: %+v, %v", stuck, err)
		}
		if stuck, err := f.Stuck(t.Context(), time.Hour, 10); err != nil || len(stuck) != 0 {
			t.Errorf("within an hour: %+v, %v", stuck, err)
		}
	})
}

func TestStore_ImportsOnceWhateverIsThere(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		own := f.add(t, dlqstore.Letter{MessageID: "m", Topic: "orders", Payload: []byte("p"), Reason: "failed"})
		l, err := f.Get(t.Context(), own)
		must(t, err)
		if id, err := f.Import(t.Context(), l, "ada", "i"); err != nil || id != 0 {
			t.Errorf("its own letter again: %d, %v", id, err)
		}
		foreign := *l
		foreign.DiedAt = l.DiedAt.Add(-time.Hour)
		foreign.ID, foreign.Attempts = 4711, []dlqstore.Attempt{{foreign.DiedAt, "failed", "once"}}
		id, err := f.Import(t.Context(), &foreign, "ada", "i")
		if err != nil || id == 0 || id == 4711 {
			t.Fatalf("%d, %v", id, err)
		}
		for range 2 {
			if again, err := f.Import(t.Context(), &foreign, "bob", "i"); err != nil || again != 0 {
				t.Errorf("twice: %d, %v", again, err)
			}
		}
		got, err := f.Get(t.Context(), id)
		must(t, err)
		if got.State != "dead" || got.MessageID != "m" || string(got.Payload) != "p" || got.DiedAt != foreign.DiedAt || got.Consumer != "stock" || len(got.Attempts) != 1 || got.Fingerprint != l.Fingerprint {
			t.Errorf("%+v", got)
		}
		relays := foreign
		relays.Source, relays.Consumer, relays.Lane, relays.RowID, relays.State, relays.CreatedAt = "relay", "", 3, 7, "discarded", l.DiedAt
		relays.ActedBy, relays.ActedReason, relays.ActedAt = "old", "why", l.DiedAt
		if id, err = f.Import(t.Context(), &relays, "ada", "i"); err != nil || id == 0 {
			t.Fatalf("%d, %v", id, err)
		}
		if did, err := f.Restore(t.Context(), []int64{id}, "ada", "u"); err != nil || len(did) > 0 {
			t.Errorf("a foreign relay's letter is restored: %v, %v", did, err)
		}
		if got, err := f.Get(t.Context(), id); err != nil || got.ClosedAt.Before(got.ActedAt) || got.ActedBy != "old" || got.State != "discarded" {
			t.Errorf("%+v, %v", got, err)
		}
	})
}
