package recipes_test

import (
	"context"
	"encoding/json"
	"os"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/recipes"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// recipe is what each library does.
type recipe interface {
	Place(ctx context.Context, order recipes.Order) error
	Reserve(msg *message.Message) error
}

// shop is a database with the tables of oncemill and of the shop.
type shop struct {
	testserver.PG
	recipes map[string]recipe
	inbox   *inbox.Inbox
}

func newShop(t *testing.T) *shop {
	t.Helper()
	s := &shop{PG: testserver.Postgres(t)}
	pool, db, err := recipes.OpenPgxPool(t.Context(), s.DSN)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	t.Cleanup(func() { _ = db.Close() })
	if err := oncemill.Migrate(t.Context(), db, s.Config, outbox.Migrations, inbox.Migrations); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), recipes.Tables+`; insert into stock values ('chair', 10)`); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{Database: s.Config})
	if err != nil {
		t.Fatal(err)
	}
	if s.inbox, err = inbox.New(db, inbox.Config{Consumer: "stock", Database: s.Config, Retry: inbox.Retry{Tries: 1}}); err != nil {
		t.Fatal(err)
	}
	gorm, err := recipes.OpenGORM(db)
	if err != nil {
		t.Fatal(err)
	}
	s.recipes = map[string]recipe{
		"pgxpool":  &recipes.PgxPool{Pool: pool, Box: box},
		"gorm":     &recipes.GORM{DB: gorm, Box: box},
		"sqlc":     &recipes.SQLC{DB: db, Box: box},
		"sqlc pgx": &recipes.SQLCPgx{Pool: pool, Box: box},
		"bun":      &recipes.Bun{DB: recipes.OpenBun(db), Box: box},
	}
	return s
}

func onEachRecipe(t *testing.T, test func(t *testing.T, s *shop, r recipe)) {
	t.Helper()
	t.Parallel()
	for _, name := range []string{"pgxpool", "gorm", "sqlc", "sqlc pgx", "bun"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			test(t, s, s.recipes[name])
		})
	}
}

// expect counts the rows of a table.
func (s *shop) expect(t *testing.T, table string, want int) {
	t.Helper()
	var n int
	if err := s.DB.QueryRowContext(t.Context(), `select count(*) from `+table).Scan(&n); err != nil || n != want {
		t.Errorf("%s: %d rows, want %d, %v", table, n, want, err)
	}
}

func (s *shop) oncemill(t *testing.T, table string) string {
	t.Helper()
	name, err := s.Config.Table(s.DB, table)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func TestPlace_OrderAndMessageAreOneCommit(t *testing.T) {
	onEachRecipe(t, func(t *testing.T, s *shop, r recipe) {
		messages := s.oncemill(t, "outbox")
		order := recipes.Order{ID: "a", Item: "chair", Quantity: 2}
		if err := r.Place(t.Context(), order); err != nil {
			t.Fatal(err)
		}
		s.expect(t, "orders where id = 'a' and item = 'chair' and quantity = 2", 1)
		s.expect(t, messages+" where message_id = 'a' and topic = 'orders'", 1)
		if err := r.Place(t.Context(), order); err == nil {
			t.Error("the same order twice: no error")
		}
		if err := r.Place(t.Context(), recipes.Order{Item: "chair"}); err == nil {
			t.Error("a message without an id: no error")
		}
		s.expect(t, "orders", 1)
		s.expect(t, messages, 1)
	})
}

func TestReserve_HasItsEffectsOnce(t *testing.T) {
	onEachRecipe(t, func(t *testing.T, s *shop, r recipe) {
		deliver := func(order recipes.Order) error {
			payload, err := json.Marshal(order)
			if err != nil {
				t.Fatal(err)
			}
			handler := s.inbox.Middleware(func(msg *message.Message) ([]*message.Message, error) { return nil, r.Reserve(msg) })
			_, err = handler(message.NewMessageWithContext(t.Context(), order.ID, payload))
			return err
		}
		for range 2 {
			if err := deliver(recipes.Order{ID: "a", Item: "chair", Quantity: 3}); err != nil {
				t.Error(err)
			}
		}
		if err := deliver(recipes.Order{ID: "b", Item: "chair", Quantity: 8}); err == nil {
			t.Error("more than there are: no error")
		}
		s.expect(t, "reservations where order_id = 'a' and item = 'chair' and quantity = 3", 1)
		s.expect(t, "reservations", 1)
		s.expect(t, "stock where units = 7", 1)
		s.expect(t, s.oncemill(t, "inbox"), 1)
		if err := r.Reserve(message.NewMessageWithContext(t.Context(), "c", nil)); err == nil {
			t.Error("without an inbox: no error")
		}
	})
}
