package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// purgeable returns the tables of a database, and what writes to them. ago is an expression for a
// time so many hours ago.
func purgeable(t *testing.T, p *testDB) (names database.Database, exec func(text string), ago func(hours string) string) {
	t.Helper()
	names, err := database.Resolve(p.db, p.cfg)
	if err != nil {
		t.Fatal(err)
	}
	exec = func(text string) { t.Helper(); p.exec(t, names.Expand(text)) }
	if names.Dialect == oncemill.SQLite {
		return names, exec, func(hours string) string {
			return `cast(unixepoch('subsec') * 1000000 as integer) - ` + hours + ` * 3600000000`
		}
	}
	exec(`alter table {{inbox}} disable trigger user`) // the seal
	return names, exec, func(hours string) string { return `clock_timestamp() - interval '` + hours + ` hours'` }
}

func TestPurgeAll_RemovesTheOldIDsOfEveryConsumer(t *testing.T) {
	t.Parallel()
	for name, open := range testDBs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t)
			names, exec, ago := purgeable(t, p)
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

// The ids of the consumer in the middle cannot be removed; those of the last are several batches.
func TestPurgeAll_GoesOnAfterAConsumerThatFails(t *testing.T) {
	t.Parallel()
	for name, open := range testDBs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t)
			names, exec, ago := purgeable(t, p)
			exec(`insert into {{inbox}} (consumer, message_id, received_at) values ('a', 'old', ` + ago("3") + `), ('b', 'old', ` + ago("3") + `), ('d', 'old', ` + ago("3") + `)`)
			exec(`insert into {{inbox}} (consumer, message_id, received_at)
				with recursive n (i) as (select 1 union all select i + 1 from n where i < 2500) select 'c', 'm' || i, ` + ago("3") + ` from n`)
			if names.Dialect == oncemill.SQLite {
				exec(`create trigger broken before delete on {{inbox}} when old.consumer in ('b', 'd') begin select raise(abort, 'broken trigger'); end`)
			} else {
				exec(`create function broken() returns trigger language plpgsql as $$ begin raise 'broken trigger'; end $$`)
				exec(`create trigger broken before delete on {{inbox}} for each row when (old.consumer in ('b', 'd')) execute function broken()`)
			}
			purged, err := inbox.PurgeAll(t.Context(), p.db, p.cfg, 2*time.Hour)
			want := []inbox.Purged{{Consumer: "a", IDs: 1}, {Consumer: "b"}, {Consumer: "c", IDs: 2500}, {Consumer: "d"}}
			if !slices.Equal(purged, want) {
				t.Errorf("got %+v, want %+v", purged, want)
			}
			if err == nil || !strings.Contains(err.Error(), `purge "b"`) || !strings.Contains(err.Error(), `purge "d"`) || !strings.Contains(err.Error(), "broken trigger") {
				t.Errorf("got error %v", err)
			}
		})
	}
}

// Of a silent server nothing is asked again: each consumer would wait as long.
func TestPurgeAll_AbandonsASilentServer(t *testing.T) {
	t.Parallel()
	for text, consumers := range map[string]int{"pg_attribute": 0, "recursive c": 0, "delete from": 1} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			p := postgres(t, "binary_parameters=yes")
			_, exec, ago := purgeable(t, p)
			exec(`insert into {{inbox}} (consumer, message_id, received_at) values ('a', 'old', ` + ago("3") + `), ('b', 'old', ` + ago("3") + `)`)
			proxy, dsn := testserver.NewPostgresProxy(t, p.dsn)
			db, err := sql.Open(testserver.DriverName(), dsn)
			expectNoError(t, err)
			t.Cleanup(func() {
				proxy.Cut()
				eventually(t, "no connection is in use", func() bool { return db.Stats().InUse == 0 })
				expectNoError(t, db.Close())
			})
			proxy.Silence(testserver.Containing(text), 1)
			ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait/2)
			defer cancel()
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				purged, err := inbox.PurgeAll(ctx, db, p.cfg, 2*time.Hour)
				if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil || testserver.DriverName() == "postgres" && len(purged) != consumers {
					t.Errorf("got %+v, %v", purged, err)
				}
			}()
			select {
			case <-ended:
			case <-ctx.Done():
				t.Error("has not ended")
				proxy.Cut()
				<-ended
			}
		})
	}
}
