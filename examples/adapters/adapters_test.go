package adapters_test

import (
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/gin-gonic/gin"
	"github.com/go-chi/chi/v5"
	"github.com/labstack/echo/v4"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/adapters"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// pay pays an order in the transaction of the request.
func pay(r *http.Request, order string) error {
	tx, ok := idempotency.TxFromContext(r.Context())
	if !ok {
		return errors.New("no transaction")
	}
	if strings.HasPrefix(order, "again") {
		// A serialization failure, the first time.
		if _, err := tx.ExecContext(r.Context(), `select lose($1)`, order); err != nil {
			return err
		}
	}
	if strings.HasPrefix(order, "full") {
		_, err := tx.ExecContext(r.Context(), `select 1`)
		return errors.Join(err, errSoldOut)
	}
	_, err := tx.ExecContext(r.Context(), `insert into payments (path) values ($1)`, r.URL.Path)
	return err
}

var errSoldOut = errors.New("sold out")

// routers are services with the middleware in front of their routes, if the router allows it.
var routers = map[string]func(*idempotency.Engine) http.Handler{
	"chi": func(e *idempotency.Engine) http.Handler {
		router := chi.NewRouter()
		router.Use(adapters.Chi(e))
		router.Route("/orders", func(orders chi.Router) {
			orders.Route("/{id}", func(order chi.Router) {
				order.Post("/pay", func(w http.ResponseWriter, r *http.Request) {
					switch err := pay(r, chi.URLParam(r, "id")); {
					case errors.Is(err, errSoldOut):
						w.WriteHeader(http.StatusUnprocessableEntity)
					case err != nil:
						http.Error(w, err.Error(), http.StatusInternalServerError)
					default:
						w.Header().Set("Location", "/payments/1")
						w.WriteHeader(http.StatusCreated)
						_, _ = w.Write([]byte("paid"))
					}
				})
			})
		})
		return router
	},
	"gin": func(e *idempotency.Engine) http.Handler {
		orders := gin.New()
		orders.POST("/orders/:id/pay", func(c *gin.Context) {
			switch err := pay(c.Request, c.Param("id")); {
			case errors.Is(err, errSoldOut):
				c.AbortWithStatus(http.StatusUnprocessableEntity)
			case err != nil:
				c.AbortWithStatus(http.StatusInternalServerError)
			default:
				c.Header("Location", "/payments/1")
				c.String(http.StatusCreated, "paid")
			}
		})
		router := gin.New()
		router.POST("/orders/:id/pay", adapters.Gin(e, orders))
		return router
	},
	"echo": func(e *idempotency.Engine) http.Handler {
		router := echo.New()
		router.POST("/orders/:id/pay", func(c echo.Context) error {
			switch err := pay(c.Request(), c.Param("id")); {
			case errors.Is(err, errSoldOut):
				return echo.NewHTTPError(http.StatusUnprocessableEntity, err.Error())
			case err != nil:
				return err
			}
			c.Response().Header().Set("Location", "/payments/1")
			return c.String(http.StatusCreated, "paid")
		}, adapters.Echo(e))
		return router
	},
}

// requests are enough for groups, with each kind of request several times.
var requests = testserver.Rounds(16, 40)

// A request is paid once, also if the first attempt loses against another transaction, alone
// and in groups.
func TestAdapters_PayOnce(t *testing.T) {
	gin.SetMode(gin.TestMode)
	for name, make := range routers {
		for _, size := range []int{1, 32} {
			t.Run(fmt.Sprint(name, " ", size), func(t *testing.T) {
				db, cfg := database(t)
				handler := make(engine(t, db, cfg, size))
				var sending sync.WaitGroup
				for n := range requests {
					path, want := fmt.Sprintf("/orders/%d/pay", n), http.StatusCreated
					switch n % 4 {
					case 0:
						path = fmt.Sprintf("/orders/again-%d/pay", n)
					case 1:
						path, want = fmt.Sprintf("/orders/full-%d/pay", n), http.StatusUnprocessableEntity
					}
					sending.Go(func() {
						for i := range 3 {
							expect(t, handler, path, want, i > 0)
						}
					})
				}
				sending.Wait()
				var n, times int
				err := db.QueryRowContext(t.Context(), `select count(*), count(distinct path) from payments`).Scan(&n, &times)
				if err != nil || n != requests*3/4 || times != n {
					t.Errorf("%d payments of %d orders, %v", n, times, err)
				}
			})
		}
	}
}

func expect(t *testing.T, handler http.Handler, path string, status int, replayed bool) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader("{}"))
	r.Header.Set("Idempotency-Key", path)
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	if w.Code != status || (w.Header().Get("Idempotency-Replayed") == "true") != replayed {
		t.Errorf("%s, replayed %t: %d %q %s", path, replayed, w.Code, w.Header(), w.Body)
	}
	if status == http.StatusCreated && (w.Body.String() != "paid" || w.Header().Get("Location") != "/payments/1") {
		t.Errorf("%s, replayed %t: %q %s", path, replayed, w.Header(), w.Body)
	}
}

// database has a function that fails once for each name, like a transaction that loses against
// another one.
func database(t *testing.T) (*sql.DB, oncemill.Config) {
	t.Helper()
	pg := testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, idempotency.Migrations); err != nil {
		t.Fatal(err)
	}
	_, err := pg.DB.ExecContext(t.Context(), `
		create table payments (path text);
		create function lose(name text) returns void language plpgsql as $$
		begin
			if nextval(quote_ident('tries ' || name)) = 1 then -- which no rollback takes back
				raise exception 'lost' using errcode = '40001';
			end if;
		end $$`)
	for n := 0; n < requests && err == nil; n += 4 {
		_, err = pg.DB.ExecContext(t.Context(), fmt.Sprintf(`create sequence "tries again-%d"`, n))
	}
	if err != nil {
		t.Fatal(err)
	}
	return pg.DB, pg.Config
}

func engine(t *testing.T, db *sql.DB, cfg oncemill.Config, size int) *idempotency.Engine {
	t.Helper()
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: cfg})
	if err != nil {
		t.Fatal(err)
	}
	e, err := idempotency.New(store, idempotency.Config{Scope: idempotency.SingleTenant(), Logger: slog.New(slog.DiscardHandler), Transactions: idempotency.TxConfig{GroupSize: size}})
	if err != nil {
		t.Fatal(err)
	}
	return e
}
