package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
)

const (
	postRequests = 16_000
	postClients  = 64
)

// posting posts through TxMiddleware, in groups and each request in its own transaction;
// and replays.
func posting() scenario {
	const unit = "req/s"
	what := fmt.Sprintf("POST requests over HTTP, %d at a time, each inserts a row, through TxMiddleware, ", postClients)
	return scenario{
		id: "idempotency", round: 9 * time.Second,
		sides: func(_ context.Context, b *bench) ([]side, error) {
			db, err := b.postDB()
			if err != nil {
				return nil, err
			}
			grouped, err := b.middleware(db, "", postClients)
			if err != nil {
				return nil, err
			}
			alone, err := b.middleware(db, "", 0)
			return []side{
				b.postingSide("the first run", grouped, emptyKeys, true),
				b.postingSide("the same handler in a bare transaction", bareTransaction(db), emptyKeys, false),
				b.postingSide("ours, each in its own transaction", alone, emptyKeys, false),
			}, err
		},
		rows: []row{
			{"idempotency", what + "in groups", figure{0, 0}, figure{1, 0}, unit, atLeast(0.6)},
			{"idempotency-alone", what + "each in its own transaction", figure{2, 0}, figure{1, 0}, unit, atLeast(0.6)},
			{"idempotency-replay", what + "in groups, once more", figure{0, 1}, figure{0, 0}, unit, atLeast(3)},
		},
	}
}

const emptyKeys = `truncate oncemill.idempotency`

func (b *bench) postDB() (*sql.DB, error) {
	db, err := b.open(postClients, oneTrip)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(postClients)
	b.atEnd(db.Close)
	return db, nil
}

// middleware is our side's handler, on the tables of a schema.
func (b *bench) middleware(db *sql.DB, schema string, group int) (http.Handler, error) {
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: oncemill.Config{Schema: schema}, Prepare: true})
	if err != nil {
		return nil, err
	}
	service, err := idempotency.New(store, idempotency.Config{Scope: idempotency.SingleTenant(), Logger: b.log, Transactions: idempotency.TxConfig{GroupSize: group}})
	if err != nil {
		return nil, err
	}
	return service.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, ok := idempotency.TxFromContext(r.Context())
		if !ok {
			http.Error(w, "no transaction", http.StatusInternalServerError)
			return
		}
		if err := insertPosted(r.Context(), tx, w, r); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})), nil
}

// bareTransaction keeps the response back until the commit, as it has to.
func bareTransaction(db *sql.DB) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		response := httptest.NewRecorder()
		err := inTx(r.Context(), db, func(tx *sql.Tx) error { return insertPosted(r.Context(), tx, response, r) })
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		for name, values := range response.Header() {
			w.Header()[name] = values
		}
		w.WriteHeader(response.Code)
		_, _ = w.Write(response.Body.Bytes()) // the client checks
	})
}

func insertPosted(ctx context.Context, tx execer, w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `insert into posted (body) values ($1)`, string(body)); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Location", "/orders/7")
	w.WriteHeader(http.StatusCreated)
	_, err = w.Write(body)
	return err
}

// postingSide posts new requests to a handler and then, if replays is set, the same ones
// again. It measures the requests a second of each.
func (b *bench) postingSide(name string, h http.Handler, empty string, replays bool) side {
	server := httptest.NewServer(h)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: postClients}}
	b.atEnd(func() error {
		client.CloseIdleConnections()
		server.Close()
		return nil
	})
	runs := 0
	return side{name: name, n: postRequests, run: func(ctx context.Context, n int) (v values, err error) {
		err = b.exec(ctx, "empty tables", `create table if not exists posted (id bigint generated always as identity primary key, body text not null)`, `truncate posted`, empty)
		if err = errors.Join(err, b.settle(ctx)); err != nil {
			return nil, err
		}
		runs++
		passes := []bool{false}
		if replays {
			passes = []bool{false, true}
		}
		for _, replayed := range passes {
			if err := b.exec(ctx, "settle", `checkpoint`); err != nil {
				return nil, err
			}
			begin := time.Now()
			err = inTurn(ctx, postClients, n, func(ctx context.Context, i int) error {
				return post(ctx, client, server.URL, fmt.Sprintf("%s-%d-%d", server.URL, runs, i), replayed)
			})
			took := time.Since(begin)
			if err = errors.Join(err, b.expectRows(ctx, n, `select count(*) from posted`)); err != nil {
				return nil, err
			}
			v = append(v, perSecond(n, took)...)
		}
		return v, nil
	}}
}

func post(ctx context.Context, client *http.Client, address, key string, replayed bool) error {
	body := `{"order": "` + key + `", "note": "` + strings.Repeat("x", 460) + `"}`
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, address+"/", strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Idempotency-Key", key)
	r.Header.Set("Content-Type", "application/json")
	response, err := client.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode != http.StatusCreated || string(text) != body:
		return fmt.Errorf("response %d: %s", response.StatusCode, text)
	case (response.Header.Get("Idempotency-Replayed") == "true") != replayed:
		return fmt.Errorf("replayed: %t, want %t", !replayed, replayed)
	}
	return nil
}
