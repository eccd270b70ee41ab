package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/database"
)

const (
	idempotencyRequests = 16_000
	idempotencyClients  = 64
	grownKeys           = 5_000_000
)

// idempotencyRow posts through TxMiddleware, in groups and each request in a transaction
// of its own, against the same handler in a bare transaction; and replays, against first
// runs.
func idempotencyRow(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "idempotency", "req/s"
	s, err := b.newPosts(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close()
	v, err := b.rounds(ctx, id, unit, s.first(0), s.bare(), s.replays(), s.alone())
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("%d POST requests over HTTP, %d at a time, each inserts a row", idempotencyRequests, idempotencyClients)
	const bare = "the same handler in a bare transaction"
	return []result{
		compare(id, what+" through TxMiddleware, in groups", bare, unit, ratioAtLeast(0.6), v[0], v[1]),
		compare(id+"-alone", "the same, each in a transaction of its own", bare, unit, ratioAtLeast(0.6), v[3], v[1]),
		compare(id+"-replay", "the same requests, in groups, once more", "their first run", unit, ratioAtLeast(3), v[2], v[0]),
	}, nil
}

// growthKeys posts with many records in the table, against an empty one.
func growthKeys(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "growth-keys", "req/s"
	s, err := b.newPosts(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close()
	// Loaded once, and kept over the rounds, in a table of its own.
	grown, err := b.newPostsIn(ctx, oncemill.Config{Schema: "oncemill_grown"})
	if err != nil {
		return nil, err
	}
	defer grown.close()
	b.say("%-20s loading %d records", id, grownKeys)
	if err := b.exec(ctx, "load records", fmt.Sprintf(loadKeys, grownKeys)); err != nil {
		return nil, err
	}
	v, err := b.rounds(ctx, id, unit, grown.first(grownKeys), s.first(0))
	if err != nil {
		return nil, err
	}
	return []result{compare(id,
		fmt.Sprintf("%d POST requests through TxMiddleware with %d records in the table", idempotencyRequests, grownKeys),
		"with none", unit, ratioAtLeast(0.8), v[0], v[1])}, nil
}

// As the engine leaves them: some 300 bytes of response each.
const loadKeys = `
insert into oncemill_grown.idempotency (
	key_hash, caller, fingerprint, state, owner, fence, endpoint,
	created_at, completed_at, lease_until, expires_at, forget_at, status, response
)
select
	sha256(int8send(i)), substr(sha256('caller'), 1, 16), sha256(int8send(-i)), 2, substr(sha256(int8send(i)), 1, 16), 1, 'POST /orders',
	now(), now(), now(), now() + i * interval '1 ms', now() + interval '1 day' + i * interval '1 ms', 201,
	convert_to(repeat('response', 40), 'UTF8')
from generate_series(1::bigint, %d) as i`

// posts is a service and its clients.
type posts struct {
	b        *bench
	db       *sql.DB
	tables   database.Database
	bareURL  string
	url      string // in groups
	aloneURL string
	close    func()
	client   *http.Client
	run      atomic.Int64
}

func (b *bench) newPosts(ctx context.Context) (*posts, error) {
	return b.newPostsIn(ctx, oncemill.Config{})
}

func (b *bench) newPostsIn(ctx context.Context, tables oncemill.Config) (*posts, error) {
	address, err := url.Parse(b.servers.postgres)
	if err != nil {
		return nil, errors.New("the URL of the database cannot be parsed")
	}
	query := address.Query()
	query.Set("binary_parameters", "yes") // one round trip for a statement with arguments, on both sides
	address.RawQuery = query.Encode()
	db, err := sql.Open("postgres", address.String())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(idempotencyClients)
	db.SetMaxIdleConns(idempotencyClients)
	resolved, err := database.Resolve(db, tables)
	if err != nil {
		return nil, err
	}
	if err := oncemill.Migrate(ctx, db, tables, idempotency.Migrations); err != nil {
		return nil, err
	}
	if _, err := db.ExecContext(ctx, `create table if not exists posted (id bigint generated always as identity primary key, body text not null)`); err != nil {
		return nil, err
	}
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: tables, Prepare: true})
	if err != nil {
		return nil, err
	}
	cfg := idempotency.Config{Scope: idempotency.SingleTenant(), Logger: b.log}
	alone, err := idempotency.New(store, cfg)
	if err != nil {
		return nil, err
	}
	cfg.Transactions.GroupSize = idempotencyClients
	grouped, err := idempotency.New(store, cfg)
	if err != nil {
		return nil, err
	}
	servers := []*httptest.Server{
		httptest.NewServer(bareTransaction(db)),
		httptest.NewServer(grouped.TxMiddleware(http.HandlerFunc(postHandler))),
		httptest.NewServer(alone.TxMiddleware(http.HandlerFunc(postHandler))),
	}
	s := &posts{b: b, db: db, tables: resolved, bareURL: servers[0].URL, url: servers[1].URL, aloneURL: servers[2].URL}
	s.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: idempotencyClients}}
	s.close = func() {
		s.client.CloseIdleConnections()
		for _, server := range servers {
			server.Close()
		}
		_ = db.Close() // it was read to the end
	}
	return s, nil
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

func postHandler(w http.ResponseWriter, r *http.Request) {
	tx, ok := idempotency.TxFromContext(r.Context())
	if !ok {
		http.Error(w, "no transaction", http.StatusInternalServerError)
		return
	}
	if err := insertPosted(r.Context(), tx, w, r); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

// bareTransaction keeps the answer back until the commit, as it has to.
func bareTransaction(db *sql.DB) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, err := db.BeginTx(r.Context(), nil)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		defer tx.Rollback() //nolint:errcheck // a no-op after the commit
		answer := httptest.NewRecorder()
		if err = insertPosted(r.Context(), tx, answer, r); err == nil {
			err = tx.Commit()
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		for name, values := range answer.Header() {
			w.Header()[name] = values
		}
		w.WriteHeader(answer.Code)
		_, _ = w.Write(answer.Body.Bytes()) // the client tells
	})
}

// empty takes away what earlier runs have left, but for the keep records that were
// loaded.
func (s *posts) empty(ctx context.Context, keep int) error {
	if keep > 0 {
		return s.b.exec(ctx, "settle", s.tables.Expand(`delete from {{idempotency}} where endpoint = 'POST /'`), `truncate posted`, s.tables.Expand(`vacuum (analyze) {{idempotency}}`), `checkpoint`)
	}
	return s.b.exec(ctx, "settle", s.tables.Expand(`truncate {{idempotency}}, posted`), s.tables.Expand(`vacuum (analyze) {{idempotency}}`), `checkpoint`)
}

func (s *posts) first(keep int) side {
	name := "TxMiddleware"
	if keep > 0 {
		name = fmt.Sprintf("TxMiddleware, %d records", keep)
	}
	return side{name: name, n: idempotencyRequests, run: func(ctx context.Context, n int) (float64, error) {
		if err := s.empty(ctx, keep); err != nil {
			return 0, err
		}
		stopProfile, err := s.b.startProfile()
		if err != nil {
			return 0, err
		}
		took, err := s.post(ctx, s.url, n, s.run.Add(1), false)
		stopProfile()
		return perSecond(n, took), errors.Join(err, s.expectRows(ctx, n))
	}}
}

func (s *posts) bare() side { return s.at("bare transaction", s.bareURL) }

func (s *posts) alone() side { return s.at("TxMiddleware, each alone", s.aloneURL) }

// at posts to an address.
func (s *posts) at(name, address string) side {
	return side{name: name, n: idempotencyRequests, run: func(ctx context.Context, n int) (float64, error) {
		if err := s.empty(ctx, 0); err != nil {
			return 0, err
		}
		took, err := s.post(ctx, address, n, s.run.Add(1), false)
		return perSecond(n, took), errors.Join(err, s.expectRows(ctx, n))
	}}
}

func (s *posts) replays() side {
	return side{name: "replay", n: idempotencyRequests, run: func(ctx context.Context, n int) (float64, error) {
		if err := s.empty(ctx, 0); err != nil {
			return 0, err
		}
		run := s.run.Add(1)
		if _, err := s.post(ctx, s.url, n, run, false); err != nil {
			return 0, err
		}
		if err := s.b.exec(ctx, "settle", `checkpoint`); err != nil {
			return 0, err
		}
		took, err := s.post(ctx, s.url, n, run, true)
		return perSecond(n, took), errors.Join(err, s.expectRows(ctx, n))
	}}
}

func (s *posts) expectRows(ctx context.Context, n int) error {
	var got int
	if err := s.db.QueryRowContext(ctx, `select count(*) from posted`).Scan(&got); err != nil {
		return err
	}
	if got != n {
		return fmt.Errorf("%d rows after %d requests", got, n)
	}
	return nil
}

// post posts n requests with keys of the run.
func (s *posts) post(ctx context.Context, address string, n int, run int64, replayed bool) (time.Duration, error) {
	var next atomic.Int64
	var working sync.WaitGroup
	errs := make([]error, idempotencyClients)
	began := time.Now()
	for c := range idempotencyClients {
		working.Go(func() {
			for {
				i := next.Add(1) - 1
				if i >= int64(n) {
					return
				}
				if errs[c] = s.postOne(ctx, address, fmt.Sprintf("%d-%d", run, i), replayed); errs[c] != nil {
					return
				}
			}
		})
	}
	working.Wait()
	return time.Since(began), errors.Join(errs...)
}

func (s *posts) postOne(ctx context.Context, address, key string, replayed bool) error {
	body := `{"order": "` + key + `", "note": "` + strings.Repeat("x", 460) + `"}`
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, address+"/", strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Idempotency-Key", key)
	r.Header.Set("Content-Type", "application/json")
	response, err := s.client.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode != http.StatusCreated || string(text) != body:
		return fmt.Errorf("answered with %d: %s", response.StatusCode, text)
	case (response.Header.Get("Idempotency-Replayed") == "true") != replayed:
		return fmt.Errorf("replayed: %t, want %t", !replayed, replayed)
	}
	return nil
}
