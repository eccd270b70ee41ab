// Package adapters shows how to use idempotency with routers other than net/http's: chi takes
// a net/http middleware, and gin and echo get a handler that calls it.
package adapters
