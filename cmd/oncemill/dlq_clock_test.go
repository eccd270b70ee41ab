package main

import (
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// The operator's clock is six hours ahead of the database's. Ages are those of the database.
func TestDLQCommand_GoesByTheClockOfTheDatabase(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	runner(t, []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema})(0, "migrate")
	for _, text := range []string{
		`create function {{clock_timestamp}}() returns timestamptz language sql as 'select pg_catalog.clock_timestamp() - interval ''6 hours'''`,
		`insert into {{dead_letters}} (source, consumer, topic, message_id, payload, metadata, reason, error, fingerprint, died_at)
		select 'consumer', 'stock', 'orders', 'm' || i, '', '', 'failed', '', 'f', pg_catalog.clock_timestamp() - interval '6 hours' - i * interval '1 hour' from generate_series(0, 2) i`,
	} {
		if _, err := pg.DB.ExecContext(t.Context(), database.Of(pg.Config).Expand(text)); err != nil {
			t.Fatal(err)
		}
	}
	run := runner(t, []string{"ONCEMILL_DATABASE=" + pg.URL(t, "search_path="+pg.Config.Schema+",pg_catalog"), "ONCEMILL_SCHEMA=" + pg.Config.Schema})
	if out := run(0, "dlq", "--since", "90m"); !strings.Contains(out, "m0") || !strings.Contains(out, "m1") || strings.Contains(out, "m2") {
		t.Errorf("the list has %s", out)
	}
	if out := run(0, "dlq", "export", "--until", "90m"); !strings.Contains(out, "1 dead letters exported") {
		t.Error(out)
	}
	if out := run(0, "dlq", "replay", "--until", "30m", "--dry-run"); !strings.Contains(out, "2 dead letters would be replayed") {
		t.Error(out)
	}
	run(0, "dlq", "replay", "--until", "30m", "--detach", "--reason", "x")
	var until bool
	err := pg.DB.QueryRowContext(t.Context(), database.Of(pg.Config).Expand(
		`select (filter::jsonb->'Filter'->>'Until')::timestamptz < pg_catalog.clock_timestamp() - interval '6 hours' from {{dead_letter_jobs}}`)).Scan(&until)
	if err != nil || !until {
		t.Errorf("the job replays what died after that: %v", err)
	}
}
