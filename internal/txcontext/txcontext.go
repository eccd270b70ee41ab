// Package txcontext is how a context carries a transaction. Users have it by
// oncemill.ContextWithTx and oncemill.TxFromContext.
package txcontext

import "context"

type key struct{}

// With returns a context that carries tx.
func With(ctx context.Context, tx any) context.Context { return context.WithValue(ctx, key{}, tx) }

// From returns what With put into ctx, or nil.
func From(ctx context.Context) any { return ctx.Value(key{}) }
