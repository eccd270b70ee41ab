package idempotency_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

var byAda = idempotency.Act{By: "ada", Reason: "asked the provider"}

// admin returns the operators' side of p, with the audit.
func (p *testDB) admin(t *testing.T, cfg idempotency.AdminConfig) *idempotency.Admin {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), p.db, p.cfg, audit.Migrations); err != nil {
		t.Fatal(err)
	}
	admin, err := idempotency.NewAdmin(p.store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return admin
}

func (p *testDB) audited(t *testing.T) []audit.Entry {
	t.Helper()
	log, err := audit.New(p.db, audit.Config{Database: p.cfg})
	if err != nil {
		t.Fatal(err)
	}
	entries, err := log.List(t.Context(), audit.Filter{OldestFirst: true})
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

func keys(t *testing.T, admin *idempotency.Admin, f idempotency.Filter) []idempotency.Key {
	t.Helper()
	page, err := admin.List(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	return page.Keys
}

func onlyKey(t *testing.T, admin *idempotency.Admin, f idempotency.Filter) idempotency.Key {
	t.Helper()
	all := keys(t, admin, f)
	if len(all) != 1 {
		t.Fatalf("%d keys: %+v", len(all), all)
	}
	return all[0]
}

// badGateway is a handler that fails the first time, after its effect.
func badGateway(runs *atomic.Int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if runs.Add(1) == 1 {
			w.WriteHeader(http.StatusBadGateway)
		}
	})
}

func TestAdmin_SettlesAnUnknownOutcomeOnceAndAuditsIt(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		admin := p.admin(t, idempotency.AdminConfig{})
		var runs atomic.Int64
		handler := p.engine(t, nil).Middleware(badGateway(&runs))
		do(t, handler, post("/orders", "x"))
		key := onlyKey(t, admin, idempotency.Filter{})
		if key.Phase != idempotency.PhaseInterrupted || key.Endpoint != "POST /probe" || key.LeaseLeft > 0 || key.CreatedAt.IsZero() {
			t.Errorf("%+v", key)
		}
		found := idempotency.Recovery{Status: 201, Header: http.Header{"Location": {"/orders/7"}}, Body: []byte("made")}
		for _, bad := range []idempotency.Act{{By: "ada"}, {Reason: "x"}, {By: " ", Reason: "x"}} {
			if err := admin.Settle(t.Context(), key, found, bad); !errors.Is(err, idempotency.ErrNoActor) && !errors.Is(err, idempotency.ErrNoReason) {
				t.Errorf("%+v: %v", bad, err)
			}
		}
		var refusal *idempotency.RecoveryError
		if err := admin.Settle(t.Context(), key, idempotency.Recovery{Status: 99}, byAda); !errors.As(err, &refusal) {
			t.Errorf("no answer: %v", err)
		}
		var settled atomic.Int64
		var acting sync.WaitGroup
		for range 5 {
			acting.Go(func() {
				switch err := admin.Settle(t.Context(), key, found, byAda); {
				case err == nil:
					settled.Add(1)
				case !errors.Is(err, idempotency.ErrNotUnknown) && !errors.Is(err, idempotency.ErrKeyChanged):
					t.Error(err)
				}
			})
		}
		acting.Wait()
		w := do(t, handler, post("/orders", "x"))
		if settled.Load() != 1 || w.Code != 201 || w.Body.String() != "made" || w.Header().Get("Location") != "/orders/7" || runs.Load() != 1 {
			t.Errorf("settled %d times, then %d %q, %d runs", settled.Load(), w.Code, w.Body, runs.Load())
		}
		entries := p.audited(t)
		if len(entries) != 1 {
			t.Fatalf("%+v", entries)
		}
		if e := entries[0]; e.By != "ada" || e.Reason != byAda.Reason || e.Action != "idempotency_key.settle" || e.Subject != "idempotency_key "+hex.EncodeToString(key.ID[:]) || strings.Contains(e.Details, "made") {
			t.Errorf("%+v", e)
		}
		// What has been settled is not released by somebody who saw it before.
		if err := admin.Release(t.Context(), key, byAda); !errors.Is(err, idempotency.ErrKeyChanged) {
			t.Errorf("released what was settled meanwhile: %v", err)
		}
	})
}

func TestAdmin_ReleasesAKeyThatIsNotRunning(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		admin := p.admin(t, idempotency.AdminConfig{})
		var runs atomic.Int64
		handler := p.engine(t, nil).Middleware(badGateway(&runs))
		do(t, handler, post("/", "x"))
		key := onlyKey(t, admin, idempotency.Filter{})
		if err := admin.Release(t.Context(), key, byAda); err != nil {
			t.Fatal(err)
		}
		if w := do(t, handler, post("/", "x")); w.Code != 200 || runs.Load() != 2 {
			t.Errorf("%d, %d runs", w.Code, runs.Load())
		}
		if err := admin.Release(t.Context(), key, byAda); !errors.Is(err, idempotency.ErrKeyChanged) {
			t.Errorf("released the run of another owner: %v", err)
		}
		key = onlyKey(t, admin, idempotency.Filter{Phases: []idempotency.Phase{idempotency.PhaseCompleted}})
		if err := admin.Release(t.Context(), key, byAda); err != nil {
			t.Fatal(err)
		}
		if w := do(t, handler, post("/", "x")); w.Code != 200 || runs.Load() != 3 {
			t.Errorf("%d, %d runs", w.Code, runs.Load())
		}
		if entries := p.audited(t); len(entries) != 2 || entries[1].Action != "idempotency_key.release" {
			t.Errorf("%+v", entries)
		}
	})
}

// A running key is left alone, by whatever it looked like before, and its owner completes.
func TestAdmin_LeavesARunningKeyAlone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		admin := p.admin(t, idempotency.AdminConfig{})
		started, ended := make(chan struct{}), make(chan struct{})
		handler := p.engine(t, nil).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			close(started)
			<-ended
			w.WriteHeader(http.StatusCreated)
		}))
		var answering sync.WaitGroup
		answering.Go(func() {
			if w := do(t, handler, post("/", "x")); w.Code != http.StatusCreated {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
		<-started
		key := onlyKey(t, admin, idempotency.Filter{Phases: []idempotency.Phase{idempotency.PhaseRunning}})
		if err := admin.Release(t.Context(), key, byAda); !errors.Is(err, idempotency.ErrKeyRunning) {
			t.Errorf("release: %v", err)
		}
		key.Phase = idempotency.PhaseInterrupted // as it was seen before a takeover
		if err := admin.Release(t.Context(), key, byAda); !errors.Is(err, idempotency.ErrKeyRunning) {
			t.Errorf("release: %v", err)
		}
		if err := admin.Settle(t.Context(), key, idempotency.Failed(), byAda); !errors.Is(err, idempotency.ErrKeyRunning) {
			t.Errorf("settle: %v", err)
		}
		close(ended)
		answering.Wait()
		if err := admin.Settle(t.Context(), key, idempotency.Failed(), byAda); !errors.Is(err, idempotency.ErrNotUnknown) {
			t.Errorf("settle after its end: %v", err)
		}
		if entries := p.audited(t); len(entries) > 0 {
			t.Errorf("%+v", entries)
		}
	})
}

// Whoever is first decides: the settled answer, and then the owner's effects are rolled
// back; or the owner's answer. Never both.
func TestAdmin_SettlesWhileTheOwnerFinishes(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		admin := p.admin(t, idempotency.AdminConfig{})
		effects := p.effects(t)
		for _, c := range []struct {
			when   string // in the handler, or a point of the engine
			settle error  // its result; nil: it is first
		}{
			{"handler", nil},
			{"before commit", idempotency.ErrKeyChanged}, // the owner has completed, and not committed
			{"after commit", idempotency.ErrNotUnknown},
		} {
			if p.driver == "sqlite" && c.when != "after commit" {
				continue // there is one writer, and it is the handler
			}
			engine := p.engine(t, nil)
			var key idempotency.Key
			var settleErr error
			settle := func() { settleErr = admin.Settle(t.Context(), key, idempotency.Failed(), byAda) }
			engine.At(func(point string) {
				if point == c.when {
					settle()
				}
			})
			handler := engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				p.lapse(t, r)
				key = onlyKey(t, admin, idempotency.Filter{})
				if key.Phase = idempotency.PhaseInterrupted; c.when == "handler" {
					settle()
				}
				if err := effects.Add(r.Context(), c.when); err != nil {
					t.Error(err)
				}
				w.WriteHeader(http.StatusCreated)
			}))
			w := do(t, handler, post("/", "x", withKey(strings.ReplaceAll(c.when, " ", "-"))))
			counts, err := effects.Count(t.Context(), c.when)
			if err != nil {
				t.Fatal(err)
			}
			status, happened := http.StatusCreated, 1
			if c.settle == nil {
				status, happened = http.StatusUnprocessableEntity, 0
			}
			if w.Code != status || counts.Effects != happened || !errors.Is(settleErr, c.settle) {
				t.Errorf("%s: %d %s, %d effects, settle: %v", c.when, w.Code, w.Body, counts.Effects, settleErr)
			}
		}
	})
}

// lapse ends the lease of the key that runs, as if its process had been stopped for long.
func (p *testDB) lapse(t *testing.T, r *http.Request) {
	t.Helper()
	if p.driver == "sqlite" { // in the transaction of the handler, which has the turn
		tx, _ := idempotency.TxFromContext(r.Context())
		if _, err := tx.ExecContext(r.Context(), p.expand(t, `update {{idempotency}} set lease_until = 1 where state = 1`)); err != nil {
			t.Fatal(err)
		}
		return
	}
	p.exec(t, `update {{idempotency}} set lease_until = statement_timestamp() - interval '1 second' where state = 1`)
}

func TestAdmin_SettlesWithTheEncryptionOfTheEngine(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		encryption := &idempotency.Encryption{Current: "k", Keys: map[string]oncemill.Secret{"k": oncemill.NewSecret([]byte("0123456789abcdef"))}}
		admin := p.admin(t, idempotency.AdminConfig{Encryption: encryption})
		var runs atomic.Int64
		handler := p.engine(t, func(c *idempotency.Config) { c.Responses.Encryption = encryption }).Middleware(badGateway(&runs))
		do(t, handler, post("/", "x"))
		found := idempotency.Recovery{Status: 201, Header: http.Header{"Location": {"/orders/7"}}, Body: []byte(strings.Repeat("made", 50_000))}
		if err := admin.Settle(t.Context(), onlyKey(t, admin, idempotency.Filter{}), found, byAda); err != nil {
			t.Fatal(err)
		}
		if w := do(t, handler, post("/", "x")); w.Code != 201 || w.Body.String() != string(found.Body) {
			t.Errorf("%d, %d bytes", w.Code, w.Body.Len())
		}
		key := onlyKey(t, admin, idempotency.Filter{Phases: []idempotency.Phase{idempotency.PhaseCompleted}})
		answer, err := admin.Answer(t.Context(), key)
		if err != nil || string(answer.Body) != string(found.Body) || answer.Header.Get("Location") != "/orders/7" || key.Location != "/orders/7" || key.Size < 200_000 {
			t.Errorf("%v: %d bytes, %+v", err, len(answer.Body), key)
		}
		blind := p.admin(t, idempotency.AdminConfig{})
		if key := onlyKey(t, blind, idempotency.Filter{Phases: []idempotency.Phase{idempotency.PhaseCompleted}}); key.Location != "" {
			t.Errorf("shown without the key: %q", key.Location)
		}
		if _, err := blind.Answer(t.Context(), key); !errors.Is(err, idempotency.ErrDecode) {
			t.Errorf("decoded without the key: %v", err)
		}
	})
}

func TestAdmin_FindsAKeyByTheDigitsOfALog(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		admin := p.admin(t, idempotency.AdminConfig{})
		handler := p.engine(t, nil).Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		for _, key := range []string{"a", "b", "c"} {
			do(t, handler, post("/", "x", withKey(key)))
		}
		for _, key := range keys(t, admin, idempotency.Filter{Phases: []idempotency.Phase{idempotency.PhaseCompleted}}) {
			whole := hex.EncodeToString(key.ID[:])
			for _, hash := range []string{key.ID.String(), whole, key.ID.Token(), strings.ToUpper(whole[:20])} {
				if found, err := admin.Find(t.Context(), hash); err != nil || found.ID != key.ID {
					t.Errorf("%s: %v", hash, err)
				}
			}
		}
		for _, hash := range []string{"", "12", "00000000000", "zzzzzzzzzzzz", strings.Repeat("00", 33), strings.Repeat("00", 32), strings.Repeat("ff", 32), "000000000000"} {
			if _, err := admin.Find(t.Context(), hash); !errors.Is(err, idempotency.ErrKeyNotFound) {
				t.Errorf("%q: %v", hash, err)
			}
		}
		var bad *oncemill.ConfigError
		for _, f := range []idempotency.Filter{{Limit: -1}, {Limit: 1001}, {Phases: []idempotency.Phase{"done"}}} {
			if _, err := admin.List(t.Context(), f); !errors.As(err, &bad) {
				t.Errorf("%+v: %v", f, err)
			}
		}
	})
}

// One client has 100,000 interrupted keys; the keys of another are found, in bounded time.
func TestAdmin_ListsBeside100000KeysOfOneClient(t *testing.T) {
	flood := testserver.Rounds(10_000, 100_000)
	onEachDB(t, func(t *testing.T, p *testDB) {
		admin := p.admin(t, idempotency.AdminConfig{})
		p.flood(t, flood)
		one, other := idempotency.Caller{1}, idempotency.Caller{2}
		begin := time.Now()
		if page, err := admin.List(t.Context(), idempotency.Filter{Caller: &one, Limit: 1000}); err != nil || len(page.Keys) != 1000 {
			t.Errorf("%d keys, %v", len(page.Keys), err)
		}
		middle := idempotency.ID{0x80}
		behind, err := admin.List(t.Context(), idempotency.Filter{Caller: &one, After: middle, Limit: 1000})
		if err != nil || len(behind.Keys) != 1000 || slices.ContainsFunc(behind.Keys, func(k idempotency.Key) bool { return bytes.Compare(k.ID[:], middle[:]) <= 0 }) {
			t.Errorf("%d keys behind one, %v", len(behind.Keys), err)
		}
		if found := keys(t, admin, idempotency.Filter{Caller: &other}); len(found) != 1 {
			t.Errorf("%d keys of the other", len(found))
		}
		var all int
		f := idempotency.Filter{Caller: &other, Phases: []idempotency.Phase{idempotency.PhaseCompleted, idempotency.PhaseInterrupted}}
		for more := true; more; {
			page, err := admin.List(t.Context(), f)
			if err != nil {
				t.Fatal(err)
			}
			all, more, f.After = all+len(page.Keys), page.More, page.Next
		}
		if all != 2 {
			t.Errorf("%d keys of the other in the table", all)
		}
		t.Logf("listed in %s", time.Since(begin))
		done, err := admin.Erase(t.Context(), one, byAda)
		if err != nil || done.Keys != flood || done.Left != 0 {
			t.Errorf("%+v, %v", done, err)
		}
		if n := p.count(t, `select count(*) from {{idempotency}}`); n != 2 {
			t.Errorf("%d left", n)
		}
		t.Logf("erased after %s", time.Since(begin))
	})
}

// flood writes n interrupted keys of caller 1, and two keys of caller 2.
func (p *testDB) flood(t *testing.T, n int) {
	t.Helper()
	text := `
		insert into {{idempotency}} (key_hash, caller, fingerprint, state, owner, fence, endpoint, created_at, completed_at, lease_until, expires_at, forget_at)
		with recursive n (i) as (select 1 union all select i + 1 from n where i < $1 + 2)
		select HASH, case when i <= $1 then ONE else TWO end, EMPTY, case when i = $1 + 2 then 2 else 1 end, EMPTY, 1, 'POST /', NOW, case when i = $1 + 2 then NOW else null end, NOW - SECOND, NOW + SECOND * 3600, NOW + SECOND * 3600
		from n`
	one, two := "01"+strings.Repeat("00", 15), "02"+strings.Repeat("00", 15)
	values := []string{"HASH", "sha256(int8send(i))", "ONE", `'\x` + one + `'::bytea`, "TWO", `'\x` + two + `'::bytea`, "EMPTY", `''::bytea`, "NOW", "statement_timestamp()", "SECOND", "interval '1 second'", "$1", "$1::bigint"}
	if p.driver == "sqlite" {
		values = []string{"HASH", "randomblob(32)", "ONE", "x'" + one + "'", "TWO", "x'" + two + "'", "EMPTY", "x''", "NOW", "cast(unixepoch('subsec') * 1000000 as integer)", "SECOND", "1000000"}
	}
	p.exec(t, strings.NewReplacer(values...).Replace(text), n)
}

func TestAdmin_ChangesNothingWithoutTheAudit(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		admin, err := idempotency.NewAdmin(p.store, idempotency.AdminConfig{})
		if err != nil {
			t.Fatal(err)
		}
		var runs atomic.Int64
		handler := p.engine(t, nil).Middleware(badGateway(&runs))
		do(t, handler, post("/", "x"))
		key := onlyKey(t, admin, idempotency.Filter{})
		for _, err := range []error{
			admin.Settle(t.Context(), key, idempotency.Failed(), byAda), admin.Release(t.Context(), key, byAda),
			func() error { _, err := admin.Erase(t.Context(), key.Caller, byAda); return err }(),
		} {
			if !errors.Is(err, idempotency.ErrNoAudit) {
				t.Errorf("got %v", err)
			}
		}
		expectProblem(t, do(t, handler, post("/", "x")), http.StatusConflict, "outcome-unknown")
	})
}

func TestNewAdmin_RefusesBadValuesTogether(t *testing.T) {
	t.Parallel()
	_, err := idempotency.NewAdmin(nil, idempotency.AdminConfig{
		Retention: time.Millisecond, RefuseFor: -1, Cache: newMemoryCache(), Encryption: &idempotency.Encryption{Current: filepath.Base("k")},
	})
	if n := len(testserver.ConfigErrors(err)); n != 5 {
		t.Errorf("%d errors: %v", n, err)
	}
}

// While a successor takes an interrupted key over, an operator releases it: one of them gets
// it. A key that runs is never deleted.
func TestAdmin_ReleasesDuringATakeover(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		admin := p.admin(t, idempotency.AdminConfig{})
		for i := range 20 {
			claim := idempotency.Claim{ID: idempotency.ID{byte(i)}, Token: [16]byte{1}, Endpoint: "POST /", Lease: time.Minute, Retention: time.Hour, Durable: true}
			first, granted, err := p.store.Claim(t.Context(), claim)
			if err != nil || !granted {
				t.Fatal(granted, err)
			}
			if err := p.store.Extend(t.Context(), claim.ID, first.Owner, 0); err != nil {
				t.Fatal(err)
			}
			key := onlyKey(t, admin, idempotency.Filter{Phases: []idempotency.Phase{idempotency.PhaseInterrupted}})
			var taken bool
			var takeErr, releaseErr error
			var racing sync.WaitGroup
			racing.Go(func() {
				claim.Token = [16]byte{2}
				_, taken, takeErr = p.store.TakeOver(t.Context(), claim, first.Owner)
			})
			racing.Go(func() { releaseErr = admin.Release(t.Context(), key, byAda) })
			racing.Wait()
			_, found, err := p.store.Find(t.Context(), claim.ID)
			released := releaseErr == nil
			refused := errors.Is(releaseErr, idempotency.ErrKeyRunning) || errors.Is(releaseErr, idempotency.ErrKeyChanged)
			if takeErr != nil || err != nil || taken == released && taken || found == released || !released && !refused {
				t.Errorf("taken over %t (%v), release: %v, found %t (%v)", taken, takeErr, releaseErr, found, err)
			}
			if found {
				p.exec(t, `delete from {{idempotency}}`)
			}
		}
	})
}
