package idempotency

import "net/http"

// Scope identifies the caller and operation that a key belongs to. The same key in another
// scope is another key.
type Scope struct {
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
	return func(*http.Request) (Scope, error) { return Scope{}, nil }
}

func hashCaller(hash hasher, scope Scope) (c Caller) {
	id := hashID(hash, "oncemill idempotency caller", scope.Tenant, scope.Principal)
	copy(c[:], id[:])
	return c
}
