package oncemill_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

func TestMigrate_AcceptsANewerCompatibleDatabase(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		one := files("shop", makeShelf)
		two := files("shop", makeShelf, "-- compatible: 1\n"+makeBox)
		three := files("shop", makeShelf, "-- compatible: 1\n"+makeBox, "-- compatible: 2\ncreate table {{more}} (id integer)")
		if err := p.migrate(t, two); err != nil {
			t.Fatal(err)
		}
		before := p.objects(t)
		if err := errors.Join(p.migrate(t, one), oncemill.CheckMigrated(t.Context(), p.db, p.cfg, one)); err != nil {
			t.Errorf("version 1 beside tables of version 2: %v", err)
		}
		if after := p.objects(t); !slices.Equal(before, after) {
			t.Errorf("it was\n%v\nand is\n%v", before, after)
		}
		p.expectStatus(t, []oncemill.Status{{Set: "shop", Version: 2, Latest: 1, Oldest: 1}}, one)
		if err := p.migrate(t, three); err != nil {
			t.Fatal(err)
		}
		if err := oncemill.CheckMigrated(t.Context(), p.db, p.cfg, two); err != nil {
			t.Errorf("version 2 beside tables of version 3: %v", err)
		}
		for act, err := range map[string]error{"migrate": p.migrate(t, one), "check": oncemill.CheckMigrated(t.Context(), p.db, p.cfg, one)} {
			var newer *oncemill.SchemaError
			if !errors.As(err, &newer) || newer.Have != 3 || newer.Want != 1 || !strings.Contains(newer.Problem, "version 2") {
				t.Errorf("%s: version 1 beside tables of version 3: %v", act, err)
			}
		}
	})
}

// A database that a library from before rolling upgrades has migrated.
func TestMigrate_UpgradesTheTableOfVersionsInPlace(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		if err := p.migrate(t, files("shop", makeShelf)); err != nil {
			t.Fatal(err)
		}
		p.exec(t, `alter table {{migrations}} drop column compatible`)
		p.exec(t, `create table {{box}} (id integer primary key)`)
		p.exec(t, `insert into {{migrations}} (set_name, version, step_name) values ('shop', 2, 'step')`)
		two := files("shop", makeShelf, makeBox)
		p.expectStatus(t, []oncemill.Status{{Set: "shop", Version: 2, Latest: 2}}, two)
		p.expectStatus(t, []oncemill.Status{{Set: "shop", Version: 2, Latest: 1, Oldest: 2}}, files("shop", makeShelf))
		if err := p.migrate(t, files("shop", makeShelf)); err == nil {
			t.Error("a newer database of which nothing is known is accepted")
		}
		three := files("shop", makeShelf, makeBox, "-- compatible: 2\ncreate table {{more}} (id integer)")
		if err := p.migrate(t, three); err != nil {
			t.Fatal(err)
		}
		if err := oncemill.CheckMigrated(t.Context(), p.db, p.cfg, two, three); err != nil {
			t.Error(err)
		}
		got := p.list(t, `select version || ' ' || coalesce(cast(compatible as text), '-') from {{migrations}} order by 1`)
		if want := []string{"1 -", "2 -", "3 2"}; !slices.Equal(got, want) {
			t.Errorf("remembered %v, want %v", got, want)
		}
	})
}

func TestMigrate_RefusesABadLineOfCompatibility(t *testing.T) {
	t.Parallel()
	db := untouchableDB(t)
	for name, set := range map[string]oncemill.Migrations{
		"its own version": files("shop", makeShelf, "-- compatible: 2\n"+makeBox),
		"none":            files("shop", makeShelf, "-- compatible: 0\n"+makeBox),
		"of the first":    files("shop", "-- compatible: 1\n"+makeShelf),
	} {
		err := oncemill.Migrate(t.Context(), db, oncemill.Config{Dialect: oncemill.PostgreSQL}, set)
		if bad := testserver.ConfigErrors(err); len(bad) != 1 || !strings.Contains(bad[0].Problem, "compatible") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// withStep is a set of migrations of a later library, which has one step more.
func withStep(t *testing.T, set oncemill.Migrations, text string) oncemill.Migrations {
	t.Helper()
	later := fstest.MapFS{}
	for _, dialect := range []string{"postgresql", "sqlite"} {
		entries, err := fs.Glob(set.FS, dialect+"/*.sql")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range entries {
			data, err := fs.ReadFile(set.FS, name)
			if err != nil {
				t.Fatal(err)
			}
			later[name] = &fstest.MapFile{Data: data}
		}
		next := fmt.Sprintf("%s/%04d_later", dialect, len(entries)/2+1)
		later[next+".up.sql"] = &fstest.MapFile{Data: []byte(strings.ReplaceAll(text, "SET", set.Name))}
		later[next+".down.sql"] = &fstest.MapFile{Data: []byte(`select 1`)}
	}
	return oncemill.Migrations{Name: set.Name, FS: later}
}

// broker takes every message.
type broker struct {
	mu  sync.Mutex
	got map[string]int
}

func (b *broker) Publish(_ string, messages ...*message.Message) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range messages {
		b.got[m.UUID]++
	}
	return nil
}

func (b *broker) Close() error { return nil }

func (b *broker) times(id string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.got[id]
}

var eventually = testserver.Eventually

func publishOne(t *testing.T, box *outbox.Outbox, id string) {
	t.Helper()
	err := box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		return box.Publisher(tx).Publish("orders", message.NewMessage(id, nil))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The database is migrated while relays of the version before it run. They look
// at it again when they take the lease of the upkeep, here because a new owner has
// to be found for it.
func TestMigrate_ARelayOfTheFormerVersionContinues(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		sets := []oncemill.Migrations{outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations}
		if err := p.migrate(t, sets...); err != nil {
			t.Fatal(err)
		}
		box, err := outbox.New(p.db, outbox.Config{Database: p.cfg})
		if err != nil {
			t.Fatal(err)
		}
		sink := &broker{got: map[string]int{}}
		run := func() (stop func() error) {
			worker, err := relay.New(box, relay.FromPublisher(sink), relay.Config{})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- worker.Run(ctx) }()
			return func() error { cancel(); return <-ended }
		}
		first := run()
		publishOne(t, box, "before")
		eventually(t, "delivery before the migration", func() bool { return sink.times("before") == 1 })
		for i, set := range sets {
			sets[i] = withStep(t, set, fmt.Sprintf("-- compatible: %d\ncreate table {{later_SET}} (id integer)", latest(t, p, set)))
		}
		if err := p.migrate(t, sets...); err != nil {
			t.Fatal(err)
		}
		second := run() // starts on the newer database
		if err := first(); err != nil {
			t.Errorf("the first relay: %v", err)
		}
		// The second one takes the upkeep over, and looks at the database again.
		eventually(t, "the second relay has the upkeep", func() bool {
			return slices.Equal(p.list(t, `select count(*) || '' from {{relay_leases}} where lane = -1 and owner in (select owner from {{relay_workers}})`), []string{"1"})
		})
		publishOne(t, box, "after")
		eventually(t, "delivery after the migration", func() bool { return sink.times("after") == 1 })
		if err := second(); err != nil {
			t.Errorf("the second relay: %v", err)
		}
		// One that says nothing of older libraries ends them.
		if err := p.migrate(t, withStep(t, withStep(t, outbox.Migrations, "-- compatible: 1\nselect 1"), "select 1")); err != nil {
			t.Fatal(err)
		}
		var newer *oncemill.SchemaError
		worker, err := relay.New(box, relay.FromPublisher(sink), relay.Config{})
		if err != nil {
			t.Fatal(err)
		}
		if err := worker.Run(t.Context()); !errors.As(err, &newer) || newer.Set != "outbox" {
			t.Errorf("a relay on tables that it cannot work with: %v", err)
		}
	})
}

func latest(t *testing.T, p *testDB, set oncemill.Migrations) int {
	t.Helper()
	status, err := oncemill.MigrationStatus(t.Context(), p.db, p.cfg, set)
	if err != nil {
		t.Fatal(err)
	}
	return status[0].Latest
}

func TestMigrateDown_UndoesStepByStep(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		all := []oncemill.Migrations{outbox.Migrations, audit.Migrations, steer.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations, idempotency.Migrations, idempotency.QuotaMigrations}
		if err := p.migrate(t, files("shop", makeBox)); err != nil {
			t.Fatal(err)
		}
		without := p.objects(t)
		if err := p.migrate(t, all...); err != nil {
			t.Fatal(err)
		}
		for _, set := range slices.Backward(all) {
			for version := latest(t, p, set); version > 0; version-- {
				after, err := oncemill.MigrateDown(t.Context(), p.db, p.cfg, set, oncemill.DownOptions{LoseRows: true})
				if err != nil || after.Version != version-1 || after.Set != set.Name {
					t.Fatalf("%s %d: %+v, %v", set.Name, version, after, err)
				}
			}
			if _, err := oncemill.MigrateDown(t.Context(), p.db, p.cfg, set, oncemill.DownOptions{}); !errors.Is(err, oncemill.ErrNothingToUndo) {
				t.Errorf("%s: one step too many: %v", set.Name, err)
			}
		}
		if after := p.objects(t); !slices.Equal(without, withoutSequence(after)) {
			t.Errorf("it was\n%v\nand is\n%v", without, after)
		}
		if err := p.migrate(t, all...); err != nil {
			t.Error(err)
		}
	})
}

func TestMigrateDown_RefusesToLoseMessages(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		if err := p.migrate(t, outbox.Migrations); err != nil {
			t.Fatal(err)
		}
		box, err := outbox.New(p.db, outbox.Config{Database: p.cfg})
		if err != nil {
			t.Fatal(err)
		}
		publishOne(t, box, "owed")
		var lost *oncemill.DataLossError
		down := func(options oncemill.DownOptions) error {
			_, err := oncemill.MigrateDown(t.Context(), p.db, p.cfg, outbox.Migrations, options)
			return err
		}
		for down(oncemill.DownOptions{}) == nil {
		}
		before := p.objects(t)
		if err := down(oncemill.DownOptions{}); !errors.As(err, &lost) || lost.Set != "outbox" || lost.Version != 1 || !slices.Equal(lost.Tables, []string{p.expand(t, `{{outbox}}`)}) {
			t.Errorf("got %v", err)
		}
		if after := p.objects(t); !slices.Equal(before, after) || len(p.list(t, `select message_id from {{outbox}}`)) != 1 {
			t.Errorf("it was\n%v\nand is\n%v", before, after)
		}
		if err := down(oncemill.DownOptions{LoseRows: true}); err != nil || p.has(t, "outbox") {
			t.Errorf("got %v", err)
		}
	})
}

func TestMigrateDown_DoesNotChangeANewerDatabase(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		if err := p.migrate(t, files("shop", makeShelf, "-- compatible: 1\n"+makeBox)); err != nil {
			t.Fatal(err)
		}
		var newer *oncemill.SchemaError
		if _, err := oncemill.MigrateDown(t.Context(), p.db, p.cfg, files("shop", makeShelf), oncemill.DownOptions{}); !errors.As(err, &newer) || !p.has(t, "shelf") {
			t.Errorf("got %v", err)
		}
	})
}

// Any login can take an advisory lock.
func TestMigrate_NamesTheSessionWithItsLock(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	holder := testserver.Postgres(t).Open(t, "application_name=squatter")
	tx, err := holder.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	var pid int
	err = tx.QueryRowContext(t.Context(), `select pg_backend_pid() from pg_advisory_xact_lock(hashtextextended('oncemill migrate "`+p.cfg.Schema+`"', 0))`).Scan(&pid)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	err = oncemill.Migrate(ctx, p.db, p.cfg, files("shop", makeShelf))
	var locked *oncemill.MigrationLockError
	if !errors.As(err, &locked) || locked.PID != pid || locked.User == "" || locked.Application != "squatter" {
		t.Fatalf("got %v; the holder is %d", err, pid)
	}
	if left := p.objects(t); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := p.migrate(t, files("shop", makeShelf)); err != nil {
		t.Error(err)
	}
}

// A step that waits for a table blocks those who come after it.
func TestMigrate_GivesUpOnATableInUse(t *testing.T) {
	t.Parallel()
	p := testDBs["postgresql"](t)
	if err := p.migrate(t, files("shop", makeShelf)); err != nil {
		t.Fatal(err)
	}
	tx, err := p.open(t).BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(t.Context(), database.Of(p.cfg).Expand(`select * from {{shelf}}`)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	err = oncemill.Migrate(ctx, p.db, p.cfg, files("shop", makeShelf, `alter table {{shelf}} add column note text`))
	var locked *oncemill.MigrationLockError
	if !errors.As(err, &locked) || locked.PID != 0 {
		t.Errorf("got %v", err)
	}
}
