package oncemill_test

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// A service runs requests, and an operator of keys does all acts, with the documented grants;
// neither can do more.
func TestRoles_KeysAreOperatedWithTheDocumentedGrants(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	store, err := idempotency.NewSQLStore(s.api, idempotency.StoreConfig{})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := idempotency.New(store, idempotency.Config{
		Scope: idempotency.SingleTenant(), Logger: slog.New(slog.DiscardHandler),
		Keys: idempotency.KeyConfig{Quota: idempotency.Quota{Keys: 100}},
	})
	if err != nil {
		t.Fatal(err)
	}
	post := func(handler http.Handler, key string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("x"))
		r.Header.Set("Idempotency-Key", key)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w
	}
	large := strings.Repeat("large", 50_000)
	done := engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(large)) }))
	fails := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }))
	for range 2 {
		if w := post(done, "done"); w.Code != http.StatusOK || w.Body.String() != large {
			t.Fatalf("%d %.200s", w.Code, w.Body)
		}
	}
	post(fails, "settled")
	post(fails, "released")
	if _, err := engine.Purge(t.Context()); err != nil {
		t.Error(err)
	}

	kept, err := idempotency.NewSQLStore(s.keeper, idempotency.StoreConfig{})
	if err != nil {
		t.Fatal(err)
	}
	admin, err := idempotency.NewAdmin(kept, idempotency.AdminConfig{})
	if err != nil {
		t.Fatal(err)
	}
	act := idempotency.Act{By: "grace", Reason: "asked the provider"}
	page, err := admin.List(t.Context(), idempotency.Filter{})
	if err != nil || len(page.Keys) != 2 {
		t.Fatalf("%+v, %v", page, err)
	}
	found := idempotency.Recovery{Status: 201, Body: []byte(large)}
	if err := errors.Join(admin.Settle(t.Context(), page.Keys[0], found, act), admin.Release(t.Context(), page.Keys[1], act)); err != nil {
		t.Fatal(err)
	}
	if w := post(fails, "settled"); w.Code != http.StatusCreated || w.Body.String() != large {
		t.Errorf("%d %.200s", w.Code, w.Body)
	}
	page, err = admin.List(t.Context(), idempotency.Filter{Phases: []idempotency.Phase{idempotency.PhaseCompleted}})
	if err != nil || len(page.Keys) != 2 {
		t.Fatalf("%+v, %v", page, err)
	}
	if answer, err := admin.Answer(t.Context(), page.Keys[0]); err != nil || string(answer.Body) != large {
		t.Errorf("%d bytes, %v", len(answer.Body), err)
	}
	if erased, err := admin.Erase(t.Context(), page.Keys[0].Caller, act); err != nil || erased.Keys != 2 {
		t.Errorf("%+v, %v", erased, err)
	}
	log, err := audit.New(s.keeper, audit.Config{})
	if err != nil {
		t.Fatal(err)
	}
	entries, err := log.List(t.Context(), audit.Filter{By: "grace"})
	if err != nil || len(entries) != 4 || entries[0].Role != "shop_keeper" {
		t.Errorf("%+v, %v", entries, err)
	}
	for _, text := range []string{
		`delete from oncemill.audit`, `update oncemill.audit set reason = 'another'`,
		`insert into oncemill.audit (actor, action, subject, db_role) values ('x', 'x', 'x', 'shop_owner')`,
		`insert into oncemill.idempotency (key_hash) values ('')`, `update oncemill.idempotency_usage set keys = 0`,
		`select * from oncemill.outbox`, `select * from oncemill.dead_letters`, `select * from oncemill.inbox`,
	} {
		if _, err := s.keeper.ExecContext(t.Context(), text); sqlerr.State(err) != "42501" {
			t.Errorf("%s, as the keeper: %v", text, err)
		}
	}
	for _, text := range []string{`insert into oncemill.audit (actor, action, subject) values ('x', 'x', 'x')`, `select * from oncemill.outbox`, `truncate oncemill.idempotency`} {
		if _, err := s.api.ExecContext(t.Context(), text); sqlerr.State(err) != "42501" {
			t.Errorf("%s, as the service: %v", text, err)
		}
	}
}
