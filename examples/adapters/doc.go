// Package adapters shows idempotency behind routers other than net/http's. A
// middleware of net/http fits wherever the router takes one (chi), or lends its
// writer and request to one (gin, echo).
package adapters
