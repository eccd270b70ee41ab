package dlqstore

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestPlans_OnSQLiteEachListGoesByItsIndex(t *testing.T) {
	t.Parallel()
	db := testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "test.db"))
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, oncemill.Migrations{Name: "dlq", FS: Migrations}); err != nil {
		t.Fatal(err)
	}
	where, err := database.Resolve(db, oncemill.Config{})
	if err != nil {
		t.Fatal(err)
	}
	text := &newSQLite(db, where).text
	indexes := map[string]*Filter{
		"died": {}, "message": {MessageID: "m"}, "key": {Key: "k"}, "fingerprint": {Fingerprint: "f"},
		"consumer": {Consumer: "c"}, "topic": {Topic: "t"}, "state": {States: []string{"dead"}},
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
	seen := map[string]bool{}
	for index, filter := range indexes {
		by := text.by(filter)
		for _, list := range []string{by.newest, by.oldest} {
			args := make([]any, 13)
			for i := range args {
				args[i] = "[]"
			}
			explain(list, "oncemill_dead_letters_"+index+" ", args...)
			seen[list] = true
		}
	}
	if len(seen) != 14 {
		t.Errorf("%d kinds of lists", len(seen))
	}
	explain(text.Purge, "oncemill_dead_letters_closed ", 1, 1)
	for _, command := range []string{text.Replay, text.Discard} {
		explain(command, "INTEGER PRIMARY KEY", "[1]", "a", "b")
	}
}
