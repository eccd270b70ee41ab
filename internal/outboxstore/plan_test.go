package outboxstore_test

import (
	"bytes"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/statements/plantest"
)

// ofOldDay are the statements, those of a day as of a day that exists.
func ofOldDay(t *testing.T) fs.FS {
	t.Helper()
	files := fstest.MapFS{}
	must(t, fs.WalkDir(outboxstore.Files, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(outboxstore.Files, path)
		if strings.HasSuffix(path, "history.sql") {
			content = bytes.ReplaceAll(content, []byte("#"), []byte(oldDay))
		}
		files[path] = &fstest.MapFile{Data: content}
		return err
	}))
	return files
}

// fill writes rows into all tables, and into all partitions of the ring.
func (f *fixture) fill(t *testing.T) {
	t.Helper()
	const rows = `with recursive n (i) as (select 1 union all select i + 1 from n where i < 40000) `
	id := `1 + i % 5000 + (i / 5000) * 65536`
	times := `i * 1000000`
	if !f.isSQLite() {
		times = `timestamptz 'epoch' + i * interval '1 second'`
	}
	f.exec(t, `insert into {{outbox}} (id, lane, topic, message_id, key, payload) `+rows+`select `+id+`, i % 32, 'orders', 'm' || i, 'key ' || (i % 1000), '' from n`)
	f.exec(t, `insert into {{scheduled}} (lane, topic, message_id, key, payload, deliver_at) `+rows+`select i % 32, 'orders', 'm' || i, 'key ' || (i % 1000), '', `+times+` from n`)
	relayed := time.Date(2024, 2, 29, 0, 0, 0, 0, time.UTC)
	f.remove(t, refs(f.insert(t, "history")[:1]), true)
	f.age(t)
	const history = `insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at) `
	if f.isSQLite() {
		f.exec(t, history+rows+`select i, i % 32, 'orders', 'm' || i, 'key ' || (i % 1000), '', '', 0, $1 + i * 1000000 from n`, relayed.UnixMicro())
	} else {
		f.exec(t, history+rows+`select i, i % 32, 'orders', 'm' || i, 'key ' || (i % 1000), '', '', 'epoch', $1::timestamptz + i * interval '1 second' from n`, relayed)
	}
	for _, table := range []string{"outbox", "scheduled", "outbox_history"} { // alone: others fill tables of the server
		f.exec(t, `analyze {{`+table+`}}`)
	}
}

func TestPlans_NoStatementScansATable(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.fill(t)
		plantest.Check(t, f.db, f.where, ofOldDay(t))
	})
}

func TestPlans_FailWithoutAnIndex(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		f.fill(t)
		drops := map[string][]string{
			`drop index {{name:outbox_lane}}`:            {"read", "backlog"},
			`drop index {{name:outbox_history_by_time}}`: {"purge", "has_expired", "archive_read"},
			`drop index {{name:scheduled_by_time}}`:      {"next_due", "choose_due", "backlog_scheduled"},
			`drop index {{name:scheduled_by_message}}`:   {"cancel"},
		}
		if !f.isSQLite() {
			drops = map[string][]string{
				`alter table {{outbox_1}} drop constraint {{name:outbox_1_pkey}}`:   {"delete", "move", "read_large", "backlog"},
				`alter table {{scheduled}} drop constraint {{name:scheduled_pkey}}`: {"next_due", "move_due", "backlog_scheduled"},
				`drop index {{outbox_history_by_id}}`:                               {"archive_read", "archive_delete"},
			}
		}
		for drop, statements := range drops {
			f.exec(t, drop)
			faults := "\n" + strings.Join(plantest.Faults(t, f.db, f.where, ofOldDay(t)), "\n")
			for _, name := range statements {
				if !strings.Contains(faults, "\n"+name+": ") {
					t.Errorf("after %s, %s has no fault: %s", drop, name, faults)
				}
			}
		}
	})
}
