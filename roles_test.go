package oncemill_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

// shop is a server whose roles have what docs/operations.md grants them.
type shop struct {
	admin, owner, producer, stock, operator, editor, observer, api, keeper *sql.DB

	box      *outbox.Outbox // the relay's
	shelf    *outbox.Outbox // the producer's
	onward   *outbox.Outbox // the consumer's
	letters  *dlq.Store     // the operator's
	consumer *inbox.Inbox   // named stock
	broker   *choosy
}

// choosy is a broker that refuses some messages, and what was published there.
type choosy struct {
	mu      sync.Mutex
	refuses map[string]bool
	got     map[string][]*message.Message // by UUID
}

func (b *choosy) Publish(_ string, messages ...*message.Message) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range messages {
		if b.refuses[m.UUID] {
			return relay.Refused(errors.New("not here"))
		}
		b.got[m.UUID] = append(b.got[m.UUID], m)
	}
	return nil
}

func (b *choosy) Close() error { return nil }

func (b *choosy) refuse(yes bool, ids ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, id := range ids {
		b.refuses[id] = yes
	}
}

func (b *choosy) published(id string) []*message.Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.got[id]
}

var documentedSQL = regexp.MustCompile("(?ms)^```sql\n-- as (the administrator|shop_owner)\n(.*?)^```$")

// allSets are the migrations of all tables.
var allSets = []oncemill.Migrations{
	outbox.Migrations, audit.Migrations, steer.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations, idempotency.Migrations, idempotency.QuotaMigrations,
}

// newShop executes the SQL of the document as it stands there.
func newShop(t *testing.T) *shop {
	t.Helper()
	return newShopBy(t, testserver.PrivatePostgres(t), func(owner *sql.DB) error {
		return oncemill.Migrate(t.Context(), owner, oncemill.Config{}, allSets...)
	})
}

// newShopBy is newShop with another way to create the tables.
func newShopBy(t *testing.T, server *testserver.PostgresServer, migrate func(owner *sql.DB) error) *shop {
	t.Helper()
	must := func(_ sql.Result, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(server.Open().ExecContext(t.Context(), `create database shop`))
	s := &shop{admin: server.OpenAs("postgres", "shop"), broker: &choosy{refuses: map[string]bool{}, got: map[string][]*message.Message{}}}
	for role, db := range map[string]**sql.DB{"owner": &s.owner, "producer": &s.producer, "stock": &s.stock, "operator": &s.operator, "editor": &s.editor, "observer": &s.observer, "api": &s.api, "keeper": &s.keeper} {
		must(s.admin.ExecContext(t.Context(), `create role shop_`+role+` login password 'postgres'`))
		*db = server.OpenAs("shop_"+role, "shop")
	}
	document, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	migrated := false
	for _, block := range documentedSQL.FindAllSubmatch(document, -1) {
		db := s.admin
		if string(block[1]) == "shop_owner" {
			db = s.owner
			if !migrated {
				migrated = true
				if err := migrate(db); err != nil {
					t.Fatal(err)
				}
			}
		}
		if _, err := db.ExecContext(t.Context(), string(block[2])); err != nil {
			t.Fatalf("%v in\n%s", err, block[0])
		}
	}
	if !migrated {
		t.Fatal("docs/operations.md has no SQL of roles")
	}
	must(s.owner.ExecContext(t.Context(), `create table oncemill.effects (note text not null)`))
	must(s.owner.ExecContext(t.Context(), `grant select, insert on oncemill.effects to shop_stock`))

	quiet := slog.New(slog.DiscardHandler)
	var errs [5]error
	s.box, errs[0] = outbox.New(s.owner, outbox.Config{Logger: quiet})
	s.shelf, errs[1] = outbox.New(s.producer, outbox.Config{Logger: quiet})
	s.letters, errs[2] = dlq.New(s.operator, dlq.Config{})
	own, err := dlq.New(s.stock, dlq.Config{})
	errs[3] = err
	s.onward, err = outbox.New(s.stock, outbox.Config{Logger: quiet})
	if err := errors.Join(append(errs[:], err)...); err != nil {
		t.Fatal(err)
	}
	s.consumer, err = inbox.New(s.stock, inbox.Config{
		Consumer: "stock", Outbox: s.onward, DeadLetters: own, Logger: quiet,
		Replays: &inbox.Replays{Publisher: s.broker, Topic: func(*dlq.Letter) string { return "orders" }},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// run starts a relay as the owner. The function ends it.
func (s *shop) run(t *testing.T) (stop func()) {
	t.Helper()
	worker, err := relay.New(s.box, relay.FromPublisher(s.broker), relay.Config{Retry: relay.Retry{MaxAttempts: 1}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the relay: %v", err)
		}
	}
}

// publish publishes messages as the producer; those with a time are scheduled.
func (s *shop) publish(t *testing.T, after time.Duration, ids ...string) {
	t.Helper()
	err := s.shelf.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		for _, id := range ids {
			m := message.NewMessage(id, []byte(id))
			outbox.SetKey(m, "key of "+id)
			if after > 0 {
				outbox.SetDeliverAfter(m, after)
			}
			if err := s.shelf.Publisher(tx).Publish("orders", m); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// consume hands a message to the consumer, whose handler writes an effect, and
// publishes; it fails for good if the payload is bad.
func (s *shop) consume(t *testing.T, m *message.Message, bad bool) {
	t.Helper()
	handler := s.consumer.Middleware(func(m *message.Message) ([]*message.Message, error) {
		if bad {
			return nil, inbox.Permanent(errors.New("no such article"))
		}
		tx, ok := inbox.TxFromContext(m.Context())
		if !ok {
			return nil, errors.New("no transaction")
		}
		if _, err := tx.ExecContext(m.Context(), `insert into oncemill.effects (note) values ($1)`, m.UUID); err != nil {
			return nil, err
		}
		return nil, s.onward.ContextPublisher().Publish("orders", message.NewMessageWithContext(m.Context(), "after "+m.UUID, nil))
	})
	m = m.Copy()
	m.SetContext(t.Context())
	if _, err := handler(m); err != nil {
		t.Errorf("message %s: %v", m.UUID, err)
	}
}

func count(t *testing.T, db *sql.DB, text string, args ...any) (n int) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), text, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return n
}

// theLetter returns the only open letter of a message.
func (s *shop) theLetter(t *testing.T, messageID string) *dlq.Letter {
	t.Helper()
	var page []*dlq.Letter
	eventually(t, "the letter of "+messageID, func() (seen bool) {
		var err error
		if page, err = s.letters.List(t.Context(), dlq.Filter{MessageID: messageID, States: []dlq.State{dlq.StateDead}}); err != nil {
			t.Fatal(err)
		}
		return len(page) == 1
	})
	return page[0]
}

var grace = dlq.Act{By: "grace", Reason: "mended"}

func TestRoles_EachDoesItsJobWithTheDocumentedGrants(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for role, db := range map[string]*sql.DB{"producer": s.producer, "stock": s.stock, "operator": s.operator} {
		if err := oncemill.CheckMigrated(t.Context(), db, oncemill.Config{}, outbox.Migrations, dlq.Migrations, inbox.Migrations); err != nil {
			t.Errorf("%s: %v", role, err)
		}
	}
	s.broker.refuse(true, "sick", "hopeless")
	stop := s.run(t)

	// Publish, schedule, cancel.
	s.publish(t, 0, "one", "sick", "hopeless")
	s.publish(t, time.Second, "soon")
	s.publish(t, time.Hour, "never", "later")
	err := s.shelf.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		for id, want := range map[string]bool{"never": true, "nobody": false} {
			if canceled, err := s.shelf.CancelScheduled(ctx, tx, id); err != nil || canceled != want {
				return fmt.Errorf("cancel %s: %v, %w", id, canceled, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	eventually(t, "delivery", func() bool { return len(s.broker.published("one")) == 1 && len(s.broker.published("soon")) == 1 })

	// Dead letters of the relay: one is replayed, one discarded.
	sick, hopeless := s.theLetter(t, "sick"), s.theLetter(t, "hopeless")
	s.broker.refuse(false, "sick")
	if _, err := s.letters.Replay(t.Context(), []int64{sick.ID}, grace); err != nil {
		t.Error(err)
	}
	if err := s.letters.Discard(t.Context(), hopeless.ID, grace); err != nil {
		t.Error(err)
	}
	eventually(t, "the replay", func() bool { return len(s.broker.published("sick")) == 1 })

	// Consume, once each; a dead letter of the consumer, and its replay.
	s.consume(t, s.broker.published("one")[0], false)
	s.consume(t, s.broker.published("one")[0], false)
	s.consume(t, s.broker.published("soon")[0], true)
	eventually(t, "what the consumer published", func() bool { return len(s.broker.published("after one")) == 1 })
	dead := s.theLetter(t, "soon")
	if _, err := s.letters.Replay(t.Context(), []int64{dead.ID}, grace); err != nil {
		t.Error(err)
	}
	if n, err := s.consumer.Replay(t.Context()); err != nil || n != 1 {
		t.Errorf("replayed %d, %v", n, err)
	}
	replay := s.broker.published("soon")
	s.consume(t, replay[len(replay)-1], false)
	s.consume(t, replay[len(replay)-1], false)
	if l, err := s.letters.Get(t.Context(), dead.ID); err != nil || l.State != dlq.StateReplayed || l.Version != 3 {
		t.Errorf("after its replay: %+v, %v", l, err)
	}
	if n := count(t, s.admin, `select count(*) from oncemill.effects`); n != 2 {
		t.Errorf("%d effects, want 2", n)
	}

	// A job of the operator, which the relay runs.
	s.broker.refuse(true, "again")
	s.publish(t, 0, "again")
	again := s.theLetter(t, "again")
	s.broker.refuse(false, "again")
	if preview, err := s.letters.PreviewJob(t.Context(), dlq.JobPlan{}); err != nil || preview.Uncounted != nil {
		t.Errorf("%+v, %v", preview, err)
	}
	job, err := s.letters.StartJob(t.Context(), dlq.JobPlan{IDs: []int64{again.ID}}, dlq.Act{By: "heidi", Reason: "mended"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.letters.PauseJob(t.Context(), job.ID, dlq.Act{By: "heidi"}); err != nil {
		var ended *dlq.JobStateError
		if !errors.As(err, &ended) {
			t.Error(err)
		}
	} else if _, err := s.letters.ResumeJob(t.Context(), job.ID, dlq.Act{By: "heidi"}); err != nil {
		t.Error(err)
	}
	eventually(t, "the job", func() bool {
		j, err := s.letters.Job(t.Context(), job.ID)
		return err == nil && j.State == dlq.JobFinished && j.Replayed == 1 && len(s.broker.published("again")) == 1
	})

	// Notes, a discard that is undone, and the audit, as the operator; an edit as the editor.
	if err := errors.Join(s.letters.AddNote(t.Context(), dead.ID, grace), s.letters.Discard(t.Context(), hopeless.ID, grace)); err == nil {
		t.Error("what is discarded is discarded again")
	}
	if err := errors.Join(s.letters.Restore(t.Context(), hopeless.ID, grace), s.letters.Discard(t.Context(), hopeless.ID, grace)); err != nil {
		t.Error(err)
	}
	editors, err := dlq.New(s.editor, dlq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	s.consume(t, message.NewMessage("wrong", []byte("wrong")), true)
	wrong := s.theLetter(t, "wrong")
	edit := dlq.Edit{Payload: []byte("right")}
	if err := s.letters.ReplayEdited(t.Context(), wrong.ID, edit, grace); sqlerr.State(err) != "42501" {
		t.Errorf("an operator edits: %v", err)
	}
	if err := editors.ReplayEdited(t.Context(), wrong.ID, edit, grace); err != nil {
		t.Error(err)
	}
	if n, err := s.consumer.Replay(t.Context()); err != nil || n != 1 {
		t.Errorf("replayed %d, %v", n, err)
	}
	s.consume(t, s.broker.published("wrong")[0], false)
	if l, err := s.letters.Get(t.Context(), wrong.ID); err != nil || l.State != dlq.StateReplayed || string(l.Edited.Payload) != "right" {
		t.Errorf("after the edit: %+v, %v", l, err)
	}
	s.pauseAsOperator(t, grace)
	log, err := audit.New(s.operator, audit.Config{})
	if err != nil {
		t.Fatal(err)
	}
	entries, err := log.List(t.Context(), audit.Filter{By: grace.By, OldestFirst: true})
	var acts []string
	for _, e := range entries {
		acts = append(acts, e.Role+" "+strings.TrimPrefix(e.Action, "dead_letter."))
	}
	want := []string{
		"shop_operator replay", "shop_operator discard", "shop_operator replay", "shop_operator note",
		"shop_operator restore", "shop_operator discard", "shop_editor replay_edited",
		"shop_operator consumer.pause", "shop_operator consumer.resume", "shop_operator lane.retry",
	}
	if err != nil || !slices.Equal(acts, want) {
		t.Errorf("audited %q, %v", acts, err)
	}
	for _, text := range []string{
		`delete from oncemill.audit`, `update oncemill.audit set reason = 'another'`, `truncate oncemill.audit`,
		`insert into oncemill.audit (actor, action, subject, at) values ('x', 'x', 'x', 'yesterday')`,
		`insert into oncemill.audit (actor, action, subject, db_role) values ('x', 'x', 'x', 'shop_owner')`,
		`update oncemill.pauses set actor = 'another'`, `truncate oncemill.pauses`, `delete from oncemill.lane_commands`,
		`insert into oncemill.pauses (kind, name, actor, since) values ('topic', 'x', 'x', 'yesterday')`,
		`delete from oncemill.dead_letter_notes`, `update oncemill.dead_letter_notes set text = 'another'`,
	} {
		for role, db := range map[string]*sql.DB{"operator": s.operator, "editor": s.editor, "stock": s.stock, "producer": s.producer} {
			if _, err := db.ExecContext(t.Context(), text); sqlerr.State(err) != "42501" {
				t.Errorf("%s, as the %s: %v", text, role, err)
			}
		}
	}

	// Nobody makes a relay publish what no producer has written: neither an open dead letter of
	// a relay, nor one that could be restored.
	for _, c := range []struct {
		state, closed string
		held, refused bool
	}{
		{"dead", "null", false, true},
		{"replaying", "null", false, true},
		{"held", "null", true, true},
		{"discarded", "now()", false, true},
		{"replayed", "now()", false, true},
		{"discarded", "now()", true, false},
	} {
		_, err := s.editor.ExecContext(t.Context(), `insert into oncemill.dead_letters (state, source, lane, row_id, topic, message_id, payload, created_at, died_at, reason, error, fingerprint, held, closed_at)
			values ($1, 'relay', 3, 7, 'orders', 'forged', '', now(), now(), 'refused', '', 'f', $2, `+c.closed+`)`, c.state, c.held)
		if refused := sqlerr.State(err) == "42501"; refused != c.refused {
			t.Errorf("an editor adds a relay's, %+v: %v", c, err)
		}
	}

	// Purge: ids by the consumer, letters by the owner.
	if _, err := s.admin.ExecContext(t.Context(), `update oncemill.inbox set received_at = received_at - interval '1 year'; update oncemill.dead_letters set closed_at = closed_at - interval '1 year'`); err != nil {
		t.Fatal(err)
	}
	if _, err := s.consumer.Purge(t.Context()); err != nil || count(t, s.admin, `select count(*) from oncemill.inbox where not dead`) != 0 {
		t.Errorf("purging left ids, %v", err)
	}
	owners, err := dlq.New(s.owner, dlq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := owners.Purge(t.Context()); err != nil || n != 6 {
		t.Errorf("forgot %d letters, %v", n, err)
	}
	stop()
}

// The token of a replay is known to the consumer of its letter alone. Nobody chooses it.
func TestRoles_TokensOfReplaysAreTheConsumersOwn(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	if _, err := s.admin.ExecContext(t.Context(), `
		insert into oncemill.dead_letters (source, consumer, topic, message_id, payload, reason, error, fingerprint)
		select 'consumer', c, 'orders', c, 'x', 'failed', '', 'f' from unnest(array['mail', 'stock']) c`); err != nil {
		t.Fatal(err)
	}
	for _, consumer := range []string{"mail", "stock"} {
		if _, err := s.letters.Replay(t.Context(), []int64{s.theLetter(t, consumer).ID}, grace); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(t, s.admin, `select count(distinct token) from oncemill.dead_letters where token ~ '^[0-9a-f]{32}$'`); n != 2 {
		t.Fatalf("%d tokens", n)
	}
	if own := texts(t, s.stock, `select consumer from oncemill.dead_letters where token <> ''`); !slices.Equal(own, []string{"stock"}) {
		t.Errorf("stock reads the tokens of %v", own)
	}
	for name, db := range map[string]*sql.DB{"producer": s.producer, "operator": s.operator, "observer": s.observer} {
		if _, err := db.ExecContext(t.Context(), `select token from oncemill.dead_letters`); sqlerr.State(err) != "42501" {
			t.Errorf("the %s reads tokens: %v", name, err)
		}
	}
	for name, db := range map[string]*sql.DB{"producer": s.producer, "operator": s.operator, "stock": s.stock} {
		for _, text := range []string{
			`update oncemill.dead_letters set token = 'mine'`,
			`insert into oncemill.dead_letters (source, consumer, topic, message_id, payload, reason, error, fingerprint, token) values ('consumer', 'stock', '', '', '', '', '', '', 'mine')`,
			`insert into oncemill.dead_letters (source, consumer, topic, message_id, payload, reason, error, fingerprint, state) values ('consumer', 'stock', '', '', '', '', '', '', 'replaying')`,
		} {
			if _, err := db.ExecContext(t.Context(), text); sqlerr.State(err) != "42501" {
				t.Errorf("%s, as %s: %v", text, name, err)
			}
		}
	}
}

// Who sees how much waits sees nothing of the messages, and who may not see it is told so.
