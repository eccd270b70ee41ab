package history_test

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/oncemill/oncemill/crucible/history"
)

func read(t *testing.T, dir string) (states []string) {
	t.Helper()
	err := history.Read(dir, func(r history.Record) { states = append(states, r.Process+" "+r.State) })
	if err != nil {
		t.Fatal(err)
	}
	return states
}

func write(t *testing.T, dir, process string, states ...string) {
	t.Helper()
	w, err := history.Create(dir, process)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, state := range states {
		if err := w.Add(history.Record{Event: history.EventState, State: state}); err != nil {
			t.Fatal(err)
		}
	}
}

// A kill in the middle of a write costs the line that was being written, and no other.
func TestHistory_OutlivesAKill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a", "1", "2")
	file, err := os.OpenFile(filepath.Join(dir, "a.history"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteString(`{"at":"2026-01-01T00:0`); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if got, want := read(t, dir), []string{"a 1", "a 2"}; !reflect.DeepEqual(got, want) {
		t.Errorf("after the kill: %q", got)
	}
	write(t, dir, "a", "3")
	write(t, dir, "b", "4")
	if got, want := read(t, dir), []string{"a 1", "a 2", "a 3", "b 4"}; !reflect.DeepEqual(got, want) {
		t.Errorf("after the next life: %q", got)
	}
}

func TestRead_RefusesWhatIsNoHistory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := history.Read(dir, func(history.Record) {}); err == nil {
		t.Error("nothing to read is no error")
	}
	if err := os.WriteFile(filepath.Join(dir, "a.history"), []byte("noise\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := history.Read(dir, func(history.Record) {}); err == nil {
		t.Error("a line that is no record is no error")
	}
}

func TestSumOf_TellsContentsApart(t *testing.T) {
	t.Parallel()
	sum := history.SumOf([]byte("p"), map[string]string{"a": "1", "b": ""})
	same := history.SumOf([]byte("p"), map[string]string{"b": "", "a": "1", "oncemill_id": "3/7", "_watermill_message_uuid": "x"})
	if sum != same {
		t.Error("what is added on the way counts")
	}
	for name, other := range map[string]history.Sum{
		"another payload":       history.SumOf([]byte("q"), map[string]string{"a": "1", "b": ""}),
		"a value that is gone":  history.SumOf([]byte("p"), map[string]string{"a": "1"}),
		"another value":         history.SumOf([]byte("p"), map[string]string{"a": "1", "b": "2"}),
		"a border that moved":   history.SumOf([]byte("p"), map[string]string{"a1": "", "b": ""}),
		"metadata in a payload": history.SumOf([]byte("pa1b"), nil),
	} {
		if other == sum {
			t.Errorf("%s has the same sum", name)
		}
	}
}
