package shop_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/shop"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// database is one of the two the shop runs on, migrated and stocked.
type database struct {
	db    *sql.DB
	box   *outbox.Outbox
	cfg   oncemill.Config
	table string // the outbox
}

func onEachDatabase(t *testing.T, test func(t *testing.T, d database)) {
	t.Run("SQLite", func(t *testing.T) {
		test(t, prepare(t, testserver.SQLite(t), oncemill.Config{}))
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		pg := testserver.Postgres(t)
		test(t, prepare(t, pg.DB, pg.Config))
	})
}

func prepare(t *testing.T, db *sql.DB, cfg oncemill.Config) database {
	t.Helper()
	table, err := cfg.Table(db, "outbox")
	if err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{Database: cfg})
	if err != nil {
		t.Fatal(err)
	}
	products := []shop.Product{{SKU: "tea", Name: "Tea", PriceCents: 890, Stock: 100}, {SKU: "salt", Name: "Salt", PriceCents: 459, Stock: 100}}
	for range 2 { // the second time changes nothing
		if err := oncemill.Migrate(t.Context(), db, cfg, outbox.Migrations, idempotency.Migrations); err != nil {
			t.Fatal(err)
		}
		if err := shop.CreateTables(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		if err := shop.AddProducts(t.Context(), db, products); err != nil {
			t.Fatal(err)
		}
		products[0].Stock = 1
	}
	return database{db: db, box: box, cfg: cfg, table: table}
}

func (d database) count(t *testing.T, query string) (n int) {
	t.Helper()
	if err := d.db.QueryRowContext(t.Context(), query).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

const tea = `{"id":"order-1","customer":"ana","placed_at":"2026-11-21T12:00:00Z","items":[
	{"sku":"tea","quantity":2,"price_cents":890},{"sku":"salt","quantity":1,"price_cents":459},{"sku":"tea","quantity":1,"price_cents":890}
],"note":"schön heiß 🍵"}`

func TestAPI_TakesAnOrderOnce(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, d database) {
		handler := api(t, d)
		for _, want := range []int{http.StatusCreated, http.StatusOK, http.StatusOK} {
			if status, body := post(t, handler, tea); status != want {
				t.Fatalf("status %d, want %d: %s", status, want, body)
			}
		}
		for query, want := range map[string]int{
			`select count(*) from orders`:                            1,
			`select total_cents from orders`:                         3*890 + 459,
			`select count(*) from order_items`:                       3,
			`select quantity from order_items where line = 1`:        2,
			`select orders from customers where customer = 'ana'`:    1,
			`select count(*) from ` + d.table:                        1,
			`select count(*) from ` + d.table + ` where key = 'ana'`: 1,
		} {
			if got := d.count(t, query); got != want {
				t.Errorf("%s: %d, want %d", query, got, want)
			}
		}
	})
}

func TestAPI_TakesConcurrentRepeatsOnce(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, d database) {
		handler := api(t, d)
		var wg sync.WaitGroup
		var mu sync.Mutex
		statuses := map[int]int{}
		for range 8 {
			wg.Go(func() {
				status, _ := post(t, handler, tea)
				mu.Lock()
				defer mu.Unlock()
				statuses[status]++
			})
		}
		wg.Wait()
		if statuses[http.StatusCreated] != 1 || statuses[http.StatusOK] != 7 {
			t.Fatalf("statuses %v, want 201 once and 200 seven times", statuses)
		}
		if n := d.count(t, `select count(*) from `+d.table); n != 1 {
			t.Fatalf("%d messages in the outbox, want 1", n)
		}
	})
}

// With a key the repeats get the first answer, not one of their own.
func TestAPI_ReplaysTheAnswer(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, d database) {
		handler := api(t, d)
		send := func(key, body string) *httptest.ResponseRecorder {
			recorder := httptest.NewRecorder()
			request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders", strings.NewReader(body))
			request.Header.Set("Idempotency-Key", key)
			request.Header.Set("Content-Type", "application/json")
			handler.ServeHTTP(recorder, request)
			return recorder
		}
		first := send("a", tea)
		if first.Code != http.StatusCreated {
			t.Fatalf("status %d: %s", first.Code, first.Body)
		}
		for range 5 {
			again := send("a", tea+" ") // white space does not matter in JSON
			if again.Code != first.Code || again.Body.String() != first.Body.String() || again.Header().Get("Idempotency-Replayed") != "true" {
				t.Errorf("status %d: %s", again.Code, again.Body)
			}
		}
		if other := send("a", strings.Replace(tea, "ana", "bob", 1)); other.Code != http.StatusUnprocessableEntity {
			t.Errorf("another order: %d", other.Code)
		}
		if n := d.count(t, `select count(*) from `+d.table); n != 1 {
			t.Errorf("%d messages in the outbox, want 1", n)
		}
	})
}

// The shop does for keys what the conformance suite expects of any service.
func TestAPI_PassesTheConformanceSuite(t *testing.T) {
	test := func(t *testing.T, d database) {
		server := httptest.NewServer(api(t, d))
		defer server.Close()
		order := strings.Replace(tea, "order-1", "{{unique}}", 1)
		suite, err := conformance.New(t.Context(), conformance.Target{
			URLs:        []string{server.URL},
			OptionalKey: true,
			Operation: &conformance.Operation{
				Path:       "/orders",
				Body:       []byte(order),
				Other:      []byte(strings.Replace(order, "ana", "bob", 1)),
				OtherPaths: []string{"/orders?express=1"},
			},
			Hooks: conformance.Hooks{Effects: func(ctx context.Context, v conformance.Values) (n int, err error) {
				err = d.db.QueryRowContext(ctx, `select count(*) from orders where order_id = $1`, v.Unique).Scan(&n)
				return n, err
			}},
		})
		if err != nil {
			t.Fatal(err)
		}
		defer suite.Close()
		passed := 0
		for _, result := range suite.RunAll(t.Context()) {
			switch {
			case result.Err != nil:
				t.Errorf("%s: %v", result.Name, result.Err)
			case result.Skipped == "":
				passed++
			}
		}
		if passed < 30 {
			t.Errorf("only %d cases passed", passed)
		}
	}
	if testserver.Long() {
		onEachDatabase(t, test)
	} else { // what differs between databases is tested with the stores
		pg := testserver.Postgres(t)
		test(t, prepare(t, pg.DB, pg.Config))
	}
}

func TestAPI_RefusesWithTheReason(t *testing.T) {
	d := prepare(t, testserver.SQLite(t), oncemill.Config{})
	handler := api(t, d)
	for name, test := range map[string]struct{ old, new, want string }{
		"not JSON":      {tea, "nonsense", "one order as JSON"},
		"unknown field": {`"note"`, `"remark"`, "remark"},
		"id":            {`"order-1"`, `""`, "id must"},
		"customer":      {`"ana"`, `"a b"`, "customer must"},
		"sku":           {`"salt"`, `"sa'lt"`, "items[1].sku"},
		"quantity":      {`"quantity":2`, `"quantity":-2`, "items[0].quantity"},
		"price":         {`"price_cents":459`, `"price_cents":-1`, "items[1].price_cents"},
		"note with NUL": {`schön`, `sch\u0000n`, "note must"},
		"long note":     {`schön`, strings.Repeat("ö", shop.MaxNote), "note must"},
		"huge body":     {`schön`, strings.Repeat("ö", 5*shop.MaxNote), "too large"},
	} {
		t.Run(name, func(t *testing.T) {
			status, body := post(t, handler, strings.Replace(tea, test.old, test.new, 1))
			if status != http.StatusBadRequest || !strings.Contains(body, test.want) {
				t.Fatalf("status %d, want 400 that says %q: %s", status, test.want, body)
			}
		})
	}
	empty := shop.Order{ID: "order-1", Customer: "ana"}
	if err := empty.Validate(); !errors.Is(err, shop.ErrOrder) || !strings.Contains(err.Error(), "items must hold") {
		t.Fatalf("error %v for an order without items", err)
	}
	if n := d.count(t, `select count(*) from orders`); n != 0 {
		t.Fatalf("%d orders taken", n)
	}
}

func TestInventory_BooksInTheMessagesTransaction(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, d database) {
		inventory, err := shop.NewInventory(d.db)
		if err != nil {
			t.Fatal(err)
		}
		handle := func(msg *message.Message) error {
			return d.box.RunInTx(msg.Context(), func(ctx context.Context, _ *sql.Tx) error {
				msg.SetContext(ctx)
				return inventory.Handle(msg)
			})
		}
		var placed shop.Placed
		if err := json.Unmarshal([]byte(`{"number":7,"order":`+tea+`}`), &placed); err != nil {
			t.Fatal(err)
		}
		payload, err := json.Marshal(placed)
		if err != nil {
			t.Fatal(err)
		}
		if err := handle(newMessage(t, "message-1", payload)); err != nil {
			t.Fatal(err)
		}
		for query, want := range map[string]int{
			`select quantity from stock where sku = 'tea'`:  97,
			`select quantity from stock where sku = 'salt'`: 99,
			`select count(*) from ledger where message_id = 'message-1' and order_id = 'order-1' and customer = 'ana' and number = 7 and units = 4`: 1,
		} {
			if got := d.count(t, query); got != want {
				t.Errorf("%s: %d, want %d", query, got, want)
			}
		}

		if err := handle(newMessage(t, "message-2", []byte("nonsense"))); err == nil {
			t.Error("an unreadable message was booked")
		}
		if err := inventory.Handle(newMessage(t, "message-3", payload)); !errors.Is(err, shop.ErrNoTx) {
			t.Errorf("error %v without a transaction, want ErrNoTx", err)
		}
		if n := d.count(t, `select count(*) from ledger`); n != 1 {
			t.Errorf("%d lines in the ledger, want 1", n)
		}
	})
}

func api(t *testing.T, d database) http.Handler {
	t.Helper()
	s, err := shop.New(d.db, d.box, "orders")
	if err != nil {
		t.Fatal(err)
	}
	store, err := idempotency.NewSQLStore(d.db, idempotency.StoreConfig{Database: d.cfg})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := idempotency.New(store, *shop.Idempotency())
	if err != nil {
		t.Fatal(err)
	}
	return s.Handler(engine, slog.New(slog.DiscardHandler))
}

func post(t *testing.T, handler http.Handler, body string) (int, string) {
	t.Helper()
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders", strings.NewReader(body)))
	return recorder.Code, recorder.Body.String()
}

func newMessage(t *testing.T, id string, payload []byte) *message.Message {
	t.Helper()
	return message.NewMessageWithContext(t.Context(), id, payload)
}
