package adapters_test

import (
	"database/sql"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
	"github.com/labstack/echo/v4"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/adapters"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

func pay(r *http.Request) error {
	tx, ok := idempotency.TxFromContext(r.Context())
	if !ok {
		return errors.New("no transaction")
	}
	_, err := tx.ExecContext(r.Context(), `insert into payments (path) values ($1)`, r.URL.Path)
	return err
}

var errSoldOut = errors.New("sold out")

func TestAdapters_PayOnce(t *testing.T) {
	gin.SetMode(gin.TestMode)
	for name, make := range map[string]func(*idempotency.Engine) http.Handler{
		"chi": func(e *idempotency.Engine) http.Handler {
			return adapters.Chi(e, func(w http.ResponseWriter, r *http.Request) {
				if err := pay(r); err != nil {
					http.Error(w, err.Error(), http.StatusInternalServerError)
					return
				}
				if strings.Contains(r.URL.Path, "full") {
					w.WriteHeader(http.StatusUnprocessableEntity)
					return
				}
				w.Header().Set("Location", "/payments/1")
				w.WriteHeader(http.StatusCreated)
				_, _ = w.Write([]byte("paid"))
			})
		},
		"gin": func(e *idempotency.Engine) http.Handler {
			router := gin.New()
			router.POST("/orders/:id/pay", adapters.Gin(e), func(c *gin.Context) {
				if err := pay(c.Request); err != nil {
					c.AbortWithStatus(http.StatusInternalServerError)
					return
				}
				if c.Param("id") == "full" {
					c.AbortWithStatus(http.StatusUnprocessableEntity)
					return
				}
				c.Header("Location", "/payments/1")
				c.String(http.StatusCreated, "paid")
			})
			return router
		},
		"echo": func(e *idempotency.Engine) http.Handler {
			router := echo.New()
			router.POST("/orders/:id/pay", func(c echo.Context) error {
				if err := pay(c.Request()); err != nil {
					return err
				}
				if c.Param("id") == "full" {
					return echo.NewHTTPError(http.StatusUnprocessableEntity, errSoldOut.Error())
				}
				c.Response().Header().Set("Location", "/payments/1")
				return c.String(http.StatusCreated, "paid")
			}, adapters.Echo(e))
			return router
		},
	} {
		t.Run(name, func(t *testing.T) {
			db := testserver.SQLite(t)
			handler := make(engine(t, db))
			for path, want := range map[string]int{"/orders/1/pay": http.StatusCreated, "/orders/full/pay": http.StatusUnprocessableEntity} {
				for i := range 3 {
					r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader("{}"))
					r.Header.Set("Idempotency-Key", name+path)
					w := httptest.NewRecorder()
					handler.ServeHTTP(w, r)
					if w.Code != want || (w.Header().Get("Idempotency-Replayed") == "true") != (i > 0) {
						t.Errorf("%s, time %d: %d %q %s", path, i, w.Code, w.Header(), w.Body)
					}
					if want == http.StatusCreated && (w.Body.String() != "paid" || w.Header().Get("Location") != "/payments/1") {
						t.Errorf("%s, time %d: %q %s", path, i, w.Header(), w.Body)
					}
				}
			}
			var n int
			if err := db.QueryRowContext(t.Context(), `select count(*) from payments`).Scan(&n); err != nil || n != 1 {
				t.Errorf("%d payments, %v", n, err)
			}
		})
	}
}

func engine(t *testing.T, db *sql.DB) *idempotency.Engine {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, idempotency.Migrations); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), `create table payments (path text)`); err != nil {
		t.Fatal(err)
	}
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{})
	if err != nil {
		t.Fatal(err)
	}
	e, err := idempotency.New(store, idempotency.Config{Scope: idempotency.SingleTenant(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return e
}
