// Package oncemill holds what all oncemill packages share: the database dialects
// ([Dialect]), the location of the tables ([Config]), the caller's transaction ([Tx])
// and how a context carries it ([ContextWithTx]), and the migrations that create the
// tables ([Migrate]).
//
// The building blocks are separate packages. Package outbox writes messages in the
// caller's transaction, relay delivers them, inbox applies the effects of a message
// once, and idempotency runs a retried HTTP request once.
//
//	cfg := oncemill.Config{}
//	err := oncemill.Migrate(ctx, db, cfg, outbox.Migrations, audit.Migrations, steer.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations, idempotency.Migrations)
package oncemill
