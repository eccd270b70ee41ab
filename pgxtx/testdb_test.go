package pgxtx_test

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/pgxtx"
)

// testDB is a database with oncemill's tables and a table of effects, and a block whose
// handlers run in a transaction.
type testDB struct {
	pg   testserver.PG
	sent *sent
	db   *sql.DB
	box  *outbox.Outbox

	// run has a handler called for an id.
	run func(ctx context.Context, id string, handler func(ctx context.Context) error) error

	// ended is the error of a transaction whose handler has returned.
	ended error
}

// blocks are what runs handlers.
var blocks = map[string]func(t *testing.T, p *testDB){"inbox": withInbox, "idempotency": withIdempotency}

func withInbox(t *testing.T, p *testDB) {
	in, err := inbox.New(p.db, inbox.Config{Consumer: "stock", Database: p.pg.Config, Retry: inbox.Retry{Tries: 1}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	p.ended = inbox.ErrTxEnded
	p.run = func(ctx context.Context, id string, handler func(ctx context.Context) error) error {
		_, err := in.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			return nil, handler(msg.Context())
		})(message.NewMessageWithContext(ctx, id, nil))
		return err
	}
}

func withIdempotency(t *testing.T, p *testDB) {
	store, err := idempotency.NewSQLStore(p.db, idempotency.StoreConfig{Database: p.pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := idempotency.New(store, idempotency.Config{
		Scope: conformance.Scope, Logger: slog.New(slog.DiscardHandler), Failures: idempotency.FailureConfig{Failed: idempotency.FailedRelease},
	})
	if err != nil {
		t.Fatal(err)
	}
	p.ended = idempotency.ErrTxEnded
	p.run = func(ctx context.Context, id string, handler func(ctx context.Context) error) error {
		_, err := idempotency.Do(ctx, engine, idempotency.Command{Name: "reserve", Key: id}, func(ctx context.Context) (int, error) {
			return 1, handler(ctx)
		})
		return err
	}
}

// onEachBlock runs test with pools of pgx's, with a connection for each call of run.
func onEachBlock(t *testing.T, test func(t *testing.T, p *testDB)) {
	t.Helper()
	t.Parallel()
	for name, block := range blocks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newTestDB(t)
			block(t, p)
			test(t, p)
		})
	}
}

func newTestDB(t *testing.T) *testDB {
	t.Helper()
	p := &testDB{pg: testserver.Postgres(t), sent: new(sent)}
	cfg, err := pgxpool.ParseConfig(p.pg.DSN)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.Tracer = p.sent
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	p.open(t, stdlib.OpenDBFromPool(pool))
	if err := oncemill.Migrate(t.Context(), p.pg.DB, p.pg.Config, outbox.Migrations, inbox.Migrations, idempotency.Migrations); err != nil {
		t.Fatal(err)
	}
	if _, err := p.pg.DB.ExecContext(t.Context(), `create table effects (name text not null, n int)`); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *testDB) open(t *testing.T, db *sql.DB) {
	t.Helper()
	p.db = db
	t.Cleanup(func() {
		defer db.Close() //nolint:errcheck // nothing is left to do
		// One whose transaction was out of time may still be rolling back.
		testserver.Eventually(t, "all connections are given back", func() bool { return db.Stats().InUse == 0 })
	})
	var err error
	if p.box, err = outbox.New(db, outbox.Config{Database: p.pg.Config}); err != nil {
		t.Fatal(err)
	}
}

// behindProxy leads the connections of the block through a proxy.
func (p *testDB) behindProxy(t *testing.T, options ...stdlib.OptionOpenDB) *testserver.PostgresProxy {
	t.Helper()
	proxy, dsn := testserver.NewPostgresProxy(t, p.pg.DSN)
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	db := stdlib.OpenDB(*cfg, options...)
	block := blocks["inbox"]
	if !errors.Is(p.ended, inbox.ErrTxEnded) {
		block = blocks["idempotency"]
	}
	p.open(t, db)
	block(t, p)
	return proxy
}

// handle has fn called as a handler.
func (p *testDB) handle(t *testing.T, id string, fn func(ctx context.Context, tx *pgxtx.Tx) error) error {
	t.Helper()
	return p.run(t.Context(), id, func(ctx context.Context) error {
		tx, err := pgxtx.FromContext(ctx)
		if err != nil {
			return err
		}
		return fn(ctx, tx)
	})
}

// effects returns the names that were committed.
func (p *testDB) effects(t *testing.T) []string {
	t.Helper()
	return testserver.Texts(t, p.pg.DB, `select name from effects order by name, n`)
}

func (p *testDB) expectEffects(t *testing.T, want ...string) {
	t.Helper()
	if got := p.effects(t); !slices.Equal(got, want) {
		t.Errorf("effects: %q, want %q", got, want)
	}
}

func expectError(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got %v, want %v", err, want)
	}
}

// sent notes the texts that pgx sends.
type sent struct {
	mu    sync.Mutex
	texts []string
}

func (s *sent) note(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.texts = append(s.texts, text)
}

// take returns what was sent since the last call.
func (s *sent) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	texts := s.texts
	s.texts = nil
	return texts
}

func (s *sent) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.note(data.SQL)
	return ctx
}

func (s *sent) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *sent) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		s.note(q.SQL)
	}
	return ctx
}

func (s *sent) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (s *sent) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

func (s *sent) TraceCopyFromStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceCopyFromStartData) context.Context {
	s.note("copy " + data.TableName.Sanitize())
	return ctx
}

func (s *sent) TraceCopyFromEnd(context.Context, *pgx.Conn, pgx.TraceCopyFromEndData) {}

// instead has pgx send another text than the one that was checked.
type instead string

func (text instead) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	return string(text), nil, nil
}
