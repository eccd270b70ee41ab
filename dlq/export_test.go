package dlq_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
)

func (p *testDB) export(t *testing.T, f dlq.Filter) string {
	t.Helper()
	var out bytes.Buffer
	n, err := p.Export(t.Context(), &out, f)
	if err != nil || n != strings.Count(out.String(), "\n") {
		t.Fatalf("exported %d of %d lines, %v", n, strings.Count(out.String(), "\n"), err)
	}
	return out.String()
}

// lines decodes an export without what differs between databases.
func lines(t *testing.T, text string) (all []dlq.Line) {
	t.Helper()
	for line := range strings.Lines(text) {
		var l dlq.Line
		must(t, json.Unmarshal([]byte(line), &l))
		l.ID, l.ClosedAt = 0, nil
		all = append(all, l)
	}
	return all
}

func TestExport_GoesIntoAnotherDatabaseOnce(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		other := newTestDB(t, testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "other.db")), oncemill.Config{})
		p.write(t, letter{source: "consumer", consumer: "stock", key: "k\x1b\u009b\u202e", messageID: "a", died: 3 * time.Hour})
		p.write(t, letter{source: "consumer", consumer: "stock", messageID: "b", state: "discarded", died: 2 * time.Hour})
		p.write(t, letter{messageID: "c", state: "replayed", died: time.Hour})
		text := p.export(t, dlq.Filter{})
		if strings.ContainsAny(text, "\x1b\u009b\u202e") {
			t.Errorf("a terminal would act on %q", text)
		}
		for range 2 {
			for round, to := range []*testDB{p, other} {
				done, err := to.Import(t.Context(), strings.NewReader(text), ada)
				if want := (dlq.Imported{Added: 3}); err != nil || round == 1 && done != want && done.Existing != 3 || round == 0 && done.Existing != 3 {
					t.Errorf("imported %+v, %v", done, err)
				}
			}
		}
		back := other.export(t, dlq.Filter{})
		if want, got := lines(t, text), lines(t, back); !reflect.DeepEqual(got, want) {
			t.Errorf("exported\n%s\nand from the other database\n%s", text, back)
		}
		if done, err := p.Import(t.Context(), strings.NewReader(back), ada); err != nil || done.Existing != 3 {
			t.Errorf("its own letters from the other database: %+v, %v", done, err)
		}
		log, err := audit.New(other.db, audit.Config{})
		must(t, err)
		entries, err := log.List(t.Context(), audit.Filter{Action: "dead_letter.import", By: "ada"})
		if err != nil || len(entries) != 3 || entries[0].Reason != ada.Reason {
			t.Errorf("audited %+v, %v", entries, err)
		}
	})
}

func TestExport_WritesWhatTheFilterSelects(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		const many = 250
		p.exec(t, `insert into {{dead_letters}} (source, consumer, topic, message_id, payload, reason, error, fingerprint)
			with recursive n (i) as (select 1 union all select i + 1 from n where i < $1)
			select 'consumer', 'stock', 'topic ' || (i % 2), 'm' || i, 'x', 'failed', '', 'f' from n`, many)
		for want, f := range map[int]dlq.Filter{many: {}, many / 2: {Topic: "topic 1"}, 130: {Limit: 130}, 0: {Consumer: "mail"}} {
			if got := lines(t, p.export(t, f)); len(got) != want {
				t.Errorf("%+v: %d lines", f, len(got))
			} else if !slices.IsSortedFunc(got, func(a, b dlq.Line) int { return a.DiedAt.Compare(b.DiedAt) }) {
				t.Errorf("%+v: not in the order of times", f)
			}
		}
		var bad *oncemill.ConfigError
		if _, err := p.Export(t.Context(), io.Discard, dlq.Filter{Limit: -1}); !errors.As(err, &bad) {
			t.Errorf("got %v", err)
		}
		if n, err := p.Export(t.Context(), full{}, dlq.Filter{}); !errors.Is(err, errFull) || n == 0 {
			t.Errorf("to a full disk: %d, %v", n, err)
		}
	})
}

var errFull = errors.New("disk full")

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }

func TestExport_HoldsEditsAndNotes(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		id := p.write(t, letter{source: "consumer", consumer: "stock"})
		must(t, p.AddNote(t.Context(), id, ada))
		must(t, p.ReplayEdited(t.Context(), id, dlq.Edit{Payload: []byte("new")}, ada))
		text := p.export(t, dlq.Filter{})
		l := lines(t, text)[0]
		if l.Edit == nil || string(l.Edit.Payload) != "new" || l.Edit.By != "ada" || !l.Edit.InUse || string(l.Payload) != "payload" || len(l.Notes) != 1 || l.Notes[0].Text != ada.Reason || l.Act.By != "ada" {
			t.Errorf("%+v", l)
		}
		token, err := p.stored.ReplayToken(t.Context(), id)
		must(t, err)
		if strings.Contains(text, token) {
			t.Error("the token is exported")
		}
	})
}

// line returns a line of an import with some fields changed.
func line(t *testing.T, change map[string]any) string {
	t.Helper()
	fields := map[string]any{
		"v": 1, "state": "dead", "source": "consumer", "consumer": "stock", "topic": "orders", "message_id": "m", "payload": "eA==",
		"died_at": "2026-01-02T03:04:05.678Z", "reason": "failed", "error": "x", "tries": 1,
	}
	for name, value := range change {
		if fields[name] = value; value == nil {
			delete(fields, name)
		}
	}
	text, err := json.Marshal(fields)
	must(t, err)
	return string(text) + "\n"
}

func TestImport_RefusesBadLinesByTheirNumber(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		bad := []string{
			"no JSON\n", "[]\n", `{"v":1}` + "\n", line(t, map[string]any{"v": 2}), line(t, map[string]any{"v": nil}),
			line(t, map[string]any{"state": "alive"}), line(t, map[string]any{"source": "me"}), line(t, map[string]any{"consumer": nil}),
			line(t, map[string]any{"payload": nil}), line(t, map[string]any{"payload": "?"}), line(t, map[string]any{"died_at": nil}),
			line(t, map[string]any{"died_at": "0001-01-01T00:00:00Z"}), line(t, map[string]any{"reason": ""}),
			line(t, map[string]any{"consumer": strings.Repeat("x", 3000)}), line(t, map[string]any{"topic": strings.Repeat("x", 5000)}),
			line(t, map[string]any{"source": "relay", "consumer": nil, "lane": 32, "created_at": "2026-01-01T00:00:00Z"}),
			line(t, map[string]any{"source": "relay", "consumer": nil, "lane": 3, "state": "replayed"}),
			line(t, map[string]any{"act": map[string]any{"by": "x"}}),
		}
		good := line(t, nil)
		done, err := p.Import(t.Context(), strings.NewReader(strings.Join(bad, "")+"\n"+good), ada)
		if want := (dlq.Imported{Added: 1, Failed: len(bad)}); done != want {
			t.Errorf("%+v, want %+v", done, want)
		}
		var numbers []int
		for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
			if l := (*dlq.LineError)(nil); errors.As(e, &l) {
				numbers = append(numbers, l.Line)
			}
		}
		for i := range bad {
			if !slices.Contains(numbers, i+1) {
				t.Errorf("line %d is not reported: %.100s", i+1, bad[i])
			}
		}
		// Many are reported in a few lines.
		done, err = p.Import(t.Context(), strings.NewReader(strings.Repeat("x\n", 1000)), ada)
		if done.Failed != 1000 || strings.Count(err.Error(), "\n") != 20 || !strings.Contains(err.Error(), "and 980 more") {
			t.Errorf("%+v, %v", done, err)
		}
		for _, act := range []dlq.Act{{Reason: "x"}, {By: "x"}} {
			if _, err := p.Import(t.Context(), strings.NewReader(good), act); !errors.Is(err, dlq.ErrNoActor) && !errors.Is(err, dlq.ErrNoReason) {
				t.Errorf("%+v: %v", act, err)
			}
		}
	})
}

// Nothing in a line makes a message a replay, and nothing open of another outbox comes in.
func TestImport_CannotForgeReplays(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		secret := strings.Repeat("a", 32)
		done, err := p.Import(t.Context(), strings.NewReader(line(t, map[string]any{
			"state": "replaying", "token": secret, "edit_token": secret, "edited": true, "id": 1, "held": true,
			"metadata": map[string]string{"oncemill_replay": "1", "oncemill_token": secret, "oncemill_consumer": "stock", "a": "b"},
			"edit":     map[string]any{"payload": "eQ==", "in_use": true, "by": "x", "at": "2026-01-01T00:00:00Z"},
		})), ada)
		if err != nil || done.Added != 1 {
			t.Fatalf("%+v, %v", done, err)
		}
		list, err := p.List(t.Context(), dlq.Filter{})
		must(t, err)
		l, err := p.Get(t.Context(), list[0].ID)
		must(t, err)
		if l.State != dlq.StateDead || len(l.Metadata) != 1 || l.Edited != nil {
			t.Errorf("%+v", l)
		}
		if _, err := p.stored.CheckReplay(t.Context(), l.ID, secret); !errors.Is(err, dlq.ErrNotFound) {
			t.Errorf("its token is known: %v", err)
		}
		_, err = p.Replay(t.Context(), []int64{l.ID}, ada)
		must(t, err)
		if token, err := p.stored.ReplayToken(t.Context(), l.ID); err != nil || token == secret {
			t.Errorf("token %q, %v", token, err)
		}
		for _, state := range []string{"dead", "held", "replaying", "discarding"} {
			relays := line(t, map[string]any{"source": "relay", "consumer": nil, "lane": 3, "row_id": 7, "created_at": "2026-01-01T00:00:00Z", "state": state})
			if done, err := p.Import(t.Context(), strings.NewReader(relays), ada); !errors.Is(err, dlq.ErrImportRelay) || done.Failed != 1 {
				t.Errorf("%s: %+v, %v", state, done, err)
			}
		}
	})
}

func TestImport_TwoAtOnceAddEachLetterOnce(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		var text strings.Builder
		const n = 30
		for i := range n {
			text.WriteString(line(t, map[string]any{"message_id": fmt.Sprint("m", i)}))
		}
		var mu sync.Mutex
		total := dlq.Imported{}
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				done, err := p.Import(t.Context(), strings.NewReader(text.String()), ada)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				total.Added, total.Existing = total.Added+done.Added, total.Existing+done.Existing
			})
		}
		group.Wait()
		if total.Added != n || total.Existing != 3*n {
			t.Errorf("%+v", total)
		}
	})
}

// A line that is too long is skipped without being kept.
func TestImport_SkipsALineThatIsTooLong(t *testing.T) {
	t.Parallel()
	p := newTestDB(t, testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "test.db")), oncemill.Config{})
	long := io.LimitReader(endless{}, 200<<20)
	done, err := p.Import(t.Context(), io.MultiReader(long, strings.NewReader("\n"+line(t, nil))), ada)
	var wrong *dlq.LineError
	if !errors.As(err, &wrong) || wrong.Line != 1 || done.Added != 1 {
		t.Errorf("%+v, %v", done, err)
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

// Lines that a stranger has written are refused one by one.
func TestImport_RefusesHostileLines(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		bad := []string{
			line(t, map[string]any{"attempts": []any{map[string]any{"at": "9999-12-31T23:59:59-14:00"}}}), line(t, map[string]any{"attempts": []any{map[string]any{}}}),
			line(t, map[string]any{"attempts": map[string]any{}}), line(t, map[string]any{"attempts": []any{1}}), line(t, map[string]any{"metadata": []any{}}),
			line(t, map[string]any{"metadata": map[string]any{"a": strings.Repeat("x", 17<<20)}}),
			line(t, map[string]any{"source": "relay", "consumer": nil, "lane": 3, "created_at": "2026-01-01T00:00:00Z", "topic": "a\x00", "message_id": "b\x00"}),
		}
		for i, text := range bad {
			done, err := p.Import(t.Context(), strings.NewReader(text+line(t, map[string]any{"message_id": fmt.Sprint(i)})), ada)
			var wrong *dlq.LineError
			if want := (dlq.Imported{Added: 1, Failed: 1}); done != want || !errors.As(err, &wrong) || wrong.Line != 1 {
				t.Errorf("%.100s: %+v, %v", text, done, err)
			}
		}
	})
}

// What an import has added can be shown and exported, whatever the line was.
func TestImport_AddsNothingThatCannotBeExported(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		many := make([]any, 1000)
		for i := range many {
			many[i] = map[string]any{"at": "2026-01-01T00:00:00Z", "class": "c\x00", "error": "e\x00"}
		}
		done, err := p.Import(t.Context(), strings.NewReader(line(t, map[string]any{"created_at": "9999-12-31T23:59:59-14:00", "attempts": many})+
			line(t, map[string]any{"message_id": "n", "created_at": "0000-01-01T00:00:00+14:00", "attempts": nil, "edit": 7, "notes": "x"})), ada)
		if err != nil || done.Added != 2 {
			t.Fatalf("%+v, %v", done, err)
		}
		if got := lines(t, p.export(t, dlq.Filter{})); len(got) != 2 || len(got[0].Attempts) != 10 || got[0].CreatedAt != nil || len(got[1].Attempts) > 0 {
			t.Errorf("%+v", got)
		}
	})
}

// A line of a few megabytes takes no gigabytes.
func TestImport_TakesNoMemoryForWhatItLeavesOut(t *testing.T) {
	p := newTestDB(t, testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "test.db")), oncemill.Config{})
	const n = 1 << 20
	at := `{"at":"2026-01-01T00:00:00Z"},`
	hostile := strings.TrimSuffix(line(t, nil), "}\n") + `,"notes":[` + strings.Repeat("{},", n) + `{}],"attempts":[` + strings.Repeat(at, 10) + strings.Repeat("{},", n) + `{}]}`
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	done, err := p.Import(t.Context(), strings.NewReader(hostile), ada)
	runtime.ReadMemStats(&after)
	if err != nil || done.Added != 1 {
		t.Fatalf("%+v, %v", done, err)
	}
	if took := after.TotalAlloc - before.TotalAlloc; took > 10*uint64(len(hostile)) {
		t.Errorf("a line of %d bytes took %d", len(hostile), took)
	}
}

// What was imported before an error of the reader stays.
func TestImport_KeepsWhatCameBeforeAnError(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		r, w := io.Pipe()
		go func() {
			out := bufio.NewWriter(w)
			fmt.Fprint(out, line(t, nil), line(t, map[string]any{"message_id": "n"}))
			out.Flush()
			w.CloseWithError(errFull)
		}()
		done, err := p.Import(t.Context(), r, ada)
		if !errors.Is(err, errFull) || done.Added != 2 {
			t.Errorf("%+v, %v", done, err)
		}
	})
}
