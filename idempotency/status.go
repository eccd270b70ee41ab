package idempotency

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"path"
)

func statusToken(id ID) string { return base64.RawURLEncoding.EncodeToString(id[:]) }

// StatusHandler answers GET requests for Config.StatusPath and a token, as the
// answers in-progress and outcome-unknown name them, with the state of a key:
//
//	{"state": "completed", "status": 201, "location": "/orders/7"}
//
// The states are started, interrupted (its owner died), completed, not_replayable
// and expired. Only the caller whose key it is may see it, so it belongs behind the
// same authentication; everybody else gets 404.
func (e *Engine) StatusHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET", http.StatusMethodNotAllowed)
			return
		}
		raw, err := base64.RawURLEncoding.DecodeString(path.Base(r.URL.Path))
		if err != nil || len(raw) != len(ID{}) || e.cfg.Scope == nil {
			http.NotFound(w, r)
			return
		}
		scope, err := e.cfg.Scope(r)
		if err != nil {
			http.NotFound(w, r)
			return
		}
		record, found, err := e.store.Find(r.Context(), ID(raw))
		switch {
		case err != nil:
			e.cfg.Logger.ErrorContext(r.Context(), "idempotency store unavailable", "error", err)
			e.cfg.Answer(w, r, e.problem(ProblemStoreUnavailable))
			return
		case !found || record.Caller != hashCaller(e.cfg.Secret, scope):
			http.NotFound(w, r)
			return
		}
		state := record.State.String()
		if record.State == Started {
			w.Header().Set("Retry-After", seconds(e.cfg.RetryAfter))
			if record.LeaseLeft <= 0 {
				state = "interrupted"
			}
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		_ = json.NewEncoder(w).Encode(struct { // a client that has gone needs no answer
			State      string `json:"state"`
			Status     int    `json:"status,omitempty"`
			Location   string `json:"location,omitempty"`
			ResourceID string `json:"resource_id,omitempty"`
		}{state, record.Status, record.Location, record.ResourceID})
	})
}
