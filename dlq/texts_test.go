package dlq

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestPlans_OnSQLiteEachListGoesByItsIndex(t *testing.T) {
	t.Parallel()
	db := testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "test.db"))
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, Migrations); err != nil {
		t.Fatal(err)
	}
	s, err := New(db, Config{})
	if err != nil {
		t.Fatal(err)
	}
	indexes := map[string]string{
		"died_at": "died", "message_id": "message", "key": "key", "fingerprint": "fingerprint",
		"consumer": "consumer", "topic": "topic", "state": "state",
	}
	explain := func(text, index string, args ...any) {
		t.Helper()
		rows, err := db.QueryContext(t.Context(), `explain query plan `+text, args...)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		var steps []string
		for rows.Next() {
			var id, parent, unused int
			var step string
			if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
				t.Fatal(err)
			}
			steps = append(steps, step)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		found := slices.ContainsFunc(steps, func(s string) bool {
			return strings.HasPrefix(s, "SEARCH oncemill_dead_letters") && strings.Contains(s, index)
		})
		if !found || strings.Contains(strings.Join(steps, " "), "TEMP B-TREE") {
			t.Errorf("want index %s: %q\n%s", index, steps, text)
		}
	}
	for driver, index := range indexes {
		for _, text := range s.texts.lists[driver] {
			args := make([]any, 13)
			for i := range args {
				args[i] = "[]"
			}
			explain(text, "oncemill_dead_letters_"+index+" ", args...)
		}
	}
	if len(s.texts.lists) != len(indexes) {
		t.Errorf("%d kinds of lists", len(s.texts.lists))
	}
	explain(s.texts.forget, "oncemill_dead_letters_closed ", 1, 1)
	for _, text := range []string{s.texts.replay, s.texts.discard} {
		explain(text, "INTEGER PRIMARY KEY", "[1]", "a", "b")
	}
}
