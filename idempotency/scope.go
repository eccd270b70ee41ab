package idempotency

import "net/http"

// Scope identifies the caller and operation that a key belongs to. The same key in another
// scope is another key.
type Scope struct {
	single bool // see SingleTenant

	Tenant    string
	Principal string // user, or client of the API

	// Route is the operation. Default: the pattern that http.ServeMux matched. If there is
	// none, because the middleware is outside the mux: the path. The method is always part
	// of the scope.
	Route string
}

// SingleTenant is a Config.Scope for services that have only one caller. With several
// callers, one could replay another's answer by guessing its key.
func SingleTenant() func(*http.Request) (Scope, error) {
	return func(*http.Request) (Scope, error) { return Scope{single: true}, nil }
}

// ScopeError is an error of Config.Scope for a request whose caller cannot be identified.
// It is answered as [ProblemScopeMissing], with its status and detail, and not logged.
type ScopeError struct {
	Status int    // 400 to 499. Default: 400
	Detail string // for the client. Default: that of the problem
}

func (e *ScopeError) Error() string { return "idempotency: no scope: " + e.Detail }

// scopeOf returns the scope of a request. Callers that share an empty scope could replay
// each other's answers, so it is an error unless it is that of SingleTenant.
func (c *core) scopeOf(r *http.Request) (Scope, error) {
	scope, err := c.cfg.Scope(r)
	if err == nil && scope.Tenant == "" && scope.Principal == "" && !scope.single {
		err = &ScopeError{}
	}
	return scope, err
}

func hashCaller(hash hasher, scope Scope) (c Caller) {
	id := hashID(hash, "oncemill idempotency caller", scope.Tenant, scope.Principal)
	copy(c[:], id[:])
	return c
}
