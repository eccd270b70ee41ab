package dlq_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
)

func TestStore_RefusesEditsThatCannotBeDelivered(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		consumers := func(metadata string) int64 {
			id := p.write(t, letter{source: "consumer", consumer: "stock"})
			p.exec(t, `update {{dead_letters}} set metadata = $1 where id = $2`, []byte(metadata), id)
			return id
		}
		plain := consumers(`{"a":"b","oncemill_key":"k"}`)
		many := message.Metadata{}
		for i := range 300 {
			many[strings.Repeat("x", i+1)] = ""
		}
		for name, c := range map[string]struct {
			id   int64
			edit dlq.Edit
		}{
			"a relay's":         {p.write(t, letter{}), dlq.Edit{}},
			"a held one":        {p.write(t, letter{state: "held"}), dlq.Edit{}},
			"encrypted":         {consumers(`{"oncemill_encoding":"gzip,aes-256-gcm;k"}`), dlq.Edit{}},
			"signed":            {consumers(`{"oncemill_signature":"hmac-sha256;k;;x"}`), dlq.Edit{}},
			"payload too large": {plain, dlq.Edit{Payload: make([]byte, 16<<20+1)}},
			"too much metadata": {plain, dlq.Edit{Metadata: many}},
			"a large value":     {plain, dlq.Edit{Metadata: message.Metadata{"a": strings.Repeat("x", 17<<10)}}},
			"a line break":      {plain, dlq.Edit{Metadata: message.Metadata{"a": "b\r\nc: d"}}},
			"NUL":               {plain, dlq.Edit{Metadata: message.Metadata{"a\x00": "b"}}},
			"no UTF-8":          {plain, dlq.Edit{Metadata: message.Metadata{"a": "\xff"}}},
			"reserved":          {plain, dlq.Edit{Metadata: message.Metadata{"oncemill_token": "x"}}},
			"reserved, upper":   {plain, dlq.Edit{Metadata: message.Metadata{"Oncemill_Token": "x"}}},
			"another key":       {plain, dlq.Edit{Metadata: message.Metadata{"oncemill_key": "l"}}},
		} {
			var refused *dlq.EditError
			if err := p.ReplayEdited(t.Context(), c.id, c.edit, ada); !errors.As(err, &refused) || refused.ID != c.id || refused.Problem == "" {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := p.ReplayEdited(t.Context(), plain, dlq.Edit{}, dlq.Act{By: "ada"}); !errors.Is(err, dlq.ErrNoReason) {
			t.Errorf("without a reason: %v", err)
		}
		if err := p.ReplayEdited(t.Context(), plain, dlq.Edit{}, dlq.Act{Reason: "x"}); !errors.Is(err, dlq.ErrNoActor) {
			t.Errorf("by nobody: %v", err)
		}
		if err := p.ReplayEdited(t.Context(), 999, dlq.Edit{}, ada); !errors.Is(err, dlq.ErrNotFound) {
			t.Errorf("not there: %v", err)
		}
		p.expectStates(t, []int64{plain}, dlq.StateDead)
		must(t, p.ReplayEdited(t.Context(), plain, dlq.Edit{Payload: []byte{}, Metadata: message.Metadata{"oncemill_key": "k"}}, ada))
		l, err := p.Get(t.Context(), plain)
		must(t, err)
		if l.State != dlq.StateReplaying || !bytes.Equal(l.Payload, []byte("payload")) || len(l.Edited.Payload) != 0 || len(l.Edited.Metadata) != 1 || l.Edited.Metadata["oncemill_key"] != "k" || l.Act != ada {
			t.Errorf("%+v, %+v", l, l.Edited)
		}
		var state *dlq.StateError
		if err := p.ReplayEdited(t.Context(), plain, dlq.Edit{}, ada); !errors.As(err, &state) || state.Action != "edited" {
			t.Errorf("twice: %v", err)
		}
	})
}

// What an edit leaves out stays as it was.
func TestStore_AnEditKeepsWhatItDoesNotName(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		a, b := p.write(t, letter{source: "consumer", consumer: "stock"}), p.write(t, letter{source: "consumer", consumer: "stock"})
		must(t, p.ReplayEdited(t.Context(), a, dlq.Edit{Metadata: message.Metadata{"a": "c"}}, ada))
		must(t, p.ReplayEdited(t.Context(), b, dlq.Edit{Payload: []byte("other")}, ada))
		first, err := p.Get(t.Context(), a)
		must(t, err)
		second, err := p.Get(t.Context(), b)
		must(t, err)
		if string(first.Edited.Payload) != "payload" || len(first.Edited.Metadata) != 1 || string(second.Edited.Payload) != "other" || len(second.Edited.Metadata) != 2 {
			t.Errorf("%+v and %+v", first.Edited, second.Edited)
		}
	})
}

func TestStore_UndoesADiscard(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		dead, held := p.write(t, letter{}), p.write(t, letter{state: "held"})
		for _, id := range []int64{dead, held} {
			var state *dlq.StateError
			if err := p.Restore(t.Context(), id, ada); !errors.As(err, &state) || state.Action != "restored" {
				t.Errorf("nothing to undo: %v", err)
			}
			must(t, p.Discard(t.Context(), id, ada))
			if err := p.Restore(t.Context(), id, dlq.Act{By: "ada"}); !errors.Is(err, dlq.ErrNoReason) {
				t.Errorf("without a reason: %v", err)
			}
			must(t, p.Restore(t.Context(), id, dlq.Act{By: "bob", Reason: "a mistake"}))
		}
		p.expectStates(t, []int64{dead, held}, dlq.StateDead, dlq.StateHeld)
		if err := p.Restore(t.Context(), 999, ada); !errors.Is(err, dlq.ErrNotFound) {
			t.Errorf("not there: %v", err)
		}
		accepted, err := p.Replay(t.Context(), []int64{dead, held}, ada)
		if err != nil || len(accepted) != 2 {
			t.Errorf("replayed %v, %v", accepted, err)
		}
	})
}

func TestStore_NotesAreKeptWithTheLetter(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		id := p.write(t, letter{state: "replayed"})
		must(t, p.AddNote(t.Context(), id, dlq.Act{By: "ada", Reason: "called the customer"}))
		must(t, p.AddNote(t.Context(), id, dlq.Act{By: "bob", Reason: "refunded"}))
		if err := p.AddNote(t.Context(), id, dlq.Act{By: "bob"}); !errors.Is(err, dlq.ErrNoReason) {
			t.Errorf("no text: %v", err)
		}
		if err := p.AddNote(t.Context(), 999, ada); !errors.Is(err, dlq.ErrNotFound) {
			t.Errorf("not there: %v", err)
		}
		notes, err := p.Notes(t.Context(), id)
		if err != nil || len(notes) != 2 || notes[0].By != "ada" || notes[0].Text != "called the customer" || notes[1].By != "bob" {
			t.Errorf("%+v, %v", notes, err)
		}
	})
}
