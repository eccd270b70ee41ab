package inbox_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/inbox"
)

func TestInbox_ArchivesIDsBeforeItRemovesThem(t *testing.T) {
	t.Parallel()
	for name, open := range testDBs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t)
			names, exec, ago := purgeable(t, p)
			exec(`insert into {{inbox}} (consumer, message_id, received_at) values
				('stock', 'old', ` + ago("3") + `), ('stock', 'ol"d\', ` + ago("4") + `), ('stock', 'new', ` + ago("1") + `), ('mail', 'old', ` + ago("3") + `)`)
			exec(`insert into {{inbox}} (consumer, message_id, received_at, dead) values ('stock', 'dead', ` + ago("3") + `, true)`)
			exec(`insert into {{inbox_failures}} (consumer, message_id, changed_at) values ('stock', 'failed', ` + ago("3") + `)`)
			left := func() (n int) {
				t.Helper()
				if err := p.db.QueryRowContext(t.Context(), names.Expand(`select count(*) from {{inbox}}`)).Scan(&n); err != nil {
					t.Fatal(err)
				}
				return n
			}
			var kept []inbox.ArchivedID
			var fail error
			bad := true
			in, err := inbox.New(p.db, inbox.Config{Database: p.cfg, Consumer: "stock", Retention: 2 * time.Hour, Archive: func(_ context.Context, ids []inbox.ArchivedID) error {
				switch {
				case bad:
					panic("no shelf")
				case fail == nil:
					kept = append(kept, ids...)
				}
				return fail
			}})
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if _, err := in.Purge(t.Context()); err == nil || left() != 5 {
					t.Errorf("the archive failed: %d left, %v", left(), err)
				}
				bad, fail = false, errors.New("full")
			}
			fail = nil
			if more, err := in.Purge(t.Context()); err != nil || more || left() != 3 {
				t.Errorf("%d left, more %t, %v", left(), more, err)
			}
			if len(kept) != 2 || kept[0].MessageID != `ol"d\` || kept[1].MessageID != "old" || kept[0].Consumer != "stock" || time.Since(kept[1].ReceivedAt) < 2*time.Hour || time.Since(kept[1].ReceivedAt) > 5*time.Hour {
				t.Errorf("archived %+v", kept)
			}
			kept = nil
			archive := func(_ context.Context, ids []inbox.ArchivedID) error { kept = append(kept, ids...); return nil }
			purged, err := inbox.PurgeAllArchived(t.Context(), p.db, p.cfg, 2*time.Hour, archive)
			if err != nil || len(kept) != 1 || kept[0].Consumer != "mail" || len(purged) != 2 || left() != 2 {
				t.Errorf("%+v, archived %+v, %d left, %v", purged, kept, left(), err)
			}
		})
	}
}

// The archive fails for one handler of a router. The ids of the others are removed, and also what
// is not archived of that one.
func TestInbox_AnArchiveThatFailsForAHandlerStopsNoOther(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		names, exec, ago := purgeable(t, p)
		for _, consumer := range []string{"stock", "stock/a", "stock/b"} {
			exec(`insert into {{inbox}} (consumer, message_id, received_at) values ('` + consumer + `', 'old', ` + ago("3") + `)`)
			exec(`insert into {{inbox_failures}} (consumer, message_id, changed_at) values ('` + consumer + `', 'failed', ` + ago("3") + `)`)
		}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.Retention = 2 * time.Hour
			cfg.Archive = func(_ context.Context, ids []inbox.ArchivedID) error {
				if ids[0].Consumer != "stock/b" {
					return errors.New("full for " + ids[0].Consumer)
				}
				return nil
			}
		})
		for _, name := range []string{"a", "b"} {
			_, err := in.PerHandler(effect)(routedTo(t, name, "new", "results"))
			expectNoError(t, err)
		}
		more, err := in.Purge(t.Context())
		if err == nil || more || !strings.Contains(err.Error(), "full for stock/a") || !strings.Contains(err.Error(), "full for stock\n") {
			t.Errorf("more %t, error %v", more, err)
		}
		count := func(query string) (n int) {
			t.Helper()
			if err := p.db.QueryRowContext(t.Context(), names.Expand(query)).Scan(&n); err != nil {
				t.Fatal(err)
			}
			return n
		}
		if n := count(`select count(*) from {{inbox}} where message_id = 'old' and consumer = 'stock/b'`); n != 0 {
			t.Error("the archived id is still there")
		}
		if n := count(`select count(*) from {{inbox}} where message_id = 'old'`); n != 2 {
			t.Errorf("%d ids that are not archived are left", n)
		}
		if n := count(`select count(*) from {{inbox_failures}}`); n != 0 {
			t.Errorf("%d records of failures are left", n)
		}
	})
}

// An id that somebody has locked keeps no other from being archived and removed.
func TestInbox_ArchivesIDsBesideOneThatIsLocked(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	names, exec, ago := purgeable(t, p)
	exec(`insert into {{inbox}} (consumer, message_id, received_at) select 'stock', 'm' || i, ` + ago("3") + ` + i * interval '1 microsecond' from generate_series(1, 2500) i`)
	tx, err := p.db.BeginTx(t.Context(), nil)
	expectNoError(t, err)
	defer tx.Rollback() //nolint:errcheck // it has written nothing
	_, err = tx.ExecContext(t.Context(), names.Expand(`select from {{inbox}} where message_id = 'm1' for update`))
	expectNoError(t, err)
	kept := map[string]bool{}
	archive := func(_ context.Context, ids []inbox.ArchivedID) error {
		for _, id := range ids {
			kept[id.MessageID] = true
		}
		return nil
	}
	purged, err := inbox.PurgeAllArchived(t.Context(), p.db, p.cfg, 2*time.Hour, archive)
	if n := p.count(t, `select count(*) from {{inbox}}`); err != nil || len(purged) != 1 || purged[0].IDs != 2499 || n != 1 || len(kept) != 2500 {
		t.Errorf("%+v, %d left, %d archived, %v", purged, n, len(kept), err)
	}
}
