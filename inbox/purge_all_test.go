package inbox_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
)

func TestPurgeAll_RemovesTheOldIDsOfEveryConsumer(t *testing.T) {
	t.Parallel()
	for name, open := range testDBs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t)
			names, err := database.Resolve(p.db, p.cfg)
			if err != nil {
				t.Fatal(err)
			}
			exec := func(text string) { t.Helper(); p.exec(t, names.Expand(text)) }
			ago := func(hours string) string { return `clock_timestamp() - interval '` + hours + ` hours'` }
			if names.Dialect == oncemill.SQLite {
				ago = func(hours string) string {
					return `cast(unixepoch('subsec') * 1000000 as integer) - ` + hours + ` * 3600000000`
				}
			} else {
				exec(`alter table {{inbox}} disable trigger user`) // the seal
			}
			exec(`insert into {{inbox}} (consumer, message_id, received_at) values
				('a', 'old', ` + ago("3") + `), ('a', 'new', ` + ago("1") + `), ('b', 'old', ` + ago("3") + `)`)
			exec(`insert into {{inbox}} (consumer, message_id, received_at, dead) values ('b', 'dead', ` + ago("3") + `, true)`)
			exec(`insert into {{inbox_failures}} (consumer, message_id, changed_at) values ('c', 'failed', ` + ago("3") + `)`)

			purged, err := inbox.PurgeAll(t.Context(), p.db, p.cfg, 2*time.Hour)
			want := []inbox.Purged{{Consumer: "a", IDs: 1}, {Consumer: "b", IDs: 1}, {Consumer: "c", Failures: 1}}
			if err != nil || !slices.Equal(purged, want) {
				t.Errorf("got %+v, want %+v, %v", purged, want, err)
			}
			var left int
			if err := p.db.QueryRowContext(t.Context(), names.Expand(`select count(*) from {{inbox}} where message_id in ('new', 'dead')`)).Scan(&left); err != nil || left != 2 {
				t.Errorf("%d ids that are needed are left, %v", left, err)
			}
			var bad *oncemill.ConfigError
			if _, err := inbox.PurgeAll(t.Context(), p.db, p.cfg, 0); !errors.As(err, &bad) {
				t.Errorf("without a retention: %v", err)
			}
		})
	}
}
