package txhandle

import (
	"testing"

	"github.com/oncemill/oncemill"
)

func TestFilter_FindsWhatChangesSettings(t *testing.T) {
	t.Parallel()
	for dialect, texts := range map[oncemill.Dialect]map[string]bool{
		oncemill.PostgreSQL: {
			`set local app.tenant = 'a'`: true, `SET role app`: true, `reset role`: true, `RESET ALL`: true, `discard plans`: true,
			`set session authorization app`: true, `select 1; reset app.tenant`: true, `/* */ set local search_path to a`: true,
			`-- why` + "\n" + `reset role`: true, `select SET_CONFIG('app.tenant', 'a', true)`: true, `select '\'; reset role; --'`: true,
			`set constraints a deferred`: false, `update t set a = 1`: false, `select 'a; reset role'`: false, `-- reset role`: false,
			`select $$; reset role$$`: false, `select reset from t`: false,
		},
		oncemill.SQLite: {
			`pragma foreign_keys = off`: true, `select 1; PRAGMA defer_foreign_keys = on`: true,
			`update t set a = 1`: false, `select 'a; pragma b'`: false, `select set_config from t`: false,
		},
	} {
		for text, want := range texts {
			if got := changesSettings(dialect, text); got != want {
				t.Errorf("%s, %q: %t", dialect, text, got)
			}
		}
	}
}
