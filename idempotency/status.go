package idempotency

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"path"
)

// StatusHandler answers GET requests for Config.Answers.StatusPath and a token, as found
// in the answers in-progress and outcome-unknown, with the state of a key:
//
//	{"state": "completed", "status": 201, "location": "/orders/7"}
//
// The states are started, interrupted (its outcome is unknown, or with TxMiddleware it
// runs when it is sent again), completed, not_replayable and expired. With status 404 the
// state is absent: the key has no record, because its run had no effect or it was purged;
// the request may be sent again. Only the caller who owns the key sees more than that, so
// put the handler behind the same authentication.
func (e *Engine) StatusHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET", http.StatusMethodNotAllowed)
			return
		}
		id, ok := parseToken(path.Base(r.URL.Path))
		if !ok {
			http.NotFound(w, r)
			return
		}
		scope, err := e.scopeOf(r)
		if none := (*ScopeError)(nil); errors.As(err, &none) {
			http.NotFound(w, r)
			return
		}
		if err != nil {
			e.logScope(r.Context(), err)
			e.cfg.Answers.Write(w, r, e.problem(ProblemInternal))
			return
		}
		record, found, err := e.store.Find(r.Context(), id)
		switch {
		case err != nil:
			level, attrs := e.events.of(storeUnavailable).Failed(slog.LevelError, err.Error())
			e.cfg.Logger.Log(r.Context(), level, "idempotency store unavailable", append(attrs, "error", err)...)
			e.cfg.Answers.Write(w, r, e.problem(ProblemStoreUnavailable))
			return
		case !found || record.Caller != hashCaller(e.hash, scope):
			writeState(w, http.StatusNotFound, Record{}, "absent")
			return
		}
		state := record.State.String()
		if record.State == StateStarted {
			w.Header().Set("Retry-After", seconds(e.cfg.Answers.RetryAfter))
			if record.LeaseLeft <= 0 {
				state = "interrupted"
			}
		}
		writeState(w, http.StatusOK, e.reveal(record), state)
	})
}

func writeState(w http.ResponseWriter, status int, record Record, state string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(struct { // a client that is gone needs no answer
		State      string `json:"state"`
		Status     int    `json:"status,omitempty"`
		Location   string `json:"location,omitempty"`
		ResourceID string `json:"resource_id,omitempty"`
	}{state, record.Status, record.Location, record.ResourceID})
}
